"""StaticInputs: the only host-to-device contract of a step, the same type for eager runs, capture and replay.

All fields are views of one flat buffer, so that a fill is one copy. `fill` writes a whole bucket from inert values and
then the live part: there is no previous content. What is not wanted is inert by address (slot 0, page 0, sink rows),
never absent. Addresses that depend on lengths are computed from these fields on the device, in `samebit.indexing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from samebit.core.plan import DRAW, MIX_FACTORS, OWNER_FACTOR, BatchPlan, PlanSample, drafter_of, step_word


class Bucket(NamedTuple):
    """Sizes of a step: tokens, batch rows, logits rows, edited logits, checkpoint entries, page deltas, most likely tokens wanted,
    rows whose next tokens are guessed, logits rows with a mask of allowed tokens, 32-bit words of a mask, and tokens of a batch row.
    """

    tokens: int
    rows: int
    samples: int
    edits: int
    entries: int
    deltas: int
    top: int
    drafts: int
    masks: int = 0
    mask_words: int = 0
    longest: int = 1

    @staticmethod
    def of(plan: BatchPlan) -> Bucket:
        """The smallest bucket that holds `plan` with the padding it asks for."""
        edits = [sample.edits for sample in plan.samples if sample.edits.token_ids or sample.edits.allowed]
        masks = [len(edit.allowed) for edit in edits if edit.allowed]
        return Bucket(
            tokens=max(1, plan.num_tokens + plan.pad_tokens),
            rows=len(plan.rows) + plan.pad_rows,
            samples=max(1, plan.num_samples),
            edits=sum([len(edit.token_ids) for edit in edits]),
            entries=len(plan.entries),
            deltas=len(plan.page_deltas),
            top=max([sample.num_top for sample in plan.samples], default=0),
            drafts=len(plan.drafts),
            masks=len(masks),
            mask_words=max(masks, default=0) // 4,
            longest=max([row.num_tokens for row in plan.rows], default=1),
        )

    def rounded_up(self) -> Bucket:
        """The next bucket whose sizes are powers of two, or zero where nothing is wanted: few, so that each is recorded once."""
        return Bucket(*(1 << (size - 1).bit_length() if size else 0 for size in self))


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Fields of a step. T tokens, B rows, L logits rows, E entries, D page deltas; all padded to the bucket's sizes.

    Tokens: `token_ids` [T] int32 (ignored where the row continues from the device's words).
    Rows: `query_start` [B+1] int32 (padding rows are empty), `row_slots` [B] int32, `row_start` [B] int64 and
    `row_continues` [B] int32 (1: start and tokens come from the slot's words), `row_drafts` [B] int32 (how many of the
    last tokens are drafts), `row_first_draw` [B] int32 (the first logits row that draws for it, -1: none), `row_tags` [B]
    int64 (owner tag of this step), `row_resume` [B] int32 (snapshot, 0: none), `row_resume_tag` [B] int64.
    Logits rows: `sample_rows`, `sample_offsets`, `sample_targets`, `sample_top_k`, `sample_indices` [L] int32,
    `sample_temperature`, `sample_top_p`, `sample_min_p` [L] float32, `sample_seeds` [L] int64.
    Edited logits: `edit_samples` (-1: none), `edit_tokens` [N] int32, `edit_penalties`, `edit_shifts` [N] float32, as in LogitEdits.
    Masks: `mask_samples` [M] int32 (-1: none), `mask_words` [M * W] int32, W a mask, as in LogitEdits.
    Entries: `entry_rows`, `entry_snapshots` [E] int32, `entry_boundaries`, `entry_tags` [E] int64.
    Rows that guess: `draft_slots` [P] int32, `draft_samples` [P] int32 (the logits row whose settings their draws have),
    `draft_limits` [P] int64 (positions below it have pages), `draft_tags` [P] int64.
    Page deltas: `delta_groups`, `delta_slots`, `delta_indices`, `delta_pages` [D] int32, `delta_stamps` [D] int64.
    """

    query_start: Tensor
    token_ids: Tensor
    row_slots: Tensor
    row_continues: Tensor
    row_drafts: Tensor
    row_first_draw: Tensor
    row_resume: Tensor
    sample_rows: Tensor
    sample_offsets: Tensor
    sample_targets: Tensor
    sample_top_k: Tensor
    sample_indices: Tensor
    sample_temperature: Tensor
    sample_top_p: Tensor
    sample_min_p: Tensor
    edit_samples: Tensor
    edit_tokens: Tensor
    edit_penalties: Tensor
    edit_shifts: Tensor
    mask_samples: Tensor
    mask_words: Tensor
    entry_rows: Tensor
    entry_snapshots: Tensor
    delta_groups: Tensor
    delta_slots: Tensor
    delta_indices: Tensor
    delta_pages: Tensor
    draft_slots: Tensor
    draft_samples: Tensor
    row_start: Tensor
    row_tags: Tensor
    row_resume_tag: Tensor
    sample_seeds: Tensor
    entry_boundaries: Tensor
    entry_tags: Tensor
    delta_stamps: Tensor
    draft_limits: Tensor
    draft_tags: Tensor


