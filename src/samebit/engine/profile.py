"""The numerics profile and the fingerprint: what the bits of an answer depend on beside the request."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from samebit.core.config import EngineConfig
from samebit.kernels.sets import KernelSet

_BLOCK_BYTES = 1 << 16
_WHOLE_FILE_BYTES = 1 << 30


def numerics_profile(config: EngineConfig, kernels: KernelSet) -> dict[str, str | int]:
    """Device, dtype, kernels and versions; the promise of equal bits holds within one profile.

    Thread counts, batch limits and pool sizes are not part of it: they change no bit.
    """
    return {"device": config.device, "dtype": kernels.element, "torch": str(torch.__version__), **kernels.describe()}


def fingerprint(folder: Path, profile: dict[str, str | int]) -> str:
    """`fp_` and 16 hex digits over the weights in `folder` and `profile`."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((*folder.glob("*.safetensors"), folder / "config.json")):
        digest.update(path.name.encode())
        _add_file(digest, path)
    digest.update(msgspec.json.encode(sorted(profile.items())))
    return f"fp_{digest.hexdigest()}"


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    """All of a file up to 1 GiB; of a larger one its size, its start and a block of every part in 4,096."""
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
            return
        for part in range(4096):
            file.seek(size * part // 4096)
            digest.update(file.read(_BLOCK_BYTES))
