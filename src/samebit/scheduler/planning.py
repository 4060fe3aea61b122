"""Spelling a decided step out as a BatchPlan: boundaries crossed, logits rows needed, a test schedule's disturbance.

The scheduler decides which sequences take how many tokens; everything here follows from that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from samebit.core.config import EngineConfig, Schedule
from samebit.core.plan import (
    DRAW,
    NO_SNAPSHOT,
    BatchPlan,
    CheckpointEntry,
    PlanDraft,
    PlanRow,
    PlanSample,
    owner_tag,
)
from samebit.scheduler.drafts import drafting_pays, least_survival, worth
from samebit.scheduler.edits import NO_EDITS
from samebit.scheduler.sequence import Sequence
from samebit.state.layout import StateGeometry
from samebit.state.manager import PendingCheckpoint, SequenceState, StateManager
from samebit.state.nodes import Checkpoint, CheckpointKind


class PlannedRow(msgspec.Struct, eq=False):
    """A sequence's share of a step, and where the plan asks for its parts. Made by `planned_row`; the scheduler's, until it is committed.

    A struct, although it changes: one is made for each row of each step, and a dataclass takes several times as long.

    `state` is the sequence's state when it was planned, `resume` the checkpoint that its ring is filled from first. `drafts` are the
    guessed tokens at the row's end. `num_ahead`: how many tokens the step before it draws for the sequence, at most; these, and its own
    guesses, only the device knows, and `start` is where the row begins if all guesses of that step are right; `end` is the position behind
    its tokens, if they are, until that is known, and then where it is. `draws`: it reaches the last token that its sequence has then, and draws the next. `pending` pairs
    an entry's index with its checkpoint; `resume_entry` is the index of the entry that compares a resumed state's pages;
    of its logits rows, from `first_sample` on, the first `num_scored` score tokens and the others draw; `draft_index`: which
    of the step's proposals is its own.
    """

    sequence: Sequence
    state: SequenceState
    start: int
    end: int
    num_tokens: int
    draws: bool
    drafts: list[int]
    num_ahead: int
    resume: Checkpoint | None
    pending: tuple[tuple[int, PendingCheckpoint], ...] = ()
    resume_entry: int | None = None
    first_sample: int = 0
    num_scored: int = 0
    draft_index: int | None = None


def planned_row(
    sequence: Sequence,
    state: SequenceState,
    start: int,
    num_tokens: int,
    drafts: list[int],
    num_ahead: int = 0,
    resume: Checkpoint | None = None,
) -> PlannedRow:
    """The row of `num_tokens` tokens from `start` on."""
    end = start + num_tokens
    draws = num_tokens > 0 and end - len(drafts) == len(sequence.token_ids) + num_ahead
    return PlannedRow(sequence, state, start, end, num_tokens, draws, drafts, num_ahead, resume)


class PlannedStep(NamedTuple):
    """A step that is planned and not committed."""

    step: int
    rows: list[PlannedRow]


def write_plan(
    step: int, planned: list[PlannedRow], manager: StateManager, config: EngineConfig, *, is_drafting: bool
) -> BatchPlan:
    """The plan of `planned`, whose places in it are noted in each PlannedRow; checkpoints get their snapshots here.

    `is_drafting`: the device guesses further tokens for the rows that can have them.
    """
    schedule, size, is_caching = config.schedule, config.page_size, manager.enable_caching
    if schedule.shuffle_rows:
        planned.sort(key=lambda row: owner_tag(step ^ (schedule.seed << 32), row.state.owner))
    rows, deltas, num_samples = [], [], 0
    samples: list[PlanSample] = []
    entries: list[CheckpointEntry] = []
    drafts: list[PlanDraft] = []
    for number, row in enumerate(planned):
        rows.append(_plan_row(row))
        wants_drafts = is_drafting and _has_room_for_drafts(row)
        if wants_drafts:
            # Guesses lie behind the row; where there are no pages for them they are worth nothing, and do no harm.
            behind = min(row.end + manager.geometry.max_drafts, row.sequence.max_length)
            manager.grow(row.state, behind - row.state.length)
        if row.state.deltas:
            deltas += manager.take_deltas(row.state)
        if row.resume is not None:
            row.resume_entry = len(entries)
            entries.append(manager.resume_entry(row.state, number))
        # Boundaries lie between pages.
        if is_caching and (row.start // size != row.end // size or not row.num_tokens):
            for boundary, kind in _boundaries(row, config):
                pending = manager.plan_checkpoint(row.state, number, boundary, kind, step)
                if pending is not None:
                    row.pending += ((len(entries), pending),)
                    entries.append(pending.entry)
        row.first_sample = num_samples
        num_samples += _plan_samples(row, number, samples)
        if wants_drafts:
            row.draft_index = len(drafts)
            # The last page may end behind the last position that there is.
            drafts.append(PlanDraft(number, min(row.state.reach, row.sequence.max_length)))
    retired = manager.take_newly_free()
    return BatchPlan(
        step=step,
        rows=rows,
        samples=samples,
        entries=entries,
        page_deltas=deltas,
        retired=retired,
        drafts=drafts,
        pad_tokens=schedule.pad_tokens,
        pad_rows=schedule.pad_rows,
    )


def next_scored(sequence: Sequence) -> int:
    """Index of the first prompt token whose logprob is still to be reported."""
    return max(1, sequence.request.prompt_logprobs_start) + sequence.num_scored


def match_limit(sequence: Sequence) -> int:
    """Deepest checkpoint a sequence may resume from: one token must be left to compute, and all those to be scored."""
    limit = len(sequence.token_ids) - 1
    if sequence.request.params.prompt_logprobs is not None and next_scored(sequence) < sequence.num_prompt:
        limit = min(limit, next_scored(sequence) - 1)
    return 0 if sequence.is_cold or sequence.request.is_shadow else limit


def promised_boundary(leader: Sequence, follower: Sequence, limit: int, config: EngineConfig) -> int:
    """The deepest boundary within `limit` that `leader` has yet to publish and `follower` could resume from; or 0.

    A leader that runs publishes its prompt; one that has ended, all that it has.
    """
    assert leader.state is not None, "who runs or is published has state"
    length = leader.state.length
    if leader.token_ids[0] != follower.token_ids[0]:
        return 0
    if leader.status == "publishing":
        floor = publishable_boundary(leader.state, config.page_size) or 0
        return floor if _shared_length(leader.token_ids, follower.token_ids, limit) >= floor else 0
    if length >= leader.prompt_end:
        return 0
    shared = _shared_length(leader.token_ids, follower.token_ids, limit)
    interval = config.checkpoint_interval
    promised = max(shared // interval * interval, leader.prompt_end if leader.prompt_end <= shared else 0)
    return promised if promised > length else 0


def awaits_prefix(follower: Sequence, others: Iterable[Sequence], manager: StateManager, config: EngineConfig) -> bool:
    """Whether one of `others`, which run or are published, is about to publish more of `follower`'s tokens than the cache holds."""
    if not manager.enable_caching:
        return False
    limit, salt = match_limit(follower), follower.request.cache_salt
    leaders = [sequence for sequence in others if sequence.request.cache_salt == salt]
    best = max((promised_boundary(leader, follower, limit, config) for leader in leaders), default=0)
    return best > 0 and best > manager.match_length(salt, follower.token_ids, limit)


