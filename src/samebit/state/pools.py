"""Device memory of all requests: KV pages, conv rows, their tags, and the per-slot words. Knows no request.

Only kernels write K, V and conv rows; only a step itself (`IndexBuffer`, `run_step`) writes the slot tables. Every row and page that
is written carries a tag that says by whom and in which step, so that a write that did not happen can be told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.core.plan import SINK_PAGE, RetiredIds
from samebit.state.layout import SINK_ROW, ZERO_ROW, LayoutPart, StateGeometry

_POISON_TAG = 0x7F7F7F7F7F7F7F7F
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
# Integers have no NaN; any word that no model writes will do.
_POISON: dict[str, float | int] = {"float32": torch.nan, "bfloat16": torch.nan, "int64": 0x7E7E7E7E7E7E7E7E}


@dataclass(frozen=True, slots=True)
class KvPool:
    """One layer's pages: `k`, `v` [num_pages, heads, page_size, head_dim] and `page_tags` [num_pages] int64."""

    k: Tensor
    v: Tensor
    page_tags: Tensor


@dataclass(frozen=True, slots=True)
class ConvPool:
    """One stream's input rows: `rows` [num_rows, width] and `row_tags` [num_rows] int64."""

    rows: Tensor
    row_tags: Tensor


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What the device knows of each slot, so that a step needs no value that an earlier step has yet to produce.

    `length` [S] int64: tokens with valid state. `next_token` [S] int32: the last drawn token, which has no state yet.
    `drafts` [S, D] int32: guesses of the tokens behind it. `ring_tags` [S, R] int64: tags the ring's rows must carry. Per page group g, `page_table[g]` [S, P] int32 and
    `page_stamps[g]` [S, P] int64 (the stamp each complete page must carry). Slot 0 is inert.
    """

    length: Tensor
    next_token: Tensor
    drafts: Tensor
    ring_tags: Tensor
    page_table: tuple[Tensor, ...]
    page_stamps: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One model's share of the state: `conv` streams, `kv[g]` layers; `groups[g]` is the number of its group g in a step's index."""

    conv: tuple[ConvPool, ...]
    kv: tuple[tuple[KvPool, ...], ...]
    groups: tuple[int, ...]


class StatePools:
    """Owner of all state tensors of one rank. `whole`: all of it, as the part of a model that has it to itself or comes first."""

    def __init__(self, geometry: StateGeometry, device: torch.device, *, poison: bool = False) -> None:
        self.geometry = geometry
        layout = geometry.layout
        self._is_poisoned, self._poison = poison, _POISON[layout.element]
        self._dtype = _DTYPES[layout.element]
        rows = (geometry.num_rows,)
        self.row_tags = torch.zeros(len(layout.streams), *rows, dtype=torch.int64, device=device)
        self.conv = tuple(
            ConvPool(torch.empty(*rows, stream.width, dtype=self._dtype, device=device), self.row_tags[i])
            for i, stream in enumerate(layout.streams)
        )
        self.page_tags = tuple(
            torch.zeros(len(group.layers), pages + 1, dtype=torch.int64, device=device)
            for group, pages in zip(layout.groups, geometry.num_pages, strict=True)
        )
        self.kv = tuple(
            tuple(self._kv_pool(g, i, device) for i in range(len(group.layers)))
            for g, group in enumerate(layout.groups)
        )
        for conv in self.conv:
            conv.rows[ZERO_ROW] = 0
        self.whole = PoolPart(self.conv, self.kv, tuple(range(len(self.kv))))
        self.tables = self._slot_tables(device)
        if poison:
            self._fill_with_poison()

    def part(self, place: LayoutPart) -> PoolPart:
        """The share of a layout that was added to another, from its first layers and stream on."""
        kv = tuple(self.kv[g][first:] for g, first in zip(place.groups, place.first_layers, strict=True))
        return PoolPart(self.conv[place.first_stream :], kv, place.groups)

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies; a graph holds these addresses."""
        tables = self.tables
        named = (tables.length, tables.next_token, tables.drafts, tables.ring_tags, self.row_tags)
        pools = (t for group in self.kv for pool in group for t in (pool.k, pool.v))
        rows = (conv.rows for conv in self.conv)
        tensors = (*named, *tables.page_table, *tables.page_stamps, *self.page_tags, *pools, *rows)
        return tuple(tensor.data_ptr() for tensor in tensors)

    def wipe(self, retired: RetiredIds) -> None:
        """Overwrite freed memory with NaN (integers: a word nobody writes) and a tag nobody uses, if poison is on."""
        if not self._is_poisoned:
            return
        for group, page in retired.pages:
            for pool in self.kv[group]:
                pool.k[page] = self._poison
                pool.v[page] = self._poison
            self.page_tags[group][:, page] = _POISON_TAG
        ranges = [(self.geometry.snapshot_base(s), self.geometry.layout.history) for s in retired.snapshots]
        ranges += [(self.geometry.ring_base(s), self.geometry.ring_length) for s in retired.slots]
        for first, count in ranges:
            for conv in self.conv:
                conv.rows[first : first + count] = self._poison
            self.row_tags[:, first : first + count] = _POISON_TAG

    def _kv_pool(self, group: int, index: int, device: torch.device) -> KvPool:
        layer = self.geometry.layout.groups[group].layers[index]
        shape = (self.geometry.num_pages[group] + 1, layer.num_kv_heads, self.geometry.page_size, layer.head_dim)
        # Nothing reads a row before it is written, so a page costs no memory until it is used.
        k, v = (torch.empty(shape, dtype=self._dtype, device=device) for _ in range(2))
        return KvPool(k, v, self.page_tags[group][index])

    def _slot_tables(self, device: torch.device) -> SlotTables:
        slots, pages = self.geometry.num_slots + 1, self.geometry.pages_per_sequence
        groups = range(len(self.geometry.layout.groups))

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return SlotTables(
            length=zeros(slots, dtype=torch.int64),
            next_token=zeros(slots, dtype=torch.int32),
            drafts=zeros(slots, self.geometry.max_drafts, dtype=torch.int32),
            ring_tags=zeros(slots, self.geometry.ring_length, dtype=torch.int64),
            page_table=tuple(zeros(slots, pages, dtype=torch.int32) for _ in groups),
            page_stamps=tuple(zeros(slots, pages, dtype=torch.int64) for _ in groups),
        )

    def _fill_with_poison(self) -> None:
        for group in self.kv:
            for pool in group:
                pool.k[SINK_PAGE + 1 :] = self._poison
                pool.v[SINK_PAGE + 1 :] = self._poison
        for conv in self.conv:
            conv.rows[SINK_ROW:] = self._poison
        for tags in self.page_tags:
            tags[:, SINK_PAGE + 1 :] = _POISON_TAG
        self.row_tags[:, SINK_ROW:] = _POISON_TAG
