"""Small values for kernel tests: random tensors, index bundles, and a paged cache filled by hand."""

import torch
from torch import Tensor

from samebit.kernels.values import AttnIndex, ConvIndex, SampleColumns

SINK = 1


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ring_index(
    ring: Tensor, first: int, count: int, taps: int, *, padding: int = 0, entry: Tensor | None = None
) -> ConvIndex:
    """One batch row of ``count`` tokens from position ``first`` on, kept in ``ring`` (pool rows) by position."""
    history, end = taps - 1, first + count
    rows = ring.tolist()

    def row(position: int) -> int:
        return rows[position % len(rows)] if position >= 0 else 0

    before = range(first - history, first)
    write = [row(p) if p >= end - len(rows) else SINK for p in range(first, end)]
    dest, sources, source_tags = [SINK] * history, [-1] * history, [0] * history
    if entry is not None:
        dest, last = entry.tolist(), range(end - history, end)
        sources = [p - first if p >= first else -(row(p) + 1) for p in last]
        source_tags = [0 if p >= first else tag(p) for p in last]
    return ConvIndex(
        query_start=ints(0, count),
        read_rows=ints(*map(row, before))[None],
        read_tags=longs(*map(tag, before))[None],
        store_rows=ints(*[SINK] * history)[None],
        store_tags=longs(*[0] * history)[None],
        write_rows=ints(*write, *[SINK] * padding),
        write_tags=longs(*map(tag, range(first, end)), *[0] * padding),
        entry_sources=ints(*sources)[None],
        entry_source_tags=longs(*source_tags)[None],
        entry_dest=ints(*dest)[None],
        entry_tag=longs(777),
    )


def tag(position: int) -> int:
    """The tag of a position's row; rows before the start are the zero row with tag 0."""
    return 1000 + position if position >= 0 else 0


class PagedCache:
    """K/V of one or more sequences in shuffled pages; everything a sequence does not own is NaN."""

    def __init__(self, lengths: list[int], page: int, heads: int, width: int, seed: int = 0) -> None:
        per = [-(-n // page) for n in lengths]
        ids = torch.randperm(sum(per), generator=torch.Generator().manual_seed(seed)) + 1
        self.k_pages = torch.full((sum(per) + 1, heads, page, width), torch.nan)
        self.v_pages = torch.full_like(self.k_pages, torch.nan)
        self.table = torch.zeros(len(lengths), max(per), dtype=torch.int32)
        self.k, self.v = [], []
        taken = 0
        for row, length in enumerate(lengths):
            pages = ids[taken : taken + per[row]]
            taken += per[row]
            self.table[row, : per[row]] = pages.to(torch.int32)
            k, v = normal(seed + 2 * row + 1, length, heads, width), normal(seed + 2 * row + 2, length, heads, width)
            at = torch.arange(length)
            self.k_pages[pages[at // page], :, at % page] = k
            self.v_pages[pages[at // page], :, at % page] = v
            self.k.append(k)
            self.v.append(v)

    def index(self, rows: list[tuple[int, int, int]]) -> AttnIndex:
        """Batch rows (slot, first position, tokens)."""
        starts = [0]
        for _, _, count in rows:
            starts.append(starts[-1] + count)
        return AttnIndex(
            query_start=ints(*starts),
            row_start=ints(*[first for _, first, _ in rows]),
            row_slots=ints(*[slot for slot, _, _ in rows]),
            page_table=self.table,
            longest=max([count for _, _, count in rows], default=1),
        )


def columns(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    sample_index: int = 0,
    position: int = 0,
    target: int = -1,
) -> SampleColumns:
    """The same settings on every row, except that rows have positions ``position``, ``position + 1``, ..."""
    return SampleColumns(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=torch.full((rows,), seed, dtype=torch.int64),
        sample_index=torch.full((rows,), sample_index, dtype=torch.int32),
        position=torch.arange(position, position + rows),
        target=torch.full((rows,), target, dtype=torch.int32),
    )


def row_of(cols: SampleColumns, row: int) -> SampleColumns:
    names = SampleColumns.__slots__
    return SampleColumns(**{name: getattr(cols, name)[row : row + 1].clone() for name in names})
