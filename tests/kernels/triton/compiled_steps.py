"""Has all steps of small engines compiled for a Hopper device that is not there, and writes what was launched, and changed.

Compiled in earnest with the argument "all"; else a kernel stands for itself, and only what torch does is seen.

What memory holds before anything is written to it is out of every bound here. Triton must not be interpreting.
"""

import json
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebit.core.config import EngineConfig, SpeculativeConfig
from samebit.engine import device, loading
from samebit.engine.engine import Engine
from samebit.kernels.triton import attention, experts
from samebit.kernels.triton import set as triton_set
from samebit.models.hash import HashConfig, save_hash
from samebit.state.pools import StatePools
from tests.kernels.triton.compiled_ahead import Absent
from tests.random_checkpoint import write_checkpoint
from tests.speculative.block_checkpoint import METHODS, write_drafter

OUT_OF_BOUNDS = 1 << 30
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 4}


class Poison(TorchDispatchMode):
    """Memory that nobody has written yet holds large numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "empty" in func.name() and made.dtype in (torch.int32, torch.int64):
            made.fill_(OUT_OF_BOUNDS)
        return made


def engine_without_device(patches: pytest.MonkeyPatch, model: Path, **settings: object) -> Engine:
    """An engine that could run nothing: its kernels are for a device."""
    patches.setattr(triton_set, "check_device", lambda _: None)
    patches.setattr(triton_set, "make_library_rows", lambda *_: lambda _: frozenset())
    patches.setattr(loading, "certify", lambda *_args, **_options: [])
    for module in (attention, experts):
        patches.setattr(module, "num_programs", lambda *_: 132)
    return Engine(EngineConfig(model=str(model), kernels="triton", **SETTINGS, **settings))


def state_of(pools: StatePools) -> list[Tensor]:
    """Every tensor of the state."""
    tables = [getattr(pools.tables, field.name) for field in fields(pools.tables)]
    kept = [
        pools.row_tags,
        *pools.page_tags,
        *(stream.rows for stream in pools.conv),
        *(tensor for of in tables for tensor in of),
    ]
    return kept + [tensor for group in pools.kv for layer in group for tensor in (layer.k, layer.v)]


def compile_all(engine: Engine) -> dict[str, int]:
    """Have all steps compiled that the engine would capture; how many sizes there are, and how much of the state has changed."""
    buckets = device.buckets_of(engine._config, engine._loaded, engine.pools.geometry)
    before = [tensor.clone() for tensor in state_of(engine.pools)]
    with Poison():
        engine._runner.compile(buckets)
    changed = [not torch.equal(a, b) for a, b in zip(before, state_of(engine.pools), strict=True)]
    return {"buckets": len(buckets), "tensors": len(changed), "changed": sum(changed)}


class Compiled:
    """A kernel that needs no compiling."""

    run = None


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    names: set[str] = set()
    warmup = triton.JITFunction.warmup

    def noted(kernel, *args, **options):
        names.add(kernel.fn.__name__)
        return warmup(kernel, *args, **options) if sys.argv[1:] == ["all"] else Compiled()

    with pytest.MonkeyPatch.context() as patches, tempfile.TemporaryDirectory() as folder:
        patches.setattr(triton.JITFunction, "warmup", noted)
        small = write_checkpoint(Path(folder) / "small", depths=2)
        drafter = write_drafter(Path(folder) / "drafter", METHODS["dspark"])[0]
        guesses = [SpeculativeConfig(method="mtp"), SpeculativeConfig(method="dspark", model=str(drafter))]
        engines = [engine_without_device(patches, small, speculative_config=one) for one in guesses]
        hashed = save_hash(Path(folder) / "hash", HashConfig(mixers=("full", 6, "conv")))
        engines.append(engine_without_device(patches, hashed))
        found = [compile_all(engine) for engine in engines]
    json.dump({"engines": found, "kernels": sorted(names)}, sys.stdout)


if __name__ == "__main__":
    main()
