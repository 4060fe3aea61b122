"""The buckets that steps are captured for when an engine starts: few, of growing size, and wide enough for ordinary steps.

Decoding and verification have buckets by rows and tokens of a row; steps with prefill have them by tokens, for any number of rows.
A step that fits none (logits of a whole prompt, more edits than there is room for) runs eagerly, with the same bits. Plain arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from samebit.core.request import MAX_LOGPROBS
from samebit.inputs import Bucket
from samebit.state.layout import StateGeometry

# Tokens of the smallest bucket with prefill.
_LEAST_PREFILL = 16
# Edited logits that a bucket has room for: so many a row, within bounds. They travel with each step, 16 bytes each.
_ROW_EDITS, _LEAST_EDITS, _MOST_EDITS = 512, 4096, 1 << 16
# Masks that a bucket has room for at most; each has a bit for every token.
_MOST_MASKS = 64


def ladder(geometry: StateGeometry, max_tokens: int, *, is_drafting: bool, vocab_size: int) -> list[Bucket]:
    """Buckets for steps of up to `max_tokens` tokens and all slots, by tokens; `is_drafting`: the device guesses tokens.

    Fewer, further apart, have room for logprobs of further tokens and for edits of logits, and as many for masks, too.
    """
    edited = [
        bucket._replace(
            top=min(MAX_LOGPROBS, vocab_size),
            edits=min(max(_LEAST_EDITS, _ROW_EDITS * bucket.rows), _MOST_EDITS),
        )
        for bucket in _plain(geometry, max_tokens, 4, is_drafting=is_drafting)
    ]
    words = -(-vocab_size // 32)
    masked = [bucket._replace(masks=min(bucket.samples, _MOST_MASKS), mask_words=words) for bucket in edited]
    return sorted((*_plain(geometry, max_tokens, 2, is_drafting=is_drafting), *edited, *masked))


def _plain(geometry: StateGeometry, max_tokens: int, factor: int, *, is_drafting: bool) -> list[Bucket]:
    """Buckets of decoding and verification, and of steps with prefill, each `factor` times the one before."""
    most_rows = geometry.num_slots
    verified = {1, 1 + geometry.max_drafts}
    decode = [
        _bucket(geometry, rows, rows * q, rows * q, q, is_drafting=is_drafting, is_resuming=False)
        for rows in _powers(1, most_rows, factor)
        for q in sorted(verified)
        if rows * q <= max_tokens
    ]
    prefill = [
        _bucket(
            geometry,
            rows := min(tokens, most_rows),
            tokens,
            min(tokens, rows * (1 + geometry.max_drafts)),
            tokens,
            is_drafting=is_drafting,
            is_resuming=True,
        )
        for tokens in _powers(_LEAST_PREFILL, max(max_tokens, _LEAST_PREFILL), factor)
    ]
    return decode + prefill


class Ladder:
    """Buckets in order, and for each of their sizes which are at least as large: a step's bucket is found by a search along each size."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = list(buckets)
        columns = list(zip(*self._buckets, strict=True)) or [()] * len(Bucket._fields)
        self._steps = [sorted(set(column)) for column in columns]
        # Bit i of a mask stands for bucket i; no bucket holds more than the largest size.
        self._masks = [
            [*(_bits(have >= need for have in column) for need in steps), 0]
            for column, steps in zip(columns, self._steps, strict=True)
        ]

    def first_that_holds(self, wanted: Bucket) -> Bucket | None:
        """The first of the buckets whose sizes are all large enough."""
        found = -1
        for need, steps, masks in zip(wanted, self._steps, self._masks, strict=True):
            found &= masks[bisect_left(steps, need)]
        return self._buckets[(found & -found).bit_length() - 1] if found else None


def _bits(flags: Iterable[bool]) -> int:
    """An integer whose bit i is the i-th of `flags`."""
    return sum(1 << place for place, flag in enumerate(flags) if flag)


def _powers(low: int, high: int, factor: int) -> list[int]:
    """`low` times powers of `factor`, and `high` instead of what is above it."""
    found = []
    while low < high:
        found.append(low)
        low *= factor
    return [*found, high]


def _bucket(
    geometry: StateGeometry, rows: int, tokens: int, samples: int, longest: int, *, is_drafting: bool, is_resuming: bool
) -> Bucket:
    """Room for what so many rows can need: a checkpoint or two each, new pages, and the pages of prefixes that are resumed."""
    pages = tokens // geometry.page_size + 3 * rows
    if is_resuming:
        pages += geometry.pages_per_sequence
    return Bucket(
        tokens=tokens,
        rows=rows,
        samples=samples,
        edits=0,
        entries=2 * rows,
        deltas=pages * len(geometry.layout.groups),
        top=0,
        drafts=rows if is_drafting else 0,
        longest=longest,
    )
