"""What a model's per-request state consists of, and where each part lives. Plain numbers; no torch.

A model declares a `StateLayout`; with the engine's sizes it becomes a `StateGeometry`, which the host (ids) and the
device (addresses) both compute with.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from samebit.core.plan import SlotId, SnapshotId

Element = Literal["float32", "bfloat16", "int64"]
ZERO_ROW = 0
SINK_ROW = 1
_FIRST_ROW = 2


class KvLayer(msgspec.Struct, frozen=True):
    """One attention layer's cache: K and V of `num_kv_heads` heads of `head_dim`."""

    num_kv_heads: int
    head_dim: int


class PageGroup(msgspec.Struct, frozen=True):
    """Attention layers that share a page table. `window` W: a query sees keys t-W+1 .. t; None: all of them."""

    window: int | None
    layers: tuple[KvLayer, ...]

    @property
    def width(self) -> int:
        """Elements of K and V that a token has in all layers."""
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.layers)

    def first_position(self, length: int) -> int:
        """The first position that State(length) holds in this group."""
        return 0 if self.window is None else max(0, length - self.window + 1)


class ConvStream(msgspec.Struct, frozen=True):
    """One short convolution's input rows."""

    name: str
    width: int


class StateLayout(msgspec.Struct, frozen=True):
    """All state of a model: page groups (at most one without a window) and conv streams of one kernel size K.

    `element` is what K, V and conv rows are made of.
    """

    groups: tuple[PageGroup, ...]
    streams: tuple[ConvStream, ...]
    kernel_size: int
    element: Element = "float32"

    @property
    def history(self) -> int:
        """Conv rows that precede a position in State(t): K - 1."""
        return self.kernel_size - 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return {"bfloat16": 2, "float32": 4, "int64": 8}[self.element]


class LayoutPart(msgspec.Struct, frozen=True):
    """Where a layout that was added to another lies in the joint one.

    Its group g is group `groups[g]` there, its layers begin with `first_layers[g]`; its streams begin with `first_stream`.
    """

    groups: tuple[int, ...]
    first_layers: tuple[int, ...]
    first_stream: int


def join_layouts(base: StateLayout, added: StateLayout) -> tuple[StateLayout, LayoutPart]:
    """`base` with the layers and streams of `added` behind its own; layers of equal windows share a page table.

    Both must agree in the kernel size and the element, and no two streams have one name.
    """
    assert (base.kernel_size, base.element) == (added.kernel_size, added.element), "parts of one state are of one kind"
    names = [stream.name for stream in base.streams + added.streams]
    assert len(set(names)) == len(names), "streams are told apart by their names"
    windows = [group.window for group in base.groups]
    windows += [group.window for group in added.groups if group.window not in windows]
    layers: list[tuple[KvLayer, ...]] = [group.layers for group in base.groups]
    layers += [()] * (len(windows) - len(layers))
    places = tuple(windows.index(group.window) for group in added.groups)
    first_layers = tuple(len(layers[place]) for place in places)
    for place, group in zip(places, added.groups, strict=True):
        layers[place] += group.layers
    groups = tuple(PageGroup(window, held) for window, held in zip(windows, layers, strict=True))
    joint = msgspec.structs.replace(base, groups=groups, streams=base.streams + added.streams)
    return joint, LayoutPart(places, first_layers, len(base.streams))


class StateGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of every pool and the arithmetic of addresses.

    Conv rows: row 0 is all zeros and never written, row 1 is the sink and never read, then one ring of `ring_length`
    rows per slot, then `history` rows per snapshot. Slot 0, snapshot 0 and page 0 are inert and never given out, so
    `num_slots`, `num_snapshots` and `num_pages[g]` count ids 1 .. n; slot 0 has a ring too, of which nothing is expected.
    """

    layout: StateLayout
    page_size: int
    num_slots: int
    num_snapshots: int
    num_pages: tuple[int, ...]
    max_length: int
    max_drafts: int = 0

    @property
    def ring_length(self) -> int:
        """Rows a ring needs so that a stop inside an accepted run can still be published with one step in flight.

        That step begins up to `max_drafts` behind the stop and may go as far again; a reader takes it that the last `max_drafts` behind
        what was accepted are overwritten, too.
        """
        return self.layout.history + self.page_size + 2 + 3 * self.max_drafts

    @property
    def pages_per_sequence(self) -> int:
        """Entries of a page table: pages of a sequence of `max_length` tokens."""
        return -(-self.max_length // self.page_size)

    @property
    def num_rows(self) -> int:
        """Conv rows in each stream's pool, the two reserved ones included."""
        return _FIRST_ROW + (self.num_slots + 1) * self.ring_length + self.num_snapshots * self.layout.history

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools and slot tables, once every page and row is in use."""
        layout = self.layout
        widths = [group.width for group in layout.groups]
        pages = self.page_size * sum(w * (count + 1) for w, count in zip(widths, self.num_pages, strict=True))
        rows = self.num_rows * sum(stream.width for stream in layout.streams)
        tags = self.num_rows * len(layout.streams) + sum(
            (count + 1) * len(group.layers) for group, count in zip(layout.groups, self.num_pages, strict=True)
        )
        tables = (self.num_slots + 1) * (self.ring_length + 2 * self.pages_per_sequence * len(layout.groups))
        return (pages + rows) * layout.element_bytes + 8 * (tags + tables)

    def ring_base(self, slot: SlotId | int) -> int:
        """First row of a slot's ring; position p lives in row `ring_base + p mod ring_length`."""
        return _FIRST_ROW + slot * self.ring_length

    def snapshot_base(self, snapshot: SnapshotId | int) -> int:
        """First of the `history` rows of a snapshot, oldest position first."""
        return _FIRST_ROW + (self.num_slots + 1) * self.ring_length + (snapshot - 1) * self.layout.history
