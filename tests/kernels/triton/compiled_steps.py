"""Compiles all steps of a small engine for a Hopper device that is not there, and writes what was compiled.

What memory holds before anything is written to it is out of every bound here. Triton must not be interpreting.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from samebit.core.config import EngineConfig, SpeculativeConfig
from samebit.engine import device, loading
from samebit.engine.engine import Engine
from samebit.kernels.triton import attention, experts
from samebit.kernels.triton import set as triton_set
from tests.kernels.triton.compiled_ahead import Absent
from tests.random_checkpoint import write_checkpoint

OUT_OF_BOUNDS = 1 << 30
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 4}


class Poison(TorchDispatchMode):
    """Memory that nobody has written yet holds large numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "empty" in func.name() and made.dtype in (torch.int32, torch.int64):
            made.fill_(OUT_OF_BOUNDS)
        return made


def engine_without_device(patches: pytest.MonkeyPatch) -> Engine:
    """An engine that could run nothing: its kernels are for a device."""
    patches.setattr(triton_set, "check_device", lambda _: None)
    patches.setattr(triton_set, "make_library_rows", lambda *_: lambda _: frozenset())
    patches.setattr(loading, "certify", lambda *_args, **_options: [])
    for module in (attention, experts):
        patches.setattr(module, "num_programs", lambda *_: 132)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_checkpoint(Path(folder), depths=2))
        guesses = SpeculativeConfig(method="mtp")
        return Engine(EngineConfig(model=model, kernels="triton", speculative_config=guesses, **SETTINGS))


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    with pytest.MonkeyPatch.context() as patches:
        engine = engine_without_device(patches)
        buckets = device.buckets_of(engine._config, engine._loaded, engine.pools.geometry)
        with Poison():
            engine._runner.compile(buckets)
    names = [
        value.fn.__name__
        for name, module in sorted(sys.modules.items())
        if name.startswith("samebit.kernels.triton.")
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction) and value.fn.__module__ == name and value.device_caches
    ]
    json.dump({"buckets": len(buckets), "kernels": names}, sys.stdout)


if __name__ == "__main__":
    main()
