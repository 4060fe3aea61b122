"""What a row's results mean for its sequence: tokens taken in one at a time, and what the request is told of them."""

from __future__ import annotations

from samebit.core.plan import DRAW
from samebit.core.request import SpeculationCounts, TokenLogprobs
from samebit.scheduler.counters import Counters
from samebit.scheduler.planning import PlannedRow
from samebit.scheduler.sequence import Progress, Sequence

_NO_GUESSES = SpeculationCounts()


def take_samples(
    sequence: Sequence, row: PlannedRow, samples: list[TokenLogprobs], num_accepted: int, counters: Counters
) -> Progress | None:
    """Fold a row's results into its sequence one by one, up to where it stops."""
    scored: list[TokenLogprobs] = []
    drawn: list[TokenLogprobs] = []
    reason, stop_id = None, None
    for target, item in zip(row.targets, samples, strict=False):
        if target != DRAW:
            scored.append(item)
            continue
        drawn.append(item)
        sequence.append(item.token_id)
        reason, stop_id = sequence.stop_after(item.token_id)
        if reason is not None:
            break
    sequence.num_scored += len(scored)
    sequence.drew_last, sequence.drafts, sequence.confidence = bool(drawn), [], []
    sequence.estimate.learn(len(row.drafts), num_accepted)
    counts = _NO_GUESSES
    if row.drafts:
        counts = counters.verified(len(row.drafts), min(num_accepted, len(drawn)))
    if not (scored or drawn or sequence.request.wants_progress):
        return None
    error, wanted = sequence.failure, sequence.request.params.structured_outputs
    return Progress(
        request_id=sequence.request.request_id,
        tokens=drawn,
        prompt=scored,
        finish_reason=reason,
        stop_token_id=stop_id,
        error=error,
        error_param=wanted.field if wanted is not None and error else None,
        speculation=counts,
        num_cached_tokens=max(sequence.num_cached, 0),
        num_processed_tokens=min(row.end, sequence.num_prompt),
        cache_miss_reason=sequence.miss_reason,
        num_preemptions=sequence.num_preemptions,
    )
