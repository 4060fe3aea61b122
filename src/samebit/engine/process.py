"""The engine process: receives requests, drives an engine step by step, sends outputs.

Knows ZeroMQ and the engine's methods. Does not know HTTP, text or scheduling, and loads torch
only when it is asked to build an engine. Started by engine/launch.py.
"""

import gc
import importlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from samebit.core.config import EngineConfig
from samebit.core.errors import EngineDeadError, InvalidRequestError, SamebitError
from samebit.core.request import Request
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
    UseWeights,
    decode_to_engine,
    encode,
    encode_view,
    problem_of,
)
from samebit.engine.preparation import Preparation
from samebit.engine.views import Look

if TYPE_CHECKING:
    from samebit.engine.engine import Engine
    from samebit.engine.loading import NextWeights

STATS_INTERVAL_S = 0.5
_IDLE_WAIT_MS = 500
_LOADING_WAIT_MS = 20
_PREPARING_WAIT_MS = 1
_LAST_WORDS_MS = 2000

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run one engine until it is told to stop or its parent is gone. Returns the exit status.

    Arguments: the parent's socket address, the parent's process id, the log level, the engine's
    class as `module:name`, and an EngineConfig as JSON.
    """
    address, parent, log_level, class_path, settings = arguments
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(name)s: %(message)s")
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    # No high-water mark: the HTTP process always reads, and a step must never wait for it.
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.connect(address)
    socket.send(encode(Connected()))
    linger_ms = 0  # told to stop, or alone: nobody waits for what was not yet sent
    try:
        module, _, name = class_path.partition(":")
        build = getattr(importlib.import_module(module), name)
        engine: Engine = build(msgspec.json.decode(settings, type=EngineConfig))
        # What an engine is made of, and not what making it left over, stays as long as it does: looking through it again and again
        # would hold steps up.
        gc.collect()
        gc.freeze()
        socket.send(encode(Ready(engine.info)))
        EngineLoop(engine, socket, lambda: os.getppid() == int(parent)).run()
    except Exception as error:  # noqa: BLE001 - the process ends here, whatever it was
        if not isinstance(error, SamebitError):
            _log.exception("the engine process ends")
        socket.send(encode(Fatal(problem_of(error))))
        linger_ms = _LAST_WORDS_MS
        return 1
    finally:
        socket.close(linger_ms)
        context.term()
        # A parent that was killed could not take away the folder of the socket that it listened on.
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    return 0


class EngineLoop:
    """Owner of an engine and its end of the socket. `has_parent` says whether anyone still listens."""

    def __init__(self, engine: "Engine", socket: "zmq.Socket[bytes]", has_parent: Callable[[], bool]) -> None:
        self._engine = engine
        self._socket = socket
        self._has_parent = has_parent
        self._is_stopped = False
        self._reported_s = 0.0
        self._was_working = True
        self._loading: tuple[int, Future[NextWeights]] | None = None
        self._next: NextWeights | None = None
        self._uses: list[UseWeights] = []
        self._preparation = Preparation(engine.prepare)

    def run(self) -> None:
        """Serve until Shutdown or until the parent is gone. An error of the engine itself passes through."""
        while not self._is_stopped:
            idle_ms = _IDLE_WAIT_MS if self._loading is None else _LOADING_WAIT_MS
            idle_ms = _PREPARING_WAIT_MS if self._preparation.is_busy else idle_ms
            self._receive(0 if self._is_busy else idle_ms)
            for request in self._preparation.take_ready():
                self._add(request)
            outputs = self._engine.step() if self._is_busy else []
            # Whoever hears of a request's end has heard when it began.
            self._tell_times()
            if outputs:
                self._send(Outputs(outputs))
            self._look_after_loading()
            while self._uses and not self._engine.has_work:
                self._use(self._uses.pop(0))
            self._report()
        self._preparation.close()

    @property
    def _is_busy(self) -> bool:
        return self._engine.has_work or self._engine.has_audits

    def _receive(self, wait_ms: int) -> None:
        """Handle all messages that are there; wait at most `wait_ms` for the first."""
        if wait_ms and not self._socket.poll(wait_ms):
            return
        while not self._is_stopped:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match decode_to_engine(data):
                case Submit(request) if not self._engine.is_prepared(request):
                    self._preparation.begin(request)
                case Submit(request):
                    self._add(request)
                case Abort(request_ids):
                    self._preparation.forget(request_ids)
                    for request_id in request_ids:
                        self._engine.abort(request_id)
                case FlushCache(number):
                    self._engine.flush_cache()
                    self._send(Done(number, self._engine.info))
                case LoadWeights(number, model):
                    self._load(number, model)
                case UseWeights() as use:
                    self._uses.append(use)
                case LookAt(number, look):
                    self._show(number, look)
                case Shutdown():
                    self._is_stopped = True

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except InvalidRequestError as error:
            self._send(Rejected(request.request_id, problem_of(error)))
        except Exception as error:  # noqa: BLE001 - one request that cannot be taken on leaves the others alone
            _log.exception("request %s could not be added", request.request_id)
            self._engine.abort(request.request_id)
            self._send(Rejected(request.request_id, problem_of(error)))

    def _show(self, number: int, look: Look) -> None:
        """Answer a look; whatever comes of it, the requests go on."""
        started_s, view, problem = time.perf_counter(), encode_view(None), None
        try:
            view = encode_view(self._engine.look(look))
        except Exception as error:  # noqa: BLE001 - nobody's answer depends on it
            _log.exception("the engine could not be looked at")
            problem = problem_of(error)
        self._send(Shown(number, time.perf_counter() - started_s, view, problem))

    def _load(self, number: int, model: str) -> None:
        """Begin to load other weights. Requests go on meanwhile, and nothing has changed if it fails."""
        assert self._loading is None, "there is one update at a time"
        future: Future[NextWeights] = Future()

        def work() -> None:
            try:
                future.set_result(self._engine.load_weights(model))
            except Exception as error:  # noqa: BLE001 - whatever a checkpoint is, the engine goes on with what it has
                future.set_exception(error)

        self._loading = number, future
        threading.Thread(target=work, daemon=True).start()

    def _look_after_loading(self) -> None:
        """Tell what came of the loading, once it has ended."""
        if self._loading is None or not self._loading[1].done():
            return
        (number, future), self._loading = self._loading, None
        problem = None
        if error := future.exception():
            if not isinstance(error, SamebitError):
                _log.error("weights could not be loaded", exc_info=error)
            problem = problem_of(error)
        else:
            self._next = future.result()
        self._send(Done(number, self._engine.info, problem))

    def _use(self, use: UseWeights) -> None:
        """Serve the weights that were loaded last."""
        problem = None
        if self._next is None:
            problem = problem_of(EngineDeadError("the engine was started again while weights were loaded; try again"))
        else:
            weights, self._next = self._next, None
            self._engine.use_weights(weights)
        self._send(Done(use.number, self._engine.info, problem))

    def _tell_times(self) -> None:
        engine = self._engine
        admitted, compiled = engine.take_admitted(), engine.take_compile_times()
        evicted = engine.take_eviction_times()
        if admitted or compiled or evicted:
            self._send(Times(admitted, compiled, evicted))

    def _report(self) -> None:
        """Send stats at intervals while working, and once when the work has run out."""
        now = time.monotonic()
        is_working = self._is_busy
        if now - self._reported_s >= STATS_INTERVAL_S or is_working != self._was_working:
            self._reported_s, self._was_working = now, is_working
            self._send(Stats(self._engine.stats()))
            self._is_stopped |= not self._has_parent()

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
