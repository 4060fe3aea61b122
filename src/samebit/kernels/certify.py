"""Checks at load that a kernel set is row-pure for the shapes a model uses, on this host.

The native products are row-pure by construction; a compiler or a processor that breaks the construction is caught here
before a request sees it. Knows no model, only (N, K) shapes.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from samebit.kernels.composed import in_order
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import Packed

ROW_COUNTS = (2, 3, 5, 8, 16, 17, 33, 66)
GPU_ROW_COUNTS = (*ROW_COUNTS, 129, 300)
FEW_ROW_COUNTS = (3, 17)
MAX_WEIGHTS = 1 << 16
GPU_MAX_WEIGHTS = 1 << 26
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Failure:
    """``rows`` rows on ``threads`` threads gave a row of an [N, K] product other bits than that row alone."""

    num_out: int
    num_in: int
    rows: int
    threads: int


def certify(
    kernels: KernelSet,
    shapes: Iterable[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    budget_seconds: float = 0.5,
) -> list[Failure]:
    """The failures of ``kernels.linear``, and of the sum of ``kernels.addends``, over ``shapes`` of (N, K), at most one for each.

    Empty means certified. Row counts, places and thread counts are compared with one-row products. On a CPU N is cut to keep a
    weight small: a column's bits do not depend on how many there are. On a GPU it is not, because tiles depend on N. When the
    time budget is used up, the remaining shapes are checked with few rows. The torch set needs no certificate: its products are
    exact. Give failing shapes to ``KernelSet.without``.
    """
    deadline = time.perf_counter() + budget_seconds
    # Rounded results hide most differences of sums, and are written by kernels of their own.
    forms = (False,) if kernels.element == "float32" else (False, True)
    generator = torch.Generator().manual_seed(0)
    failures = []
    for num_out, num_in in sorted(set(shapes)):
        columns = max(1, min(num_out, (MAX_WEIGHTS if device.type == "cpu" else GPU_MAX_WEIGHTS) // num_in))
        weight = torch.randn(columns, num_in, generator=generator).to(dtype).to(device)
        many = ROW_COUNTS if device.type == "cpu" else GPU_ROW_COUNTS
        counts = many if time.perf_counter() < deadline else FEW_ROW_COUNTS
        x = torch.randn(max(counts), num_in, generator=generator).to(device)
        for wide in forms:
            found = _first_failure(kernels, kernels.pack_linear(weight, wide=wide), x, counts)
            if found is not None:
                failures.append(Failure(num_out, num_in, *found))
                break
    return failures


def _first_failure(
    kernels: KernelSet, packed: Packed, x: torch.Tensor, counts: tuple[int, ...]
) -> tuple[int, int] | None:
    """(rows, threads) of the first product that differs from the one-row products."""
    alone = replace(kernels, num_threads=1)
    # A single addend is the product itself.
    has_addends = len(alone.addends(x[:1], packed)) > 1
    for product in (KernelSet.linear, _sum_of_addends) if has_addends else (KernelSet.linear,):
        expected = torch.cat([product(alone, row[None], packed) for row in x])
        for threads in sorted({1, kernels.num_threads}):
            threaded = replace(kernels, num_threads=threads)
            for rows in counts:
                # From the end as well: the same row at another place.
                for part in (slice(0, rows), slice(len(x) - rows, len(x))):
                    if not torch.equal(product(threaded, x[part], packed), expected[part]):
                        return rows, threads
    return None


def _sum_of_addends(kernels: KernelSet, x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return in_order(kernels.addends(x, packed))
