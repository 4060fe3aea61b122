"""Versions and machine of an audit. Knows nothing of what is audited."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime

from samebit.audit.values import Environment


def this_environment() -> Environment:
    """Where this process runs; the time is UTC."""
    try:
        version = importlib.metadata.version("samebit")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return Environment(
        samebit=version,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        num_cpus=os.cpu_count() or 1,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
