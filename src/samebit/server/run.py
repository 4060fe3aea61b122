"""`samebit serve` from start to end: engine process, HTTP server, signals, draining, exit status.

Knows when things start and stop. Does not know endpoints or messages.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass

import uvicorn
import uvloop

from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError
from samebit.engine.client import AsyncEngineClient
from samebit.engine.launch import ENGINE_CLASS, start_engine
from samebit.engine.metrics import ServerMetrics
from samebit.engine.model_source import resolve_model
from samebit.server.app import Service, Traffic, create_app
from samebit.server.translate import Translator

_POLL_S = 0.02
_LAST_ANSWERS_S = 2


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve. `port` 0 takes a free one. `shutdown_timeout_s`: how long open requests may go on after a signal."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    shutdown_timeout_s: float = 30.0
    max_queued_requests: int = 512
    max_body_bytes: int = 8 << 20
    log_level: str = "warning"
    engine_class: str = ENGINE_CLASS


def serve(config: EngineConfig, options: ServeOptions) -> int:
    """Serve until a signal or the engine's death; returns the exit status.

    Raises ConfigError or ModelError if serving cannot begin. A second signal ends open requests at once.
    """
    config.validate()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Run(config, options).main())


class _Server(uvicorn.Server):
    """uvicorn, with signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Run:
    """Owner of everything that one `serve` starts."""

    def __init__(self, config: EngineConfig, options: ServeOptions) -> None:
        self._config = config
        self._options = options
        self._traffic = Traffic()
        self._is_serving = False
        self._num_signals = 0
        self._signalled = asyncio.Event()

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._serve())
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait([serving, signalled], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and not self._is_serving:
            serving.cancel()  # still loading: there is nothing to finish
        signalled.cancel()
        try:
            return await serving
        except asyncio.CancelledError:
            return 0

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._traffic.is_draining = True
        self._signalled.set()

    async def _serve(self) -> int:
        options, config = self._options, self._config
        name = options.served_model_name or config.model
        started = time.monotonic()
        folder = resolve_model(config.model)
        metrics = ServerMetrics(name)
        with _bind(options.host, options.port) as listener:
            _say(f"loading {config.model} with {config.num_threads or 'all'} threads")
            limit = config.max_num_seqs + options.max_queued_requests
            async with start_engine(
                config, metrics, max_open=limit, log_level=options.log_level, engine_class=options.engine_class
            ) as client:
                service = Service(
                    client,
                    Translator(folder, client.info, name),
                    metrics,
                    self._traffic,
                    config,
                    started=int(time.time()),
                    max_body_bytes=options.max_body_bytes,
                )
                server = _Server(
                    uvicorn.Config(
                        create_app(service),
                        log_level=options.log_level,
                        access_log=options.log_level in ("info", "debug"),
                        lifespan="off",
                        timeout_graceful_shutdown=_LAST_ANSWERS_S,
                    )
                )
                http = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    while not server.started and not http.done():
                        await asyncio.sleep(_POLL_S)
                    self._is_serving = True
                    _say(f"serving {name} on {_url(listener)} (ready after {time.monotonic() - started:.1f} s)")
                    return await self._until_end(client)
                finally:
                    server.should_exit = True
                    await http

    async def _until_end(self, client: AsyncEngineClient) -> int:
        """Wait for a signal and drain, or for the engine's death; returns the exit status."""
        dead = asyncio.create_task(client.wait_dead())
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait([dead, signalled], return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        self._traffic.is_draining = True
        if not dead.done():
            await self._drain(client)
        if dead.done():
            _say(f"error: {dead.result()}")
            await self._wait_for_answers(_LAST_ANSWERS_S)
            return 1
        dead.cancel()
        return 0

    async def _drain(self, client: AsyncEngineClient) -> None:
        timeout_s = self._options.shutdown_timeout_s
        if self._traffic.num_open:
            _say(f"shutting down; {self._traffic.num_open} open requests have {timeout_s:g} s to finish")
        await self._wait_for_answers(timeout_s, client)
        if self._traffic.num_open and not client.is_dead:
            _say(f"ending {self._traffic.num_open} requests that are still open")

    async def _wait_for_answers(self, timeout_s: float, client: AsyncEngineClient | None = None) -> None:
        """Until all answers are sent, the time is up, a second signal comes, or `client` (if given) has died."""
        end = time.monotonic() + timeout_s
        while self._traffic.num_open and self._num_signals < 2 and time.monotonic() < end:
            if client is not None and client.is_dead:
                return
            await asyncio.sleep(_POLL_S)


def _bind(host: str, port: int) -> socket.socket:
    """A socket with the address, taken before the model is loaded so that a taken port is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(text: str) -> None:
    print(f"samebit: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the program's words to its user
