"""What this installation is and what it runs on. Knows versions and hardware; reads no settings and no environment."""

import importlib.metadata
import os
import platform

import psutil
import torch

from samebit.bench.environment import cpu_name
from samebit.core.errors import SamebitError
from samebit.kernels.native.build import NativeUnavailableError
from samebit.kernels.selection import select_kernels

_PACKAGES = (
    "fastapi msgspec numpy prometheus-client pydantic pyzmq safetensors tokenizers triton uvicorn uvloop".split()
)


def describe() -> dict[str, str | int]:
    """By name, in the order in which a reader wants it."""
    memory = psutil.virtual_memory()
    found: dict[str, str | int] = {
        "samebit": importlib.metadata.version("samebit"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB of it free",
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or "none"),
        "gpus": _gpus(),
        "kernels": _kernels(),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu() -> str:
    return f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return ", ".join(f"{each.name} ({each.total_memory / 1e9:.0f} GB)" for each in names)


def _kernels() -> str:
    """What a CPU would compute with; building them is part of the answer."""
    try:
        return select_kernels("native", 1).name
    except (NativeUnavailableError, SamebitError) as error:
        return f"torch ({error})"
