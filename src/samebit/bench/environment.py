"""What a measurement depends on: machine, versions, the engine's numerics. Loads nothing heavy; reads no settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from samebit.core.request import EngineInfo

_PACKAGES = ("samebit", "torch", "triton", "tokenizers", "uvloop")


def machine() -> dict[str, Any]:  # Any: texts, numbers and one level of them
    """The machine that runs this process, with its load right now and the versions that matter."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load": round(psutil.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def environment(info: EngineInfo) -> dict[str, Any]:  # Any: as above
    """The same for figures of an engine in this process, with what decides its bits and its memory."""
    return {
        **machine(),
        "profile": info.profile,
        "system_fingerprint": info.system_fingerprint,
        "memory": info.memory,
    }


def cpu_name() -> str:
    """The processor's name, or at least its kind."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
