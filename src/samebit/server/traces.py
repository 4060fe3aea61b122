"""A span for each request that asks for an answer: what was asked for, how it fared, and when its phases began.

Knows requests, and OpenTelemetry's names for what there is to tell of them. Tells numbers and names only, never a prompt or
an answer. Does not know who sends spans where.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samebit.core.errors import InvalidRequestError
from samebit.core.request import EngineInfo
from samebit.engine.streams import OutputStream, RequestRecord
from samebit.server.translate import Job

_log = logging.getLogger(__name__)

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
_TRACED = "samebit.traced"
_SERVER_ERROR = 500

Value = str | int | float | list[str]


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """What is told of a request. Times are in nanoseconds since 1970; `parent` are the headers that name the trace it is part of."""

    name: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Value]
    events: list[tuple[str, int]]
    parent: dict[str, str]
    is_error: bool


@dataclass(slots=True)
class _Traced:
    """What is known of a request so far. Owned by its middleware, to which the handler tells what it finds out."""

    began_s: float
    job: Job | None = None
    stream: OutputStream | None = None
    info: EngineInfo | None = None
    status: int | None = None
    error: str | None = None


class TraceRequests:
    """Gives `record` the span of each request for an answer of `model`, once all of the answer is sent or nobody wants it any more."""

    def __init__(self, app: ASGIApp, record: Callable[[RequestSpan], None], model: str) -> None:
        self._app = app
        self._record = record
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on, and watch."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
            await self._app(scope, receive, send)
            return
        traced = _Traced(time.monotonic())

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                traced.status = message["status"]
            await send(message)

        try:
            await self._app({**scope, _TRACED: traced}, receive, watched)
        except BaseException as error:
            traced.error = type(error).__name__
            raise
        finally:
            self._end(traced, scope)

    def _end(self, traced: _Traced, scope: Scope) -> None:
        try:
            self._record(_span(traced, scope, self._model))
        except Exception:  # noqa: BLE001 - whatever is wrong with tracing, the request does not suffer from it
            _log.exception("a request could not be traced")


def tell_trace(scope: MutableMapping[str, Any], job: Job, stream: OutputStream | None, info: EngineInfo) -> None:
    """A request's handler knows what is asked for, and where its outputs come from. Any: ASGI's scope."""
    traced: _Traced | None = scope.get(_TRACED)
    if traced is not None:
        traced.job, traced.stream, traced.info = job, stream, info


@dataclass(slots=True)
class _Phases:
    """When the phases of all requests of a job began; None: they have not. Of several requests the first to begin and the last to end count."""

    arrived_s: float
    admitted_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float | None
    events: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        named = {"admitted": self.admitted_s, "first_token": self.first_token_s, "last_token": self.last_token_s}
        self.events = [(name, at_s) for name, at_s in named.items() if at_s is not None]


def _phases(records: Sequence[RequestRecord]) -> _Phases:
    ends = [record.ended_s for record in records]
    return _Phases(
        min(record.arrived_s for record in records),
        min(_known(record.admitted_s for record in records), default=None),
        min(_known(record.first_token_s for record in records), default=None),
        max(_known(record.last_token_s for record in records), default=None),
        None if None in ends else max(_known(ends)),
    )


def _span(traced: _Traced, scope: Scope, model: str) -> RequestSpan:
    ended_s, ended_ns = time.monotonic(), time.time_ns()
    operation = _OPERATIONS[scope["path"]]
    problem = _problem(traced)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "samebit",
        "http.request.method": scope["method"],
        "http.route": scope["path"],
    }
    if traced.status is not None:
        attributes["http.response.status_code"] = traced.status
    if problem is not None:
        attributes["error.type"] = problem
    if traced.job is not None:
        attributes |= _asked(traced.job, model)
    events: list[tuple[str, float]] = []
    if traced.job is not None and traced.info is not None and traced.stream is not None and traced.stream.records:
        records = traced.stream.records
        phases = _phases(records)
        events = phases.events
        attributes |= _latencies(phases, ended_s) | _usage(traced.job, records)
        attributes |= {
            "gen_ai.response.id": traced.job.id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [_finish_reason(record, problem) for record in records],
            "openai.response.system_fingerprint": traced.info.system_fingerprint,
        }

    def in_ns(at_s: float) -> int:
        return ended_ns - round((ended_s - at_s) * 1e9)

    headers = Headers(scope=scope)
    return RequestSpan(
        name=f"{operation} {model}",
        began_ns=in_ns(traced.began_s),
        ended_ns=ended_ns,
        attributes=attributes,
        events=[(name, in_ns(at_s)) for name, at_s in events],
        parent={name: value for name in ("traceparent", "tracestate") if (value := headers.get(name)) is not None},
        is_error=problem is not None,
    )


def _problem(traced: _Traced) -> str | None:
    """The kind of what went wrong that was not the client's doing; never its message, which may quote the client."""
    error = None if traced.stream is None else traced.stream.error
    if error is not None and not isinstance(error, InvalidRequestError):
        return type(error).__name__
    records = [] if traced.stream is None else traced.stream.records
    if any(record.last is not None and record.last.finish_reason == "error" for record in records):
        return "StepError"
    if traced.status is not None and traced.status >= _SERVER_ERROR:
        return str(traced.status)
    return traced.error


def _finish_reason(record: RequestRecord, problem: str | None) -> str:
    """Why a request ended. One that did not was broken off, by its client if nothing went wrong."""
    if record.last is not None and record.last.finish_reason is not None:
        return record.last.finish_reason
    return "abort" if problem is None else "error"


def _asked(job: Job, model: str) -> dict[str, Value]:
    params = job.requests[0].params
    asked: Mapping[str, Value | None] = {
        "gen_ai.request.id": job.id,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": job.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _usage(job: Job, records: Sequence[RequestRecord]) -> dict[str, Value]:
    """Tokens under the names of today's servers and of the conventions; a prompt counts once, with its first sample."""
    firsts = records[:: job.num_samples]
    prompt = sum(record.num_prompt_tokens for record in firsts)
    answer = 0 if job.is_scoring else sum(record.num_tokens for record in records)
    cached = sum(record.last.num_cached_tokens for record in firsts if record.last is not None)
    usage: dict[str, Value] = {
        **dict.fromkeys(("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"), prompt),
        **dict.fromkeys(("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"), answer),
        **dict.fromkeys(("gen_ai.usage.cached_tokens", "gen_ai.usage.cache_read.input_tokens"), cached),
    }
    misses = [record.last.cache_miss_reason for record in firsts if record.last is not None]
    return usage | ({"samebit.cache_miss_reason": misses[0]} if misses and misses[0] is not None else {})


def _latencies(phases: _Phases, now_s: float) -> dict[str, Value]:
    """Seconds from phase to phase, of those that have begun; what was broken off has ended now."""
    spans: Mapping[str, tuple[float | None, float | None]] = {
        "time_in_queue": (phases.arrived_s, phases.admitted_s),
        "time_to_first_token": (phases.arrived_s, phases.first_token_s),
        "time_in_model_prefill": (phases.admitted_s, phases.first_token_s),
        "time_in_model_decode": (phases.first_token_s, phases.last_token_s),
        "e2e": (phases.arrived_s, now_s if phases.ended_s is None else phases.ended_s),
    }
    return {
        f"gen_ai.latency.{name}": end_s - start_s
        for name, (start_s, end_s) in spans.items()
        if start_s is not None and end_s is not None
    }


def _known(times_s: Iterable[float | None]) -> list[float]:
    return [time_s for time_s in times_s if time_s is not None]