_WIDE = {
    *("row_start", "row_tags", "row_resume_tag", "sample_seeds"),
    *("entry_boundaries", "entry_tags", "delta_stamps", "draft_limits", "draft_tags"),
}
_REAL = {"edit_penalties", "edit_shifts", "sample_temperature", "sample_top_p", "sample_min_p"}
_INERT = {"row_first_draw": -1, "sample_top_p": 1.0, "edit_samples": -1, "edit_penalties": 1.0, "mask_samples": -1}


def _dtype(name: str) -> torch.dtype:
    if name in _WIDE:
        return torch.int64
    return torch.float32 if name in _REAL else torch.int32


def _length(name: str, bucket: Bucket) -> int:
    if name == "query_start":
        return bucket.rows + 1
    if name == "mask_words":
        return bucket.masks * bucket.mask_words
    axis = name.split("_", maxsplit=1)[0]
    return {
        "token": bucket.tokens,
        "row": bucket.rows,
        "sample": bucket.samples,
        "edit": bucket.edits,
        "mask": bucket.masks,
        "entry": bucket.entries,
        "delta": bucket.deltas,
        "draft": bucket.drafts,
    }[axis]


_Numbered = list[tuple[int, PlanSample]]
"""Samples, each with its first logits row."""

# Compilers make other code for addresses that are not multiples of this.
_ALIGNMENT = 16


