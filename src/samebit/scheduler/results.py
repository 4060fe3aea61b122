"""What a row's results mean for its sequence: tokens taken in one at a time, and what the request is told of them."""

from __future__ import annotations

from samebit.core.plan import StepOutput
from samebit.core.request import SpeculationCounts, TokenLogprobs
from samebit.scheduler.counters import Counters
from samebit.scheduler.planning import PlannedRow
from samebit.scheduler.sequence import Progress, Sequence

_NO_GUESSES = SpeculationCounts()


def take_samples(
    sequence: Sequence,
    row: PlannedRow,
    samples: list[TokenLogprobs],
    num_accepted: int,
    output: StepOutput,
    counters: Counters,
) -> Progress | None:
    """Fold a row's results into its sequence: its own samples of `output` one by one, up to where it stops, and its guesses."""
    scored, drawn = samples[: row.num_scored], samples[row.num_scored :]
    reason, stop_id = None, None
    for place, item in enumerate(drawn, start=1):
        sequence.append(item.token_id)
        reason, stop_id = sequence.stop_after(item.token_id)
        if reason is not None:
            drawn = drawn[:place]
            break
    sequence.num_scored += len(scored)
    sequence.drew_last = bool(drawn)
    if row.draft_index is not None:
        sequence.drafts, sequence.confidence = output.drafts[row.draft_index], output.confidence[row.draft_index]
    elif sequence.drafts:
        sequence.drafts, sequence.confidence = [], []
    counts = _NO_GUESSES
    if row.drafts:
        counts = counters.verified(len(row.drafts), min(num_accepted, len(drawn)))
    if row.drafts or sequence.estimate.has_learned:
        sequence.estimate.learn(len(row.drafts), num_accepted)
    if not (scored or drawn or sequence.request.wants_progress):
        return None
    error = None if sequence.matcher is None else sequence.failure
    wanted = sequence.request.params.structured_outputs if error else None
    return Progress(
        request_id=sequence.request.request_id,
        tokens=drawn,
        prompt=scored,
        finish_reason=reason,
        stop_token_id=stop_id,
        error=error,
        error_param=None if wanted is None else wanted.field,
        speculation=counts,
        num_cached_tokens=max(sequence.num_cached, 0),
        num_processed_tokens=min(row.end, sequence.num_prompt),
        cache_miss_reason=sequence.miss_reason,
        num_preemptions=sequence.num_preemptions,
    )
