"""Puts outputs together: one body, or events as they come, with usage, seed and fingerprint.

Knows jobs and shapes; does not know HTTP or who reads.
"""

import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from samebit.core.errors import SamebitError
from samebit.core.request import EngineInfo, EngineOutput, SpeculationCounts
from samebit.engine.streams import merge
from samebit.server.errors import describe
from samebit.server.response_models import (
    AnswerMetrics,
    CachedTokens,
    Choice,
    CompletionTokensDetails,
    PromptProgress,
    PromptTokensDetails,
    SpeculationFigures,
    Usage,
)
from samebit.server.shapes import Shape
from samebit.server.translate import Job

_DONE = b"data: [DONE]\n\n"


class Accounts:
    """What a job's answer has cost so far: tokens, cached ones among them, guesses. Owned by one answer."""

    def __init__(self, job: Job, info: EngineInfo) -> None:
        self._job = job
        self._num_speculative_tokens = info.num_speculative_tokens
        self._index_of = {request.request_id: index for index, request in enumerate(job.requests)}
        self._num_tokens = [0] * len(job.requests)
        self._num_reasoning = 0
        self._cached = [CachedTokens(0, None)] * len(job.requests)
        self._speculation = SpeculationCounts()

    def take(self, output: EngineOutput) -> int:
        """Count an output, and return the index of its choice. Raises what the engine ended the request with."""
        output.check()
        index = self._index_of[output.request_id]
        self._num_tokens[index] += 0 if self._job.is_scoring else len(output.token_ids)
        self._num_reasoning += output.token_kinds.count("reasoning")
        self._cached[index] = CachedTokens(output.num_cached_tokens, output.cache_miss_reason)
        self._speculation += output.speculation
        return index

    def usage(self) -> Usage:
        """Tokens; a prompt counts once, with its first sample."""
        step = self._job.num_samples
        prompt = sum(len(request.prompt_token_ids) for request in self._job.requests[::step])
        answer = sum(self._num_tokens)
        cached = self._cached[::step]
        details = PromptTokensDetails(
            sum(item.cached_tokens for item in cached), cached if self._job.wants_cache_details else UNSET
        )
        return Usage(prompt, answer, prompt + answer, details, CompletionTokensDetails(self._num_reasoning))

    def metrics(self) -> AnswerMetrics | UnsetType:
        """How guesses fared, if the client wants to know."""
        if not self._job.wants_speculation:
            return UNSET
        most = self._num_speculative_tokens
        return AnswerMetrics(speculation_figures(self._speculation, most) if most else None)


def speculation_figures(counts: SpeculationCounts, most: int) -> SpeculationFigures:
    """`counts` in vLLM's shape; `most`: guesses that a row can have."""
    reached = [counts.num_drafts, *counts.accepted_per_position, *[0] * (most + 1)][: most + 2]
    return SpeculationFigures(
        mean_acceptance_length=counts.mean_acceptance_length,
        draft_acceptance_rate=counts.num_accepted_tokens / counts.num_draft_tokens if counts.num_draft_tokens else 0.0,
        acceptance_histogram=[some - more for some, more in itertools.pairwise(reached)],
        num_spec_steps=counts.num_drafts,
        num_accepted_draft_tokens=counts.num_accepted_tokens,
        num_draft_tokens=counts.num_draft_tokens,
        num_spec_tokens=most,
    )


class Answer:
    """Owner of what is known of a job's answer so far, of one of the two endpoints whose answers are choices."""

    def __init__(self, job: Job, shape: Shape, model: str, info: EngineInfo) -> None:
        self._job = job
        self._shape = shape
        self._model = model
        self._fingerprint = info.system_fingerprint
        self._accounts = Accounts(job, info)
        self._began_s = time.monotonic()

    async def whole(self, outputs: AsyncIterator[EngineOutput]) -> bytes:
        """The body of an answer that is not streamed. Raises what the engine ended a request with."""
        parts: dict[str, list[EngineOutput]] = {}
        async for output in outputs:
            self._accounts.take(output)
            parts.setdefault(output.request_id, []).append(output)
        merged = [merge(parts[request.request_id]) for request in self._job.requests]
        choices = [self._shape.whole(index, output) for index, output in enumerate(merged)]
        costs = {"usage": self._accounts.usage(), "metrics": self._accounts.metrics()}
        extra = {"seed": self._job.seed, **costs, **self._shape.beside_choices(merged[0])}
        return self._encode(choices, self._shape.answer_type, self._shape.object_name, **extra)

    async def events(
        self, first: EngineOutput | None, outputs: AsyncIterator[EngineOutput]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer; `first`, if any, was taken from `outputs`. An error is an event and the last."""
        options = self._job.stream_options
        seed: dict[str, Any] = {"seed": self._job.seed}  # Any: fields of the answer types
        for index in range(len(self._job.requests)):
            opening = self._shape.opening(index)
            if opening is not None:
                yield self._event([opening], **seed)
                seed = {}
        try:
            async for output in chain(first, outputs):
                index = self._accounts.take(output)
                if self._job.requests[index].wants_progress and not output.token_ids and not output.finish_reason:
                    yield self._event([], prompt_progress=self._progress(index, output), **seed)
                    seed = {}
                for piece in self._shape.pieces(index, output):
                    yield self._event([piece], **seed)
                    seed = {}
        except SamebitError as error:
            yield _sse(msgspec.json.encode(describe(error)[1]))
            return
        if options.include_usage or self._job.wants_speculation:
            usage = {"usage": self._accounts.usage()} if options.include_usage else {}
            yield self._event([], **usage, metrics=self._accounts.metrics())
        yield _DONE

    def _progress(self, index: int, output: EngineOutput) -> PromptProgress:
        return PromptProgress(
            index=index,
            total=len(self._job.requests[index].prompt_token_ids),
            cache=output.num_cached_tokens,
            processed=output.num_processed_tokens,
            time_ms=round(1000 * (time.monotonic() - self._began_s)),
        )

    def _event(self, choices: list[Choice], **extra: Any) -> bytes:  # Any: as in `events`
        options = self._job.stream_options
        if "usage" not in extra and (options.include_usage or options.continuous_usage_stats):
            extra["usage"] = self._accounts.usage() if options.continuous_usage_stats else None
        return _sse(self._encode(choices, self._shape.chunk_type, self._shape.chunk_object_name, **extra))

    def _encode(
        self, choices: list[Choice], kind: type[msgspec.Struct], name: str, **extra: Any
    ) -> bytes:  # Any: as in `events`
        fields = {
            "id": self._job.id,
            "object": name,
            "created": self._job.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
        return msgspec.json.encode(kind(**fields, **extra))


async def chain(first: EngineOutput | None, rest: AsyncIterator[EngineOutput]) -> AsyncIterator[EngineOutput]:
    """`first`, if there is one yet, then the rest."""
    if first is not None:
        yield first
    async for output in rest:
        yield output


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