def chunk_limit(schedule: Schedule, sequence: Sequence, length: int) -> int:
    """`length`, or less where the schedule cuts a sequence's next chunk."""
    if not schedule.chunk_sizes:
        return length
    return min(length, schedule.chunk_sizes[sequence.num_chunks % len(schedule.chunk_sizes)])


def is_picked(schedule: Schedule, step: int, owner: int) -> bool:
    """A seeded choice that is true for `preempt_percent` of all (step, owner) pairs."""
    percent = schedule.preempt_percent
    return percent > 0 and owner_tag(step ^ (schedule.seed << 32), owner) % 100 < percent


def picked(running: list[Sequence], schedule: Schedule, step: int) -> list[Sequence]:
    """Sequences that the test schedule preempts before `step`, the youngest first; never the oldest."""
    found = []
    for sequence in running[:0:-1] if schedule.preempt_percent else ():
        assert sequence.state is not None, "a running sequence has state"
        if is_picked(schedule, step, sequence.state.owner):
            found.append(sequence)
    return found


def worthy_guesses(
    running: Collection[Sequence], waiting: Iterable[Sequence], config: EngineConfig, step: int, *, max_drafts: int
) -> dict[str, list[int]]:
    """For each request of which only the last token is left to compute, the guesses that are worth verifying."""
    if not max_drafts or not any(map(_has_guesses, running)):
        return {}
    offers: dict[str, tuple[list[int], list[float]]] = {}
    num_left = num_running = num_draws = 0
    for sequence in running:
        state = sequence.state
        assert state is not None, "a running sequence has state"
        begins = next_row(sequence, state)
        if begins is None:
            continue
        start, num_ahead = begins
        left = len(sequence.token_ids) + num_ahead - start
        num_left, num_running, num_draws = num_left + left, num_running + 1, num_draws + (left == 1)
        offer = _offer(sequence, num_ahead, max_drafts) if left == 1 else []
        if offer:
            confidence = [] if num_ahead else sequence.confidence
            survivals = sequence.estimate.survivals(confidence[: len(offer)] or [1.0] * len(offer))
            offers[sequence.request.request_id] = spoiled(config.schedule, step, state.owner, offer), survivals
    if not offers:
        return {}
    if num_running < config.max_num_seqs:
        num_left += sum(len(sequence.token_ids) for sequence in waiting)
    num_tokens = min(num_left, config.max_num_batched_tokens)
    token_cost = config.speculative_config.settled_token_cost if config.speculative_config else 0.0
    least = least_survival((survivals for _, survivals in offers.values()), num_tokens, num_draws, token_cost)
    return {request_id: worth(offer, survivals, least) for request_id, (offer, survivals) in offers.items()}


