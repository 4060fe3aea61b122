"""Compiles attention with the widest heads for a Hopper device that is not there, and writes the shared memory that each kind of tile takes."""

import json
import sys

import torch
import triton

from samebit.kernels.triton import attention
from tests.kernels.triton.compiled_ahead import Absent

NUM_HEADS, PAGE_SIZE, TOKENS = 4, 16, 256


def attend(dtype: torch.dtype, width: int, window: int) -> None:
    """One row of TOKENS tokens with a bias, long enough for long tiles; nothing is launched."""
    q = torch.zeros(TOKENS, NUM_HEADS * width, dtype=dtype, device="meta")
    pages = torch.zeros(TOKENS // PAGE_SIZE, 1, PAGE_SIZE, width, dtype=dtype, device="meta")
    starts = torch.zeros(2, dtype=torch.int32, device="meta")
    table = torch.zeros(2, TOKENS // PAGE_SIZE, dtype=torch.int32, device="meta")
    rel, rel_proj = torch.zeros(TOKENS, NUM_HEADS * 16, device="meta"), torch.zeros(16, 512, device="meta")
    tau = torch.ones(TOKENS, device="meta")
    attention.attention(
        q, rel.to(dtype), rel_proj.to(dtype), tau, pages, pages, starts, starts[1:], starts[1:], table, window, 1.0, 1
    )


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    attention.num_programs = lambda *_: 132
    attention.launch = lambda kernel, grid, *args, **meta: kernel.warmup(*args, grid=grid, **meta)
    attend(torch.bfloat16, attention.MAX_WIDTH, 512)
    compiled = attention.attend_kernel.device_caches[0][0].values()
    json.dump([kernel.metadata.shared for kernel in compiled], sys.stdout)


if __name__ == "__main__":
    main()
