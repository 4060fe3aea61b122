"""Puts outputs together: one body, or events as they come, with usage, seed and fingerprint.

Knows jobs and shapes; does not know HTTP or who reads.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from samebit.core.errors import SamebitError, StepError
from samebit.core.request import EngineOutput, SpeculationCounts
from samebit.engine.streams import merge
from samebit.engine.tokenizer import Tokenizer
from samebit.server.errors import describe
from samebit.server.response_models import Choice, CompletionTokensDetails, PromptTokensDetails, Usage
from samebit.server.shapes import ChatShape, CompletionShape, Shape
from samebit.server.translate import Job

_DONE = b"data: [DONE]\n\n"


class Answer:
    """Owner of what is known of a job's answer so far."""

    def __init__(self, job: Job, tokenizer: Tokenizer, *, is_chat: bool, model: str, fingerprint: str) -> None:
        self._job = job
        self._shape: Shape = ChatShape(job, tokenizer) if is_chat else CompletionShape(job, tokenizer)
        self._model = model
        self._fingerprint = fingerprint
        self._index_of = {request.request_id: index for index, request in enumerate(job.requests)}
        self._num_tokens = [0] * len(job.requests)
        self._num_cached = [0] * len(job.requests)
        self._speculation = SpeculationCounts()

    async def whole(self, outputs: AsyncIterator[EngineOutput]) -> bytes:
        """The body of an answer that is not streamed. Raises what the engine ended a request with."""
        parts: dict[str, list[EngineOutput]] = {}
        async for output in outputs:
            self._count(output)
            parts.setdefault(output.request_id, []).append(output)
        merged = [merge(parts[request.request_id]) for request in self._job.requests]
        choices = [self._shape.whole(index, output) for index, output in enumerate(merged)]
        extra = {"seed": self._job.seed, "usage": self._usage(), **self._shape.beside_choices(merged[0])}
        return self._encode(choices, self._shape.answer_type, self._shape.object_name, **extra)

    async def events(self, first: EngineOutput, outputs: AsyncIterator[EngineOutput]) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer; `first` was taken from `outputs` before. An error is an event and the last."""
        options = self._job.stream_options
        seed: dict[str, Any] = {"seed": self._job.seed}  # Any: fields of the answer types
        for index in range(len(self._job.requests)):
            opening = self._shape.opening(index)
            if opening is not None:
                yield self._event([opening], **seed)
                seed = {}
        try:
            async for output in _chain(first, outputs):
                self._count(output)
                piece = self._shape.piece(self._index_of[output.request_id], output)
                if piece is not None:
                    yield self._event([piece], **seed)
                    seed = {}
        except SamebitError as error:
            yield _sse(msgspec.json.encode(describe(error)[1]))
            return
        if options.include_usage:
            yield self._event([], usage=self._usage())
        yield _DONE

    def _count(self, output: EngineOutput) -> None:
        if output.finish_reason == "error":
            raise StepError(output.error or "the request failed")
        index = self._index_of[output.request_id]
        self._num_tokens[index] += 0 if self._job.is_scoring else len(output.token_ids)
        self._num_cached[index] = output.num_cached_tokens
        self._speculation += output.speculation

    def _usage(self) -> Usage:
        step = self._job.num_samples
        prompt = sum(len(request.prompt_token_ids) for request in self._job.requests[::step])
        answer = sum(self._num_tokens)
        accepted = self._speculation.num_accepted_tokens
        guesses = CompletionTokensDetails(accepted, self._speculation.num_draft_tokens - accepted)
        return Usage(prompt, answer, prompt + answer, PromptTokensDetails(sum(self._num_cached[::step])), guesses)

    def _event(self, choices: list[Choice], **extra: Any) -> bytes:  # Any: as in `events`
        options = self._job.stream_options
        if "usage" not in extra and (options.include_usage or options.continuous_usage_stats):
            extra["usage"] = self._usage() if options.continuous_usage_stats else None
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


async def _chain(first: EngineOutput, rest: AsyncIterator[EngineOutput]) -> AsyncIterator[EngineOutput]:
    yield first
    async for output in rest:
        yield output


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
