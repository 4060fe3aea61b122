"""The values that kernels take beside plain activations: index tensors, sampling columns, packed weights.

Every class is a frozen bundle of tensors with static sizes and no optional field: what is not wanted is inert by
address (sink rows, slot 0, page 0), never by absence. A bundle is checked once, when it is made: kernels are handed its
tensors many times a step and take them by address. Knows nothing of requests, sequences or models.

Sizes: T tokens of the step, B batch rows, K taps of a short convolution, E checkpoint entries, S slots,
P pages of a slot, L logit rows. Batch row b owns the tokens ``query_start[b] .. query_start[b + 1]`` of the flat token
axis; tokens from ``query_start[B]`` on are padding and belong to nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ZERO_ROW = 0
"""Row of a convolution pool that is all zeros with tag 0 and never written."""
SINK_ROW = 1
"""Row of a convolution pool that takes unwanted writes and is never read."""
SINK_PAGE = 0
"""Page that takes unwanted K/V writes and is never read."""


Element = Literal["float32", "bfloat16"]
"""What activations and pools are made of."""


class UnsupportedSizeError(ValueError):
    """A set has no kernel for a size; names the size and the limit."""


def check_dense(dtype: torch.dtype, *tensors: Tensor) -> None:
    """Assert what a kernel that takes tensors by address alone relies on: the dtype, and contiguous memory."""
    for x in tensors:
        assert x.dtype is dtype, (x.dtype, dtype)
        assert x.is_contiguous(), x.stride()


@dataclass(frozen=True, slots=True)
class ConvIndex:
    """Where a short convolution reads and keeps its inputs; rows are pool rows, oldest input first.

    ``query_start`` [B+1] int32. ``read_rows`` [B, K-1] int32 and ``read_tags`` [B, K-1] int64: the inputs before the
    first token of each batch row and the tags expected there. ``store_rows`` [B, K-1] int32, ``store_tags`` int64:
    where those same inputs are kept as well. ``write_rows`` [T] int32, ``write_tags`` [T] int64: where each token's
    input is kept. ``entry_sources`` [E, K-1] int32: a value s >= 0 is a token of this step, s < 0 the pool row
    -(s + 1) as it was before the launch; ``entry_source_tags`` [E, K-1] int64: tags expected there; ``entry_dest``
    [E, K-1] int32, ``entry_tag`` [E] int64: the rows of the checkpoint and their tag.

    Rows that are written for a batch row (``store_rows``, ``write_rows``) are read for no other, but for those of slot 0. A pool row that
    an entry is copied from is one of the ``read_rows``, or not written in this launch; rows of ``entry_dest`` are not read in it.
    """

    query_start: Tensor
    read_rows: Tensor
    read_tags: Tensor
    store_rows: Tensor
    store_tags: Tensor
    write_rows: Tensor
    write_tags: Tensor
    entry_sources: Tensor
    entry_source_tags: Tensor
    entry_dest: Tensor
    entry_tag: Tensor

    def __post_init__(self) -> None:
        check_dense(torch.int32, self.query_start, self.read_rows, self.store_rows, self.write_rows)
        check_dense(torch.int32, self.entry_sources, self.entry_dest)
        check_dense(
            torch.int64, self.read_tags, self.store_tags, self.write_tags, self.entry_source_tags, self.entry_tag
        )


@dataclass(frozen=True, slots=True)
class KvIndex:
    """Where the K/V of the step's tokens goes.

    ``write_slots`` [T] int32: page * page_size + offset, 0 for padding.
    ``stamp_pages`` [T] int32: the page that token completes, 0 for none; ``stamp_tags`` [T] int64: its stamp.
    """

    write_slots: Tensor
    stamp_pages: Tensor
    stamp_tags: Tensor

    def __post_init__(self) -> None:
        check_dense(torch.int32, self.write_slots, self.stamp_pages)
        check_dense(torch.int64, self.stamp_tags)


@dataclass(frozen=True, slots=True)
class Turn:
    """How heads are turned that stand at ``positions`` [T] of any whole numbers, by tables ``cos``, ``sin`` [N, hd] fp32 for positions below N.

    Element i at p becomes x[i] * cos[p, i] + x[(i + hd / 2) mod hd] * sin[p, i].
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor

    def __post_init__(self) -> None:
        check_dense(torch.float32, self.cos, self.sin)


@dataclass(frozen=True, slots=True)
class AttnIndex:
    """Which keys the step's tokens see.

    ``query_start`` [B+1] int32. ``row_start`` [B] int32: absolute position of a batch row's first token.
    ``row_slots`` [B] int32: its row of ``page_table`` [S, P] int32, which maps an absolute page index to a page.
    No batch row has more than ``longest`` tokens.
    """

    query_start: Tensor
    row_start: Tensor
    row_slots: Tensor
    page_table: Tensor
    longest: int

    def __post_init__(self) -> None:
        check_dense(torch.int32, self.query_start, self.row_start, self.row_slots, self.page_table)


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """Which keys before them blocks of guesses see: positions below ``lengths`` [P] int32 of slots ``row_slots`` [P] int32, through
    ``page_table`` [S, P] int32, which maps an absolute page index to a page.
    """

    lengths: Tensor
    row_slots: Tensor
    page_table: Tensor

    def __post_init__(self) -> None:
        check_dense(torch.int32, self.lengths, self.row_slots, self.page_table)