def is_worth_drafting(planned: list[PlannedRow], config: EngineConfig, geometry: StateGeometry) -> bool:
    """Whether the device is to guess behind the rows of a step: whether steps like it gain from guesses, by the requests' own record."""
    speculation, most = config.speculative_config, geometry.max_drafts
    if speculation is None or not most:
        return most > 0
    rates = [row.sequence.estimate.rate for row in planned if _has_room_for_drafts(row)]
    num_tokens = sum(row.num_tokens - len(row.drafts) for row in planned)
    return drafting_pays(rates, most, num_tokens, speculation.settled_token_cost, speculation.draft_cost or 0.0)


def _has_guesses(sequence: Sequence) -> bool:
    """Whether there may be guesses of a sequence's next tokens, or will be when the step in flight ends."""
    is_guessed_for = sequence.flight is not None and sequence.flight.draft_index is not None
    return is_guessed_for or bool(sequence.drafts) or sequence.proposer is not None


def _offer(sequence: Sequence, num_ahead: int, max_drafts: int) -> list[int]:
    """Guesses of the tokens behind a sequence's last one, fewer than it may still have; DRAW for one that only the device knows."""
    limit = max(0, min(sequence.max_length - len(sequence.token_ids) - num_ahead - 1, max_drafts))
    if num_ahead:
        return [DRAW] * limit if sequence.flight is not None and sequence.flight.draft_index is not None else []
    if not limit or sequence.proposer is None:
        found = sequence.drafts[:limit]
    else:
        found = sequence.proposer.propose(sequence.token_ids, limit)[:limit]
    return found if sequence.matcher is None else found[: sequence.matcher.num_allowed(found)]


def spoiled(schedule: Schedule, step: int, owner: int, guesses: list[int]) -> list[int]:
    """`guesses`, a seeded `spoil_percent` of them replaced by another token."""
    if not schedule.spoil_percent:
        return guesses
    words = (owner_tag(step ^ (schedule.seed << 32), ((place + 1) << 40) ^ owner) for place in range(len(guesses)))
    picked = (word % 100 < schedule.spoil_percent for word in words)
    return [(token - 1 if token else 1) if pick else token for token, pick in zip(guesses, picked, strict=True)]


def may_plan_ahead(flight: PlannedStep, running: list[Sequence], schedule: Schedule) -> bool:
    """Whether the step behind `flight` may be planned while that runs: not if the test schedule, or most of its rows, need its results.

    Those would be left behind, and from then on share no step with the rest.
    """
    if schedule.spoil_percent or picked(running, schedule, flight.step + 1):
        return False
    num_bound = sum([row.sequence.needs_results for row in flight.rows if row.sequence.is_bound])
    return not num_bound or 2 * num_bound <= sum([row.num_tokens > 0 for row in flight.rows])


def next_row(sequence: Sequence, state: SequenceState) -> tuple[int, int] | None:
    """Where a sequence's next row begins, and how many tokens what is in flight draws for it until then; both at most.

    None where nothing can be planned before the row in flight is committed: not all that the host adds to the next is known if an
    edit depends on what is drawn, or on how much, or if the host guesses; or the sequence may have ended.
    """
    flight = sequence.flight
    if flight is None:
        return state.length, 0
    if sequence.finish_reason is not None or sequence.needs_results:
        return None
    if flight.drafts and sequence.num_output + 1 < sequence.request.params.min_tokens:
        return None
    num_ahead = 1 + len(flight.drafts) if flight.draws else 0
    if num_ahead and len(sequence.token_ids) + num_ahead >= sequence.max_length:
        return None
    return flight.end, num_ahead