class InputBuffer:
    """Owner of the flat buffer behind the inputs of one bucket."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket = bucket
        names = [field.name for field in fields(StaticInputs)]
        sizes = {name: _length(name, bucket) * _dtype(name).itemsize for name in names}
        offsets: dict[str, int] = {}
        end = 0
        for name in names:
            offsets[name] = end = -(-end // _ALIGNMENT) * _ALIGNMENT
            end += sizes[name]
        on_device = device.type != "cpu"
        self._staging = torch.zeros(end, dtype=torch.uint8, pin_memory=on_device)
        self._storage = torch.zeros(end, dtype=torch.uint8, device=device) if on_device else self._staging
        self._host: dict[str, np.ndarray] = {}
        views: dict[str, Tensor] = {}
        for name in names:
            part = slice(offsets[name], offsets[name] + sizes[name])
            self._host[name] = self._staging[part].view(_dtype(name)).numpy()
            self._host[name].fill(_INERT.get(name, 0))
            views[name] = self._storage[part].view(_dtype(name))
        self._bytes = self._staging.numpy()
        self._inert = self._bytes.copy()
        # Recorded behind each copy to the device; there is nothing to wait for before the first.
        self._sent = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]  # torch has no types here
        if on_device:
            self._storage.copy_(self._staging)
        self.view = StaticInputs(**views)

    def fill(self, plan: BatchPlan) -> StaticInputs:
        """Write every field of the bucket: inert values first, then the plan's rows."""
        if self._sent is not None:
            self._sent.synchronize()  # the step before is still to take its inputs from here
        np.copyto(self._bytes, self._inert)
        counts = [sample.count for sample in plan.samples]
        *places, num_samples = accumulate(counts, initial=0)
        numbered = list(zip(places, plan.samples, strict=True))
        if plan.rows:
            self._fill_rows(plan, numbered)
        spread = counts if num_samples > len(counts) else ()
        self._put(_SAMPLE_FIELDS, map(msgspec.structs.astuple, plan.samples), spread)
        if spread:
            self._host["sample_offsets"][:num_samples] += np.arange(num_samples) - np.repeat(places, spread)
        if self.bucket.edits:
            self._fill_edits(numbered)
        if self.bucket.masks:
            self._fill_masks(numbered)
        self._put(_ENTRY_FIELDS, map(msgspec.structs.astuple, plan.entries))
        self._put(_DELTA_FIELDS, map(msgspec.structs.astuple, plan.page_deltas))
        if plan.drafts:
            self._fill_drafts(plan)
        if self._sent is not None:
            self._storage.copy_(self._staging, non_blocking=True)
            self._sent.record()
        return self.view

    def _put(self, names: Sequence[str], rows: Iterable[tuple[Any, ...]], spread: Sequence[int] = ()) -> None:
        """Write the columns of `rows` to the fields of these names, in order; further columns are left out."""
        self._put_columns(zip(names, zip(*rows, strict=True), strict=False), spread)

    def _put_columns(self, columns: Iterable[tuple[str, Any]], spread: Sequence[int] = ()) -> None:
        """Write columns, each to the field of its name; its numbers so many times each, if `spread` says so. Any: a sequence of numbers, or an array."""
        for name, column in columns:
            # Where zeros are inert, they are there already.
            if name in _INERT or any(column):
                host = self._host[name]
                written = np.repeat(np.array(column, host.dtype), spread) if spread else column
                host[: len(written)] = written

    def _fill_edits(self, numbered: _Numbered) -> None:
        host, start = self._host, 0
        for number, sample in numbered:
            edits = sample.edits
            if not edits.token_ids:
                continue
            assert sample.count == 1, "a sample with edits is one logits row"
            part = slice(start, start := start + len(edits.token_ids))
            host["edit_samples"][part] = number
            host["edit_tokens"][part] = edits.token_ids
            host["edit_penalties"][part] = edits.penalties
            host["edit_shifts"][part] = edits.shifts

    def _fill_masks(self, numbered: _Numbered) -> None:
        masked = [(number, sample.edits.allowed) for number, sample in numbered if sample.edits.allowed]
        words = self._host["mask_words"].reshape(self.bucket.masks, self.bucket.mask_words)
        for row, (number, allowed) in enumerate(masked):
            self._host["mask_samples"][row] = number
            words[row, : len(allowed) // 4] = np.frombuffer(allowed, np.dtype("<i4"))

    def _fill_rows(self, plan: BatchPlan, numbered: _Numbered) -> None:
        host, given = self._host, zip(*map(msgspec.structs.astuple, plan.rows), strict=True)
        _, slots, owners, starts, counts, token_ids, resumes, resume_tags, num_drafts = given
        *firsts, num_tokens = accumulate(counts, initial=0)
        host["query_start"].fill(num_tokens)
        host["query_start"][: len(slots)] = firsts
        for first, count, ids in zip(firsts, counts, token_ids, strict=True) if any(token_ids) else ():
            if ids:
                assert len(ids) == count, "a row names all its tokens or none"
                host["token_ids"][first : first + count] = ids
        first_draw = [-1] * len(slots)
        for number, sample in reversed(numbered):
            if sample.target == DRAW:
                first_draw[sample.row] = number
        columns = {
            "row_slots": slots,
            "row_continues": [count > 0 and not ids for count, ids in zip(counts, token_ids, strict=True)],
            "row_drafts": num_drafts,
            "row_first_draw": first_draw,
            "row_start": starts,
            "row_tags": owner_tags(plan.step, owners),
            "row_resume": resumes,
            "row_resume_tag": resume_tags,
        }
        self._put_columns(columns.items())

    def _fill_drafts(self, plan: BatchPlan) -> None:
        first_draw = self._host["row_first_draw"]
        rows = [plan.rows[draft.row] for draft in plan.drafts]
        tags = owner_tags(plan.step, [drafter_of(row.owner) for row in rows])
        words = [
            (row.slot, first_draw[draft.row], draft.limit, tag)
            for row, draft, tag in zip(rows, plan.drafts, tags, strict=True)
        ]
        self._put(_DRAFT_FIELDS, words)


# In the order of their fields in PlanSample, CheckpointEntry and PageDelta.
_SAMPLE_FIELDS = (
    "sample_rows", "sample_offsets", "sample_targets", "sample_temperature", "sample_top_k", "sample_top_p",
    "sample_min_p", "sample_seeds", "sample_indices",
)  # fmt: skip
_ENTRY_FIELDS = ("entry_rows", "entry_boundaries", "entry_snapshots", "entry_tags")
_DELTA_FIELDS = ("delta_groups", "delta_slots", "delta_indices", "delta_pages", "delta_stamps")
_DRAFT_FIELDS = ("draft_slots", "draft_samples", "draft_limits", "draft_tags")


def owner_tags(step: int, owners: Sequence[int]) -> np.ndarray:
    """`owner_tag` of a step and each of `owners`, all at once: [N] int64. What Python's integers are cut to wraps here."""
    words: np.ndarray = np.array(owners, np.uint64) * OWNER_FACTOR + step_word(step)
    words = (words ^ (words >> 30)) * MIX_FACTORS[0]
    words = (words ^ (words >> 27)) * MIX_FACTORS[1]
    words = words ^ (words >> 31)
    return words.view(np.int64)
