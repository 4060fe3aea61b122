"""Steps of convolutions on a device: batch rows that go on or resume, with entries; and programs that run in any order."""

import random
from contextlib import contextmanager

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from samebit.kernels.triton.launch import IS_INTERPRETED
from samebit.kernels.values import ConvIndex
from tests.kernels.cases import SINK

TAPS, RING, HISTORY = 4, 9, 3


def kept(x, dtype):
    """``x`` as a pool of ``dtype`` holds it, in fp32."""
    return x.to(dtype).float()


def pool(channels, rows=40, *, values=torch.nan):
    """Rows of NaN but for the zero row, and tags nobody expects."""
    found = torch.full((rows, channels), values)
    found[0] = 0
    tags = torch.full((rows,), -1, dtype=torch.int64)
    tags[0] = 0
    return found, tags


@contextmanager
def programs_in_order(seed):
    """Programs of the first grid axis run in the order that ``seed`` draws; those of a device run in an order of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED:
            run_next = InterpreterBuilder.set_grid_idx

            def run_another(builder, x, y, z):
                order = list(range(builder.grid_dim[0]))
                random.Random(seed).shuffle(order)
                run_next(builder, order[x], y, z)

            patch.setattr(InterpreterBuilder, "set_grid_idx", run_another)
        yield


def random_step(rng, max_count=2 * RING, num_rows=None):
    """An index of rows that go on or resume, with entries and stale sources; pool rows read; how many there are."""
    num_rows, next_row = num_rows or rng.randint(1, 4), 2
    columns = {name: [] for name in ConvIndex.__slots__}
    columns["query_start"] = [0]
    sources = {0}

    def take(count):
        nonlocal next_row
        next_row += count
        return list(range(next_row - count, next_row))

    for _ in range(num_rows):
        ring, first = take(RING), columns["query_start"][-1]
        resumes, count = rng.random() < 0.5, rng.randint(0, max_count)
        start = rng.randint(1 if resumes else 0, 30)
        place = [ring[p % RING] if p >= 0 else 0 for p in range(start - HISTORY, start)]
        reads = take(HISTORY) if resumes else place
        sources |= set(reads)
        stores = [r if r and resumes else SINK for r in place]
        columns["query_start"].append(first + count)
        columns["read_rows"].append(reads)
        columns["read_tags"].append([rng.choice([-1, 5]) if r else 0 for r in reads])
        columns["store_rows"].append(stores)
        columns["store_tags"].append([rng.getrandbits(60) for _ in stores])
        columns["write_rows"] += [ring[(start + i) % RING] if i >= count - RING else SINK for i in range(count)]
        columns["write_tags"] += [rng.getrandbits(60) for _ in range(count)]
        for _ in range(rng.randint(0, 2)):
            # A row without tokens may have an entry that ends before it.
            end = rng.randint(0 if count or resumes else max(-start, HISTORY - RING), count)
            older = [ring[p % RING] if p >= 0 else 0 for p in range(start - RING, start - HISTORY)]
            known = older + reads if end < 0 else reads
            before = [first + i if i >= 0 else -(known[i] + 1) for i in range(end - HISTORY, end)]
            sources |= {-(s + 1) for s in before if s < 0}
            columns["entry_sources"].append(before)
            columns["entry_source_tags"].append([rng.choice([-1, 6]) if s < 0 else 0 for s in before])
            columns["entry_dest"].append(take(HISTORY) if rng.random() < 0.8 else [SINK] * HISTORY)
            columns["entry_tag"].append(rng.getrandbits(60))
    padding = rng.randint(0, 12)
    columns["write_rows"] += [next_row] * padding
    columns["write_tags"] += [7] * padding
    wide = {"read_tags", "store_tags", "write_tags", "entry_source_tags", "entry_tag"}
    fields = {name: torch.tensor(x, dtype=torch.int64 if name in wide else torch.int32) for name, x in columns.items()}
    entries = {name: fields[name].reshape(-1, HISTORY) for name in ("entry_sources", "entry_source_tags", "entry_dest")}
    ix = ConvIndex(**fields | entries)
    return ix, sources, next_row + 1
