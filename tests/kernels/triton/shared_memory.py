"""Compiles attention's long tiles for a Hopper device that is not there, and writes [what is said of, and what it takes of] shared memory."""

import json
import sys

import torch
import triton

from samebit.kernels.triton import attention
from tests.kernels.triton.compiled_ahead import Absent

PAGE_SIZE, TOKENS, DTYPE = 16, 256, torch.bfloat16
# Columns of a head, features of its bias, query heads of a KV head: the first has the widest tile, the others have less room.
HEADS = [(128, 16, 8), (128, 64, 8), (256, 16, 4)]


def attend(width: int, d_rel: int, group: int) -> None:
    """One row of TOKENS tokens over one KV head; nothing is launched."""
    q = torch.zeros(TOKENS, group * width, dtype=DTYPE, device="meta")
    pages = torch.zeros(TOKENS // PAGE_SIZE, 1, PAGE_SIZE, width, dtype=DTYPE, device="meta")
    starts = torch.zeros(2, dtype=torch.int32, device="meta")
    table = torch.zeros(2, TOKENS // PAGE_SIZE, dtype=torch.int32, device="meta")
    rel = torch.zeros(TOKENS, group * d_rel, dtype=DTYPE, device="meta")
    profile, tau = torch.zeros(d_rel, 512, dtype=DTYPE, device="meta"), torch.ones(TOKENS, device="meta")
    attention.attention(q, rel, profile, tau, pages, pages, starts, starts[1:], starts[1:], table, TOKENS, 512, 1.0, 1)


def compile_long(kernel, grid, *args, **meta):
    if meta["IS_LONG"]:
        kernel.warmup(*args, grid=grid, **meta)


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    attention.num_programs = lambda *_: 132
    attention.launch = compile_long
    tiling, found = attention.TILINGS[DTYPE], []
    for heads in HEADS:
        attend(*heads)
        kernel = list(attention.attend_kernel.device_caches[0][0].values())[-1]
        tile = tiling.long_tile(*heads, DTYPE.itemsize, attention.shared_memory(torch.device("meta")))
        found.append([attention.shared_bytes(*tile, tiling.block_n, *heads, DTYPE.itemsize), kernel.metadata.shared])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
