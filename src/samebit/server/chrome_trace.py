"""Requests as a trace in Chrome's format, a row of its own for each. Knows views only."""

from collections.abc import Iterable, Iterator

from samebit.engine.views import RequestView, StepView
from samebit.server.ui_models import Trace, TraceEvent


def chrome_trace(requests: Iterable[RequestView]) -> Trace:
    """Queueing, prefill, decoding and verification of `requests`."""
    return Trace(events=[event for row, request in enumerate(requests, start=1) for event in _events(request, row)])


def _events(request: RequestView, row: int) -> Iterator[TraceEvent]:
    end_s = request.ended_s or max((step.end_s for step in request.steps), default=request.admitted_s or 0.0)
    about: dict[str, int | float | str] = {
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "drawn_tokens": request.num_drawn_tokens,
        "finish_reason": request.finish_reason or "",
    }
    yield _event(f"request {request.label}", "request", request, row, (0.0, end_s), about)
    if request.admitted_s is not None:
        yield _event("queue", "queue", request, row, (0.0, request.admitted_s), {})
    for step in request.steps:
        yield _event(step.kind, "step", request, row, (step.start_s, step.end_s), _counts(step))


def _counts(step: StepView) -> dict[str, int | float | str]:
    return {
        "first": step.first,
        "tokens": step.num_tokens,
        "guesses": step.num_drafts,
        "accepted": step.num_accepted,
        "drawn": step.num_drawn,
        "steps": step.num_steps,
    }


def _event(
    name: str,
    category: str,
    request: RequestView,
    row: int,
    span_s: tuple[float, float],
    args: dict[str, int | float | str],
) -> TraceEvent:
    start_s, end_s = span_s
    return TraceEvent(
        name=name,
        cat=category,
        ph="X",
        ts=round((request.arrived_s + start_s) * 1e6, 1),
        dur=round(max(end_s - start_s, 0.0) * 1e6, 1),
        pid=1,
        tid=row,
        args=args,
    )
