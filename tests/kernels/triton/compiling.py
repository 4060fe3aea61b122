"""Runs a module of this folder in a process that compiles kernels, for a device that need not be there, and does not interpret them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def told(module: str, cache: Path, *arguments: str) -> Any:
    """The JSON that a module writes; kernels are compiled into the folder ``cache``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", f"tests.kernels.triton.{module}", *arguments]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