@dataclass(frozen=True, slots=True)
class DraftIndex:
    """Which of the step's tokens are drafts, and what is drawn in their places.

    ``token_ids`` [T] int32; ``query_start`` [B+1], ``row_slots``, ``row_start`` [B] int32. The last ``row_drafts`` [B]
    int32 tokens of a batch row are drafts; logits row ``row_first_draw`` [B] int32 (-1: none) draws in place of the
    first, the next in place of the second, and one more after the last.
    """

    token_ids: Tensor
    query_start: Tensor
    row_slots: Tensor
    row_start: Tensor
    row_drafts: Tensor
    row_first_draw: Tensor

    def __post_init__(self) -> None:
        check_dense(torch.int32, self.token_ids, self.query_start, self.row_slots, self.row_start)
        check_dense(torch.int32, self.row_drafts, self.row_first_draw)


@dataclass(frozen=True, slots=True)
class EntryIndex:
    """Checkpoint entries that are compared after the step: of batch row ``rows`` [E] int32, in slot ``row_slots`` [B] int32 [rows], all
    pages below ``boundaries`` [E] int64, and the rows ``dest`` [E, K-1] int32, which are to carry ``tags`` [E] int64.
    """

    rows: Tensor
    boundaries: Tensor
    tags: Tensor
    dest: Tensor
    row_slots: Tensor

    def __post_init__(self) -> None:
        check_dense(torch.int32, self.rows, self.dest, self.row_slots)
        check_dense(torch.int64, self.boundaries, self.tags)


@dataclass(frozen=True, slots=True)
class PageTags:
    """The tags that pages of group g carry, ``found[g]`` [layers, P] int64, and those that slots' pages must carry.

    Page i of slot s is ``table[g]`` [S, N] int32 [s, i] and must carry ``stamps[g]`` [S, N] int64 [s, i] in every layer. Of pages that lie
    before ``windows[g]`` > 0 tokens nothing is known; 0: no window.
    """

    found: list[Tensor]
    table: list[Tensor]
    stamps: list[Tensor]
    windows: list[int]
    page_size: int


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """Sampling settings per logit row; the meaning is in ``KernelSet.sample``.

    ``temperature`` [L] fp32 (0: greedy), ``top_k`` [L] int32 (0: off), ``top_p`` [L] fp32 (1: off), ``min_p`` [L] fp32
    (0: off), ``seed`` [L] int64, ``sample_index`` [L] int32, ``position`` [L] int64 (absolute index of the token to
    draw), ``target`` [L] int32 (-1: draw; otherwise that token is taken as drawn).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    sample_index: Tensor
    position: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        check_dense(torch.float32, self.temperature, self.top_p, self.min_p)
        check_dense(torch.int32, self.top_k, self.sample_index, self.target)
        check_dense(torch.int64, self.seed, self.position)

    def part(self, rows: slice) -> "SampleColumns":
        """The settings of some rows that follow one another."""
        return SampleColumns(*(column[rows] for column in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return (
            self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.sample_index, self.position, self.target
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packed:
    """The weight [N, K] of a linear map, laid out for ``product``, ``addends`` and ``normed``, the operators that multiply by it; opaque.

    ``wide``: the result is fp32 whatever the activations are. ``library_rows``: the numbers of rows for which the vendor's library
    has been found to give the same bits as the set's own product, and may stand in for it.
    """

    data: Tensor
    num_out: int
    wide: bool
    product: Callable[..., Tensor]
    addends: Callable[..., Tensor]
    normed: Callable[..., tuple[Tensor, Tensor]]
    library_rows: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The weights of all experts of a layer, shared ones last, laid out for the operator ``product``; opaque."""

    w13: Tensor
    w2: Tensor
    intermediate: int
    product: Callable[..., Tensor]


class IndexFields(NamedTuple):
    """Inputs of ``KernelSet.step_index``; shapes and dtypes are those of the step's inputs of the same names."""

    query_start: Tensor
    token_ids: Tensor
    row_slots: Tensor
    row_continues: Tensor
    row_resume: Tensor
    row_start: Tensor
    row_tags: Tensor
    row_resume_tag: Tensor
    entry_rows: Tensor
    entry_snapshots: Tensor
    entry_boundaries: Tensor
    sample_rows: Tensor
    sample_offsets: Tensor
    delta_groups: Tensor
    delta_slots: Tensor
    delta_indices: Tensor
    delta_pages: Tensor
    delta_stamps: Tensor


INDEX_TABLES = ("length", "next_token", "drafts", "ring_tags", "row_tags")
"""Tables of ``KernelSet.step_index``, in order; then the page table of every group, then the page stamps of every group."""

INDEX_RESULTS = (
    "row_start",
    "token_ids", "positions", "write_rows", "token_tags",
    "read_rows", "read_tags", "store_rows", "store_tags", "rows_intact",
    "entry_sources", "entry_source_tags", "entry_dest",
    "sample_tokens", "sample_positions",
)  # fmt: skip
"""Results of ``KernelSet.step_index``, in order; then every group's write slots, then every group's completed pages."""


class DraftWords(NamedTuple):
    """Results of ``KernelSet.draft_words``, for P rows that make D guesses each, in blocks of N tokens.

    ``lengths`` and ``last_tokens`` [P] int32. As in SampleColumns, for each row's first guess, then for each row's next:
    ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seed``, ``sample_index``, ``position`` [D, P]. ``token_ids`` [P, N] int32 and
    ``positions`` [P, N] int64: the blocks.
    """

    lengths: Tensor
    last_tokens: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    sample_index: Tensor
    position: Tensor
    token_ids: Tensor
    positions: Tensor


class IndexSizes(NamedTuple):
    """Constants of a pool's addresses.

    Slot s has the ring rows ``ring_origin + s * ring_length + position % ring_length``, snapshot i the ``history`` rows
    from ``snapshot_origin + i * history``. A slot has at most ``max_drafts`` drafts, which may have been written past its
    length.
    """

    history: int
    ring_length: int
    ring_origin: int
    snapshot_origin: int
    page_size: int
    max_drafts: int
