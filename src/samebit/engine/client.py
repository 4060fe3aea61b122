"""The engine as an asyncio program sees it: requests go in, outputs come out, nothing hangs.

Knows the other process only as a socket; engine/launch.py starts it, says when it has died and starts it again.
Knows neither HTTP nor torch.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import zmq
import zmq.asyncio

from samebit.core.errors import EngineDeadError, OverloadedError, SamebitError
from samebit.core.request import EngineInfo, EngineOutput, Request
from samebit.engine.calls import Calls
from samebit.engine.messages import (
    Abort,
    Connected,
    Done,
    Fatal,
    FlushCache,
    FromEngine,
    LoadWeights,
    LookAt,
    Outputs,
    Ready,
    Rejected,
    Shown,
    Shutdown,
    Stats,
    Submit,
    Times,
    ToEngine,
    UseWeights,
    decode_from_engine,
    decode_view,
    encode,
    error_of,
)
from samebit.engine.metrics import ServerMetrics
from samebit.engine.streams import OpenRequest, OutputStream, RequestRecord
from samebit.engine.views import Look, View

MAX_OPEN_TOKENS = 1 << 22


class AsyncEngineClient:
    """Owner of this process's end of the socket and of all open requests. Use it in one event loop.

    `max_open` is the most requests, running and waiting, that are open at once, `max_open_tokens` the most tokens of their
    prompts.
    """

    def __init__(self, metrics: ServerMetrics, *, max_open: int, max_open_tokens: int = MAX_OPEN_TOKENS) -> None:
        self.max_open = max_open
        self.stats: dict[str, float] = {}
        self._metrics = metrics
        self._max_open_tokens = max_open_tokens
        self._num_open_tokens = 0
        self._open: dict[str, OpenRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._drew = asyncio.Event()
        self._calls = Calls[EngineInfo]()
        self._looks = Calls[tuple[float, View]]()
        self._update: asyncio.Task[int] | None = None
        self._is_switching = False
        self._info: EngineInfo | None = None
        self._down: SamebitError | None = EngineDeadError("the engine has not been started")
        self._last_words: SamebitError | None = None
        self._is_loading = False
        self._start_decided = asyncio.Event()
        self._death: asyncio.Future[SamebitError] = asyncio.get_running_loop().create_future()
        self._folder: Path | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine serves. Only after `wait_ready`."""
        assert self._info is not None, "the engine is not ready"
        return self._info

    @property
    def is_ready(self) -> bool:
        """Whether an engine has ever been ready."""
        return self._info is not None

    @property
    def num_open(self) -> int:
        """Requests that have neither finished nor been closed."""
        return len(self._open)

    @property
    def is_dead(self) -> bool:
        """Whether there is no engine now, be it for good or until it has been started again."""
        return self._down is not None

    @property
    def is_loading(self) -> bool:
        """Whether an engine process has been started and is not ready yet."""
        return self._is_loading

    @property
    def is_updating(self) -> bool:
        """Whether other weights wait for the last open request, so that no new one is taken."""
        return self._is_switching

    def connect(self, folder: Path) -> str:
        """The address that a new engine process is to connect to: a socket file in `folder`, which must be private.

        The folder goes away once it has.
        """
        assert self._socket is None, "there is one engine at a time"
        address = f"ipc://{folder / 'engine'}"
        self._folder = folder
        self._is_loading = True
        self._last_words = None
        socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.bind(address)
        self._socket = socket
        self._reader = asyncio.create_task(self._read(socket))
        return address

    async def wait_ready(self) -> EngineInfo:
        """Return when the engine serves; raise what it gave as the reason if it cannot."""
        await self._start_decided.wait()
        if self._death.done():
            raise self._death.result()
        return self.info

    async def wait_dead(self) -> SamebitError:
        """Return the reason once there will be no engine any more."""
        return await asyncio.shield(self._death)

    def check_count(self, count: int) -> None:
        """Raise OverloadedError if `count` samples can never be open at once."""
        if count > self.max_open:
            self._metrics.refuse("queue_full")
            raise OverloadedError(
                f"{count} samples in all (prompts times n): at most {self.max_open} can be open at once; send fewer"
            )

    def submit(
        self, requests: Sequence[Request], answer_id: str | None = None, *, is_probe: bool = False
    ) -> OutputStream:
        """Hand `requests` to the engine, all or none; their outputs come from the stream. A probe counts for no limit.

        `answer_id`: what `cancel` knows them by (None: each's own name up to its last hyphen). It may be in use already.

        Raises EngineDeadError, and OverloadedError if they do not fit. The stream must be closed, best by `with`.
        """
        self._check_up()
        if not is_probe:
            self._check_room(requests)
        stream = OutputStream([request.request_id for request in requests], self.abort)
        now = time.monotonic()
        for request in requests:
            assert request.request_id not in self._open, "request ids are never used twice"
            record = RequestRecord(now, len(request.prompt_token_ids))
            stream.records.append(record)
            name = request.request_id.rpartition("-")[0] if answer_id is None else answer_id
            self._open[request.request_id] = OpenRequest(stream, record, name)
            self._num_open_tokens += record.num_prompt_tokens
            self._send(Submit(request))
        if self._open:
            self._idle.clear()
        return stream

    async def next_token(self) -> None:
        """Return when the engine has drawn a token for anyone."""
        self._drew.clear()
        await self._drew.wait()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests and tell the engine to do the same; ids that are not open are passed over."""
        found = [request_id for request_id in request_ids if self._close(request_id)]
        if found and self._down is None:
            self._metrics.finish("abort", len(found))
            self._send(Abort(found))

    def cancel(self, answer_id: str | None) -> int:
        """End the requests of an answer, or all (None): whoever reads them gets a finish reason of "abort". Returns how many."""
        names = [name for name, entry in self._open.items() if answer_id in (None, name, entry.answer_id)]
        entries = [self._open[name] for name in names]
        self.abort(names)
        for name, entry in zip(names, entries, strict=True):
            last = entry.record.last or EngineOutput(request_id=name)
            entry.record.last = output = EngineOutput(
                request_id=name,
                finish_reason="abort",
                num_cached_tokens=last.num_cached_tokens,
                num_processed_tokens=last.num_processed_tokens,
                cache_miss_reason=last.cache_miss_reason,
            )
            entry.stream.put(output)
        return len(names)

    async def flush_cache(self) -> None:
        """Empty the prefix cache. Raises EngineDeadError."""
        await self._call(FlushCache)

    async def look(self, look: Look) -> tuple[float, View]:
        """What the engine shows of itself, and how many seconds that took it. Raises EngineDeadError."""
        self._check_up()
        number, shown = self._looks.begin()
        self._send(LookAt(number, look))
        return await shown

    async def update_weights(self, model: str, *, is_aborting: bool = False) -> int:
        """Load the weights of `model` while requests go on, and serve them as soon as none is open.

        Once they are loaded no request is taken on until they are served, and with `is_aborting` all open ones are ended; returns
        how many. Goes on when the caller is cancelled. Raises OverloadedError if an update is in progress, EngineDeadError,
        and what the engine gives as the reason when it cannot serve them (ConfigError, ModelError): then nothing has changed.
        """
        if self._update is not None:
            raise OverloadedError("other weights are being loaded; try again later")
        self._update = asyncio.create_task(self._load_and_switch(model, is_aborting=is_aborting))
        return await asyncio.shield(self._update)

    def end_open(self, error: SamebitError) -> None:
        """End every open request with `error`; the engine forgets them and goes on."""
        entries = list(self._open.values())
        self.abort(list(self._open))
        for entry in entries:
            entry.stream.fail(error)

    def lose(self, error: SamebitError) -> SamebitError:
        """There is no engine now: every open request, and every one until it is back, ends with EngineDeadError.

        Returns what the engine itself gave as the reason, or else `error`.
        """
        if self._down is None:
            self._metrics.engine_lost()
        self._down = self._last_words or error
        self.stats = {}
        self._metrics.set_engine_stats(self.stats, time.monotonic())
        self._metrics.finish("error", len(self._open))
        for name, entry in list(self._open.items()):
            self._close(name)
            entry.stream.fail(EngineDeadError(str(self._down)))
        self._calls.fail(EngineDeadError(str(self._down)))
        self._looks.fail(EngineDeadError(str(self._down)))
        self._disconnect()
        return self._down

    def fail(self, error: SamebitError) -> None:
        """There is no engine any more."""
        if self._death.done():
            return
        self._death.set_result(self.lose(error))
        self._start_decided.set()

    async def close(self) -> None:
        """Tell the engine to stop and give up the socket. Open requests end with EngineDeadError."""
        if self._socket is not None:
            self._send(Shutdown())
        self.fail(EngineDeadError("the server is shutting down"))
        self._context.term()

    def _check_room(self, requests: Sequence[Request]) -> None:
        self.check_count(len(requests))
        if self._is_switching:
            self._metrics.refuse("weights_update")
            raise OverloadedError("other weights are being loaded; try again later")
        if len(self._open) + len(requests) > self.max_open:
            self._metrics.refuse("queue_full")
            raise OverloadedError(f"{len(self._open)} requests are open of at most {self.max_open}; try again later")
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        if self._num_open_tokens + num_tokens > self._max_open_tokens:
            self._metrics.refuse("queue_full")
            raise OverloadedError(
                f"open prompts have {self._num_open_tokens} tokens, these {num_tokens}: at most {self._max_open_tokens} "
                "can be open at once; try again later"
                if num_tokens <= self._max_open_tokens
                else f"{num_tokens} tokens in all prompts: at most {self._max_open_tokens} can be open at once; send fewer"
            )

    def _close(self, request_id: str, now: float | None = None) -> OpenRequest | None:
        if (entry := self._open.pop(request_id, None)) is not None:
            entry.record.ended_s = time.monotonic() if now is None else now
            self._num_open_tokens -= entry.record.num_prompt_tokens
            if not self._open:
                self._idle.set()
        return entry

    async def _load_and_switch(self, model: str, *, is_aborting: bool) -> int:
        try:
            await self._call(partial(LoadWeights, model=model))
            self._is_switching = True
            num_aborted = self.cancel(None) if is_aborting else 0
            await self._idle.wait()
            self._info = await self._call(UseWeights)
            return num_aborted
        finally:
            self._update, self._is_switching = None, False

    async def _call(self, message: Callable[[int], FlushCache | LoadWeights | UseWeights]) -> EngineInfo:
        self._check_up()
        number, done = self._calls.begin()
        self._send(message(number))
        return await done

    def _check_up(self) -> None:
        if self._down is not None:
            raise EngineDeadError(str(self._down))

    def _send(self, message: ToEngine) -> None:
        assert self._socket is not None, "there is an engine"
        # Without a high-water mark this never has to wait, so there is nothing to await.
        self._socket.send(encode(message))

    def _disconnect(self) -> None:
        self._is_loading = False
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._socket is not None:
            self._socket.close(linger=1000)
            self._socket = None
        self._forget_folder()

    def _forget_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while not socket.closed:
                self._handle(decode_from_engine(await socket.recv()))

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                now = time.monotonic()
                for output in outputs:
                    self._deliver(output, now)
            case Times(admitted, compiled, evicted):
                self._metrics.admitted([item.waited_s for item in admitted])
                for item in admitted:
                    if item.request_id in self._open:
                        self._open[item.request_id].record.admitted_s = item.began_s
                self._metrics.compiled(compiled)
                self._metrics.evicted(evicted)
            case Rejected(request_id, problem):
                entry = self._close(request_id)
                if entry is not None:
                    self._metrics.finish("rejected", 1)
                    entry.stream.fail(error_of(problem))
            case Stats(values):
                self.stats = values
                self._metrics.set_engine_stats(values, time.monotonic())
            case Done(number, info, problem):
                self._calls.answer(number, error_of(problem) if problem else info)
            case Shown(number, took_s, data, problem):
                view = decode_view(data)
                error = error_of(problem) if problem else EngineDeadError("the engine shows nothing")
                self._looks.answer(number, error if view is None else (took_s, view))
            case Connected():
                self._forget_folder()
            case Ready(info):
                self._info, self._down, self._is_loading = info, None, False
                self._start_decided.set()
            case Fatal(problem):
                self._last_words = error_of(problem)
                self.lose(self._last_words)

    def _deliver(self, output: EngineOutput, now: float) -> None:
        entry = self._open.get(output.request_id)
        if entry is None:
            return
        record = entry.record
        record.last = output
        if count := len(output.token_ids):
            self._drew.set()
            if record.last_token_s is None:
                record.first_token_s = now
                self._metrics.first_token(now - record.arrived_s, record.num_prompt_tokens, output)
            else:
                self._metrics.next_tokens(now - record.last_token_s, count)
            record.last_token_s = now
            record.num_tokens += count
            self._metrics.generated(count)
        if output.finish_reason is not None:
            self._close(output.request_id, now)
            self._metrics.finish(output.finish_reason, 1, now - record.arrived_s)
            if record.first_token_s is not None and record.num_tokens > 1:
                self._metrics.per_token((now - record.first_token_s) / (record.num_tokens - 1))
        entry.stream.put(output)
