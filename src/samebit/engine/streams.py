"""Outputs of requests on their way to a reader who may be slow. Knows no sockets and not who sends."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from samebit.core.errors import SamebitError
from samebit.core.reply import joined
from samebit.core.request import EngineOutput, SpeculationCounts


@dataclass(slots=True)
class RequestRecord:
    """How a request has fared so far; times are those of `time.monotonic`. Kept by the client.

    `admitted_s`: when its first step began. `num_tokens`: of the answer, read or not. `last`: its last output.
    """

    arrived_s: float
    num_prompt_tokens: int
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    last: EngineOutput | None = None


class OutputStream:
    """Outputs of a group of requests as they come, until all have finished. One reader.

    What has not been read comes as one output per request, so a slow reader holds nobody up and costs
    no more memory than its answer. Closing it aborts what has not finished.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        """`abort` is called with the requests that have not finished when the stream is closed."""
        self.records: list[RequestRecord] = []
        """One for each request, in order (filled by the client)."""
        self._abort = abort
        self._unfinished = set(request_ids)
        self._pending: dict[str, list[EngineOutput]] = {}
        self._error: SamebitError | None = None
        self._changed = asyncio.Event()

    @property
    def error(self) -> SamebitError | None:
        """What the stream ended with, if it was no output."""
        return self._error

    def put(self, output: EngineOutput) -> None:
        """Add what a request gained (called by the client)."""
        self._pending.setdefault(output.request_id, []).append(output)
        self._changed.set()

    def fail(self, error: SamebitError) -> None:
        """End the stream with `error` after what is pending (called by the client)."""
        self._error = self._error or error
        self._changed.set()

    def close(self) -> None:
        """Abort what has not finished. May be called twice."""
        self._abort(list(self._unfinished))
        self._unfinished.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        """The next output. Raises what the engine refused a request with, or EngineDeadError."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        request_id = next(iter(self._pending))
        output = merge(self._pending.pop(request_id))
        if output.finish_reason is not None:
            self._unfinished.discard(request_id)
        return output


@dataclass(slots=True)
class OpenRequest:
    """What the client remembers of a request while it is open. `stream`: who reads its outputs; `answer_id`: what `cancel` knows it by."""

    stream: OutputStream
    record: RequestRecord
    answer_id: str


def merge(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """Consecutive outputs of one request as one. `outputs` must not be empty."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return EngineOutput(
        request_id=last.request_id,
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=[item for output in outputs for item in output.logprobs],
        prompt_logprobs=[item for output in outputs for item in output.prompt_logprobs],
        pieces=joined(piece for output in outputs for piece in output.pieces),
        token_kinds=[kind for output in outputs for kind in output.token_kinds],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        error_param=last.error_param,
        speculation=sum((output.speculation for output in outputs), SpeculationCounts()),
        num_cached_tokens=last.num_cached_tokens,
        num_processed_tokens=last.num_processed_tokens,
        cache_miss_reason=last.cache_miss_reason,
        num_preemptions=last.num_preemptions,
    )
