"""The buckets that steps are captured for when an engine starts: few, of growing size, and wide enough for ordinary steps.

Decoding and verification have buckets by rows and tokens of a row; steps with prefill have them by tokens, for any number of rows.
A step that fits none (many logprobs wanted, logits of a whole prompt) runs eagerly, with the same bits. Plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple

from samebit.inputs import Bucket
from samebit.state.layout import StateGeometry

# Tokens of the smallest bucket with prefill.
_LEAST_PREFILL = 16


def ladder(geometry: StateGeometry, max_tokens: int, *, is_drafting: bool) -> list[Bucket]:
    """Buckets for steps of up to `max_tokens` tokens and all slots, by tokens; `is_drafting`: the device guesses tokens."""
    most_rows = geometry.num_slots
    verified = {1, 1 + geometry.max_drafts}
    decode = [
        _bucket(geometry, rows, rows * q, rows * q, is_drafting=is_drafting, is_resuming=False)
        for rows in _powers(1, most_rows)
        for q in sorted(verified)
        if rows * q <= max_tokens
    ]
    prefill = [
        _bucket(
            geometry,
            rows := min(tokens, most_rows),
            tokens,
            min(tokens, rows * (1 + geometry.max_drafts)),
            is_drafting=is_drafting,
            is_resuming=True,
        )
        for tokens in _powers(_LEAST_PREFILL, max(max_tokens, _LEAST_PREFILL))
    ]
    return sorted(decode + prefill, key=astuple)


def first_that_holds(wanted: Bucket, buckets: Iterable[Bucket]) -> Bucket | None:
    """The first of `buckets` whose sizes are all large enough."""
    sizes = astuple(wanted)
    return next((b for b in buckets if all(have >= need for have, need in zip(astuple(b), sizes, strict=True))), None)


def _powers(low: int, high: int) -> list[int]:
    """Powers of two from `low` on, and `high` instead of what is above it."""
    found = []
    while low < high:
        found.append(low)
        low *= 2
    return [*found, high]


def _bucket(
    geometry: StateGeometry, rows: int, tokens: int, samples: int, *, is_drafting: bool, is_resuming: bool
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
    )
