"""The contract of one step: `BatchPlan` in, `StepOutput` back. Plain integers, the same on every rank.

A step is plan -> execute -> commit. Nothing else crosses between the scheduler and a runner. There is one row shape,
`(sequence, first position, number of tokens)`; prefill, decode and publication differ only in their numbers. What there are many of
in a step takes no part in garbage collection (`gc=False`): nothing in it refers back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NewType, Protocol

import msgspec

from samebit.core.request import TokenLogprobs

SlotId = NewType("SlotId", int)
PageId = NewType("PageId", int)
SnapshotId = NewType("SnapshotId", int)

SINK_PAGE = PageId(0)
NO_SNAPSHOT = SnapshotId(0)
DRAW = -1
# Far below any logit, yet finite: an infinity marks a logits row as broken.
BANNED_LOGIT = -1e30

_MASK = (1 << 64) - 1
_POSITION_STEP = 0x9E3779B97F4A7C15
OWNER_FACTOR = 0xAF251AF3B0F025B5
MIX_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def owner_tag(step: int, owner: int) -> int:
    """A signed 64-bit word for what `owner` writes in `step` (the finaliser of SplitMix64 over both numbers)."""
    word = (step_word(step) + owner * OWNER_FACTOR) & _MASK
    word = ((word ^ (word >> 30)) * MIX_FACTORS[0]) & _MASK
    word = ((word ^ (word >> 27)) * MIX_FACTORS[1]) & _MASK
    return _signed(word ^ (word >> 31))


def step_word(step: int) -> int:
    """The step's share of an owner's tag, before both are mixed."""
    return (step * 0xD1342543DE82EF95 + _POSITION_STEP) & _MASK


def position_tag(tag: int, position: int) -> int:
    """The tag of one position under an owner's tag; devices compute the same sum with wrapping int64 arithmetic."""
    return _signed((tag + position * _POSITION_STEP) & _MASK)


def entry_tag(step: int, owner: int, boundary: int) -> int:
    """The tag of the conv rows of a checkpoint at `boundary`; distinct from every position tag of the same step."""
    return owner_tag(step, (owner << 32) ^ (boundary + 1) ^ (1 << 62))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def drafter_of(owner: int) -> int:
    """Who writes for `owner` behind its committed tokens: a drafter, whose tags are never expected later."""
    return owner ^ (1 << 60)


class PlanRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step: tokens at positions `start .. start + num_tokens - 1`.

    `token_ids` has `num_tokens` ids, or is empty where the device continues from its own words for the slot (length,
    last drawn token, drafts). The last `num_drafts` of the tokens are guesses; they stay as far as the target draws the
    same. `num_tokens` 0 publishes only. `resume_snapshot` names the checkpoint whose conv rows precede `start`;
    NO_SNAPSHOT means the slot's ring. `owner` is the sequence's number, never used twice.
    """

    request_id: str
    slot: SlotId
    owner: int
    start: int
    num_tokens: int
    token_ids: list[int]
    resume_snapshot: SnapshotId = NO_SNAPSHOT
    resume_tag: int = 0
    num_drafts: int = 0


class PageDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Page `page` (with the stamp its last row must carry; 0: not complete) becomes entry `index` of a slot's table."""

    group: int
    slot: SlotId
    index: int
    page: PageId
    stamp: int = 0


class CheckpointEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The K-1 conv inputs before `boundary` of batch row `row` go to `snapshot`, tagged `tag`, in every stream.

    With NO_SNAPSHOT nothing is kept and only the pages below `boundary` are compared: that is how a resume is verified.
    """

    row: int
    boundary: int
    snapshot: SnapshotId
    tag: int


class LogitEdits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Before a draw the logit x of each of `token_ids` becomes (x / penalty if x > 0 else x * penalty) + shift, in fp32.

    Penalties and shifts, one for each token, are rounded to fp32 first. No token is named twice; a shift of BANNED_LOGIT bans one.
    `allowed` bans all tokens whose bit is 0, whatever their edits: bit t % 32 of its t // 32-th little-endian 32-bit word is
    token t's. Empty: it bans none. All that are not empty have the same length.
    """

    token_ids: Sequence[int] = []
    penalties: Sequence[float] = []
    shifts: Sequence[float] = []
    allowed: bytes = b""


class PlanSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A logits row: the token after token `offset` of batch row `row` is drawn, or `target` is scored (prompt logprobs).

    A batch row with drafts draws after the token before them and after each of them, in order. Without edits these draws are one sample,
    which stands for `count` logits rows whose offsets follow one another; with `edits`, which change the logits that a draw sees, each
    has its own. Logprobs are those of the raw logits all the same.
    """

    row: int
    offset: int
    target: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample_index: int
    num_top: int
    edits: LogitEdits = LogitEdits()
    count: int = 1


class PlanDraft(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens behind what batch row `row` draws are to be guessed; its positions below `limit` exist and have pages."""

    row: int
    limit: int


class RetiredIds(msgspec.Struct, frozen=True, array_like=True):
    """Ids that returned to the free lists before this step; with poison on, their memory is overwritten first."""

    pages: list[tuple[int, PageId]] = []
    snapshots: list[SnapshotId] = []
    slots: list[SlotId] = []


class BatchPlan(msgspec.Struct, frozen=True, array_like=True):
    """Everything a rank needs for one step."""

    step: int
    rows: list[PlanRow]
    samples: list[PlanSample]
    entries: list[CheckpointEntry]
    page_deltas: list[PageDelta]
    retired: RetiredIds = RetiredIds()
    drafts: list[PlanDraft] = []
    pad_tokens: int = 0
    pad_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum([row.num_tokens for row in self.rows])

    @property
    def num_samples(self) -> int:
        """Logits rows of all samples."""
        return sum([sample.count for sample in self.samples])


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What the device answers: logits rows in the order of the plan's samples, and what was found intact.

    `samples[i]`: the drawn (or scored) token of the i-th logits row; `finite[i]` is false when any logit of it was NaN or infinite.
    `accepted[b]`: how many of row b's drafts, from the first on, are what the target drew there. `rows_intact[b]`: the
    conv rows that row b read carried the expected tags in every stream. `pages_intact[e]`: every page below entry e's
    boundary carries the expected stamp in every layer. `rows_written[e]`: entry e's conv rows carry its tag in every
    stream. `drafts[i]`, `confidence[i]`: guesses of the tokens behind what was drawn for the row of the plan's i-th draft, which
    its slot keeps for the next step, and how likely each is right if those before it are.
    """

    step: int
    samples: list[TokenLogprobs]
    finite: list[bool]
    accepted: list[int]
    rows_intact: list[bool]
    pages_intact: list[bool]
    rows_written: list[bool]
    drafts: list[list[int]] = []
    confidence: list[list[float]] = []


class Runner(Protocol):
    """Executes plans; the only thing that an engine knows of devices."""

    def launch(self, plan: BatchPlan) -> Callable[[], StepOutput]:
        """Begin one step, behind those that were begun before; what is returned waits for its results."""
        ...