def may_pass_boundary(sequence: Sequence, state: SequenceState, end: int, config: EngineConfig) -> bool:
    """Whether a row up to `end`, whose first position the guesses in flight decide, may reach a boundary, or begin behind one."""
    flight = sequence.flight
    assert flight is not None, "there are guesses in flight"
    return bool(
        _between(sequence, state, flight.end - len(flight.drafts), end, config.checkpoint_interval, config.page_size)
    )


def publishable_boundary(state: SequenceState, page_size: int) -> int | None:
    """The page floor of a committed length, unless it is already published (or empty)."""
    floor = state.length // page_size * page_size
    return floor if floor > state.published else None


def _shared_length(one: list[int], other: list[int], limit: int) -> int:
    """How many of their first `limit` tokens two sequences share."""
    low, high = 0, min(len(one), len(other), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _has_room_for_drafts(row: PlannedRow) -> bool:
    """Whether a row draws, and its sequence may have two more tokens behind the one that it is sure to get."""
    sequence, end = row.sequence, row.end - len(row.drafts)
    return row.draws and sequence.request.params.speculation and sequence.max_length - end >= 3


def _plan_row(row: PlannedRow) -> PlanRow:
    sequence, start, drafts, resume = row.sequence, row.start, row.drafts, row.resume
    # The device has what it drew and guessed last; guesses of the host are new to it.
    is_known = row.num_ahead > 0 or (sequence.drew_last and drafts == sequence.drafts[: len(drafts)])
    return PlanRow(
        sequence.request.request_id,
        row.state.slot,
        row.state.owner,
        start,
        row.num_tokens,
        [] if is_known else [*sequence.token_ids[start : row.end], *drafts],
        NO_SNAPSHOT if resume is None else resume.snapshot,
        0 if resume is None else resume.tag,
        len(drafts),
    )


def _boundaries(row: PlannedRow, config: EngineConfig) -> list[tuple[int, CheckpointKind]]:
    """Boundaries b with start < b <= end: grid, prompt end and fork; for an ending sequence, its page floor."""
    sequence, size = row.sequence, config.page_size
    if sequence.status == "publishing":
        floor = publishable_boundary(row.state, size)
        kind = CheckpointKind.RESPONSE_END if sequence.finish_reason else CheckpointKind.PREEMPTED
        return [] if floor is None else [(floor, kind)]
    return _between(sequence, row.state, row.start, row.end, config.checkpoint_interval, size)


def _between(
    sequence: Sequence, state: SequenceState, start: int, end: int, interval: int, page_size: int
) -> list[tuple[int, CheckpointKind]]:
    """Boundaries of a running sequence with start < b <= end."""
    if start // page_size == end // page_size or sequence.request.is_shadow:
        return []
    found = dict.fromkeys(range((start // interval + 1) * interval, end + 1, interval), CheckpointKind.GRID)
    single = {sequence.prompt_end: CheckpointKind.PROMPT_END, state.fork: CheckpointKind.FORK}
    found |= {boundary: kind for boundary, kind in single.items() if start < boundary <= end}
    return sorted(found.items())


def _plan_samples(row: PlannedRow, number: int, samples: list[PlanSample]) -> int:
    """Add the samples of a batch row: prompt tokens to score; draws from the sequence's last token on, if it gets there. How many logits rows they are."""
    sequence, start, drafts = row.sequence, row.start, row.drafts
    end, params = row.end - len(drafts), sequence.request.params
    num_draws, settings = 1 + len(drafts) if row.draws else 0, sequence.settings
    if row.num_tokens and params.prompt_logprobs is not None:
        first, num_top = max(start + 1, next_scored(sequence)), params.prompt_logprobs
        scored = sequence.token_ids[first : min(end + 1, sequence.num_prompt)]
        samples += [PlanSample(number, first - 1 - start + i, t, *settings, num_top) for i, t in enumerate(scored)]
        row.num_scored = len(scored)
    offset, num_top, edits = end - 1 - start, params.logprobs or 0, NO_EDITS
    if num_draws and not sequence.is_edited:
        temperature, top_k, top_p, min_p, seed, index = settings  # handed over as a whole they would take twice as long
        samples.append(
            PlanSample(number, offset, DRAW, temperature, top_k, top_p, min_p, seed, index, num_top, edits, num_draws)
        )
        return row.num_scored + num_draws
    for ahead in range(num_draws):
        # Whoever is planned ahead has no edits that depend on what a token is, only on how many there are.
        edits = sequence.logit_edits([DRAW] * row.num_ahead + drafts[:ahead])
        samples.append(PlanSample(number, offset + ahead, DRAW, *settings, num_top, edits))
    return row.num_scored + num_draws
