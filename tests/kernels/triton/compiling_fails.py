"""Has a kernel compiled that cannot be, and then one that can, for a Hopper device that is not there; writes what came of both."""

import json
import sys

import pytest
import torch
import triton

from samebit.kernels.triton import launch, rows
from tests.kernels.triton.compiled_ahead import Absent


def norm(columns: int) -> None:
    rows.implementations(torch.float32)["rms_norm"](torch.ones(3, columns), torch.ones(columns), 1e-6, 1)


def refuse(*_args, **_options):
    raise RuntimeError("no room on the disk")


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.compiler.ASTSource, "make_ir", refuse)
        with pytest.raises(RuntimeError) as error:
            launch.compile_for(lambda: norm(256))
    launch.compile_for(lambda: norm(128))
    kernels = rows.norm_kernel.device_caches[0][0].values()
    json.dump({"told": str(error.value), "later": [type(kernel).__name__ for kernel in kernels]}, sys.stdout)


if __name__ == "__main__":
    main()
