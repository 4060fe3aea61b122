"""The engine as an asyncio program sees it: requests go in, outputs come out, nothing hangs.

Knows the other process only as a socket; engine/launch.py starts it and says when it has died.
Knows neither HTTP nor torch.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from samebit.core.errors import EngineDeadError, InvalidRequestError, OverloadedError, SamebitError
from samebit.core.request import EngineInfo, EngineOutput, Request, SpeculationCounts
from samebit.engine.messages import (
    Abort,
    Fatal,
    FromEngine,
    Outputs,
    Ready,
    Rejected,
    Shutdown,
    Stats,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
    error_of,
)
from samebit.engine.metrics import ServerMetrics


@dataclass(slots=True)
class _OpenRequest:
    stream: "OutputStream"
    arrived_s: float
    num_prompt_tokens: int
    last_token_s: float | None = None


class AsyncEngineClient:
    """Owner of this process's end of the socket and of all open requests. Use it in one event loop.

    `max_open` is the most requests, running and waiting, that are open at once.
    """

    def __init__(self, folder: Path, metrics: ServerMetrics, *, max_open: int) -> None:
        """Listen on a socket file in `folder`, which must be private to this user."""
        self.address = f"ipc://{folder / 'engine'}"
        self.max_open = max_open
        self.stats: dict[str, float] = {}
        self._metrics = metrics
        self._open: dict[str, _OpenRequest] = {}
        self._info: EngineInfo | None = None
        self._start_decided = asyncio.Event()
        self._death: asyncio.Future[SamebitError] = asyncio.get_running_loop().create_future()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._reader = asyncio.create_task(self._read())

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Only after `wait_ready`."""
        assert self._info is not None, "the engine is not ready"
        return self._info

    @property
    def is_ready(self) -> bool:
        """Whether the engine has ever been ready."""
        return self._info is not None

    @property
    def num_open(self) -> int:
        """Requests that have neither finished nor been closed."""
        return len(self._open)

    @property
    def is_dead(self) -> bool:
        """Whether the engine has stopped for good."""
        return self._death.done()

    async def wait_ready(self) -> EngineInfo:
        """Return when the engine serves; raise what it gave as the reason if it cannot."""
        await self._start_decided.wait()
        if self._death.done():
            raise self._death.result()
        return self.info

    async def wait_dead(self) -> SamebitError:
        """Return the reason once the engine has stopped."""
        return await asyncio.shield(self._death)

    def check_count(self, count: int) -> None:
        """Raise InvalidRequestError if `count` samples can never be open at once."""
        if count > self.max_open:
            raise InvalidRequestError(
                f"{count} samples in all (prompts times n): at most {self.max_open} can be open at once", param="n"
            )

    def submit(self, requests: Sequence[Request]) -> "OutputStream":
        """Hand `requests` to the engine, all or none; their outputs come from the stream.

        Raises EngineDeadError, OverloadedError if they do not fit now, and InvalidRequestError if
        they never will. The stream must be closed, best by `with`.
        """
        if self._death.done():
            raise EngineDeadError(str(self._death.result()))
        self.check_count(len(requests))
        if len(self._open) + len(requests) > self.max_open:
            self._metrics.refuse(len(requests))
            raise OverloadedError(f"{len(self._open)} requests are open of at most {self.max_open}; try again later")
        stream = OutputStream(self, [request.request_id for request in requests])
        now = time.monotonic()
        for request in requests:
            assert request.request_id not in self._open, "request ids are never used twice"
            self._open[request.request_id] = _OpenRequest(stream, now, len(request.prompt_token_ids))
            self._send(Submit(request))
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests and tell the engine to do the same; ids that are not open are passed over."""
        found = [request_id for request_id in request_ids if self._open.pop(request_id, None)]
        if found and not self._death.done():
            self._metrics.finish("abort", len(found))
            self._send(Abort(found))

    def end_open(self, error: SamebitError) -> None:
        """End every open request with `error`; the engine forgets them and goes on."""
        entries = list(self._open.values())
        self.abort(list(self._open))
        for entry in entries:
            entry.stream.fail(error)

    def fail(self, error: SamebitError) -> None:
        """The engine has stopped: every open request, and every later one, ends with EngineDeadError."""
        if self._death.done():
            return
        self._death.set_result(error)
        self._start_decided.set()
        for entry in self._open.values():
            entry.stream.fail(EngineDeadError(str(error)))
        self._open.clear()

    async def close(self) -> None:
        """Tell the engine to stop and give up the socket. Open requests end with EngineDeadError."""
        if not self._death.done():
            self._send(Shutdown())
            self.fail(EngineDeadError("the server is shutting down"))
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close(linger=1000)
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        # Without a high-water mark this never has to wait, so there is nothing to await.
        self._socket.send(encode(message))

    async def _read(self) -> None:
        while True:
            self._handle(decode_from_engine(await self._socket.recv()))

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                now = time.monotonic()
                for output in outputs:
                    self._deliver(output, now)
            case Rejected(request_id, problem):
                entry = self._open.pop(request_id, None)
                if entry is not None:
                    self._metrics.finish("rejected", 1)
                    entry.stream.fail(error_of(problem))
            case Stats(values):
                self.stats = values
                self._metrics.set_engine_stats(values)
            case Ready(info):
                self._info = info
                self._start_decided.set()
            case Fatal(problem):
                self.fail(error_of(problem))

    def _deliver(self, output: EngineOutput, now: float) -> None:
        entry = self._open.get(output.request_id)
        if entry is None:
            return
        if output.token_ids:
            count = len(output.token_ids)
            if entry.last_token_s is None:
                self._metrics.first_token(now - entry.arrived_s, entry.num_prompt_tokens, output.num_cached_tokens)
            else:
                self._metrics.next_tokens(now - entry.last_token_s, count)
            entry.last_token_s = now
            self._metrics.generated(count)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._metrics.finish(output.finish_reason, 1, now - entry.arrived_s)
        entry.stream.put(output)


class OutputStream:
    """Outputs of a group of requests as they come, until all have finished. One reader.

    What has not been read comes as one output per request, so a slow reader holds nobody up and costs
    no more memory than its answer. Closing it aborts what has not finished.
    """

    def __init__(self, client: AsyncEngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._unfinished = set(request_ids)
        self._pending: dict[str, list[EngineOutput]] = {}
        self._error: SamebitError | None = None
        self._changed = asyncio.Event()

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
        self._client.abort(list(self._unfinished))
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
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        speculation=sum((output.speculation for output in outputs), SpeculationCounts()),
        num_cached_tokens=last.num_cached_tokens,
        num_preemptions=last.num_preemptions,
    )
