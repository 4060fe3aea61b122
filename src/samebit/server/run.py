"""`samebit serve` from start to end: engine process, HTTP server, signals, draining, exit status.

Knows when things start and stop. Does not know endpoints or messages.
"""

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import uvicorn
import uvloop

from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError, SamebitError
from samebit.engine.client import MAX_OPEN_TOKENS, AsyncEngineClient
from samebit.engine.launch import API_KEY_VARIABLE, ENGINE_CLASS, keys_in_environment, start_engine
from samebit.engine.metrics import ServerMetrics
from samebit.engine.metrics_compat import COMPATIBLE
from samebit.engine.model_source import resolve_model
from samebit.server.app import create_app
from samebit.server.auth import Keys, read_keys
from samebit.server.errors import DrainingError
from samebit.server.origins import Origins
from samebit.server.routes_operations import installed_version
from samebit.server.service import Service, Traffic
from samebit.server.traces import RequestSpan
from samebit.server.translate import Translator

if TYPE_CHECKING:
    from samebit.server.otlp import OtlpTraces

_LAST_ANSWERS_S = 2
_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve. `port` 0 takes a free one. `shutdown_timeout_s`: how long open requests may go on after a signal.

    `max_queued_tokens`: of the prompts of all open requests. `max_engine_restarts`: within ten minutes.
    `sse_ping_interval_s`: see Service. `metrics_compat`: "sglang", "vllm". Keys are also taken from the environment.
    `allowed_origins`, `allowed_hosts`: see Origins; hosts count only where a page could do anything without a key.
    `has_page`: there is a page at `/`. `otlp_traces_endpoint`: the URL that takes spans of requests (None: nobody does). `seed` begins the stream of seeds for requests without one (None: they cannot be foreseen).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    shutdown_timeout_s: float = 30.0
    max_queued_requests: int = 512
    max_queued_tokens: int = MAX_OPEN_TOKENS
    max_body_bytes: int = 8 << 20
    max_engine_restarts: int = 3
    sse_ping_interval_s: float = 15.0
    metrics_compat: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    has_page: bool = True
    otlp_traces_endpoint: str | None = None
    seed: int | None = None
    log_level: str = "warning"
    engine_class: str = ENGINE_CLASS


def serve(config: EngineConfig, options: ServeOptions) -> int:
    """Serve until a signal or the engine's death; returns the exit status.

    Raises ConfigError or ModelError if serving cannot begin. A second signal ends open requests at once.
    """
    config.validate()
    _allow_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Run(config, options).main())


class _Server(uvicorn.Server):
    """uvicorn, with signals left to us, and an event for the moment from which connections are taken."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class _Run:
    """Owner of everything that one `serve` starts."""

    def __init__(self, config: EngineConfig, options: ServeOptions) -> None:
        self._config = config
        self._options = options
        self._name = options.served_model_name or config.model
        self._traffic = Traffic()
        self._is_serving = False
        self._signalled_s: float | None = None
        self._signalled = asyncio.Event()
        self._signalled_again = asyncio.Event()

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._serve())

        def on_signal() -> None:
            (self._signalled_again if self._signalled.is_set() else self._signalled).set()
            self._signalled_s = self._signalled_s or time.monotonic()
            self._traffic.is_draining = True
            if not self._is_serving:
                serving.cancel()  # still loading: there is nothing to finish

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            return await serving
        except asyncio.CancelledError:
            return 0

    async def _serve(self) -> int:
        options, config = self._options, self._config
        started_s = time.monotonic()
        folder = resolve_model(config.model)
        metrics = ServerMetrics(self._name, _known_servers(options.metrics_compat))
        max_open = config.max_num_seqs + options.max_queued_requests
        with _bind(options.host, options.port) as listener:
            keys = _keys(options, listener)
            origins = _origins(options, keys)
            _say(f"loading {config.model}")
            async with (
                self._spans_recorded(metrics) as record_span,
                start_engine(
                    config,
                    metrics,
                    max_open=max_open,
                    max_open_tokens=options.max_queued_tokens,
                    max_restarts=options.max_engine_restarts,
                    say=_say,
                    log_level=options.log_level,
                    engine_class=options.engine_class,
                ) as client,
            ):
                service = Service(
                    client,
                    Translator(folder, client.info, self._name, seed=options.seed),
                    metrics,
                    self._traffic,
                    config,
                    started=int(time.time()),
                    max_body_bytes=options.max_body_bytes,
                    keys=keys,
                    origins=origins,
                    ping_interval_s=options.sse_ping_interval_s,
                    has_page=options.has_page,
                    record_span=record_span,
                )
                async with self._http_server(service, listener):
                    self._is_serving = True
                    wait_s = time.monotonic() - started_s
                    _say(f"serving {self._name} on {_url(listener)} (ready after {wait_s:.1f} s)")
                    return await self._until_end(client)

    @contextlib.asynccontextmanager
    async def _spans_recorded(self, metrics: ServerMetrics) -> AsyncIterator[Callable[[RequestSpan], None] | None]:
        """What takes spans, if they are wanted. The last ones are sent within what is left of the time to shut down."""
        endpoint = self._options.otlp_traces_endpoint
        traces = None if endpoint is None else _open_traces(endpoint, metrics)
        try:
            yield None if traces is None else traces.record
        finally:
            if traces is not None:
                end_s = (self._signalled_s or 0.0) + self._options.shutdown_timeout_s
                closing = asyncio.create_task(traces.close(max(end_s - time.monotonic(), _LAST_ANSWERS_S)))
                await _first_of(closing, self._signalled_again.wait())
                closing.cancel()
                await asyncio.wait([closing])

    @contextlib.asynccontextmanager
    async def _http_server(self, service: Service, listener: socket.socket) -> AsyncIterator[None]:
        log_level = self._options.log_level
        server = _Server(
            uvicorn.Config(
                create_app(service),
                log_level=log_level,
                access_log=log_level in ("info", "debug"),
                lifespan="off",
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
            )
        )
        http = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await server.listening.wait()
            yield
        finally:
            server.should_exit = True
            await http

    async def _until_end(self, client: AsyncEngineClient) -> int:
        """Wait for a signal and drain, or for the engine's death; returns the exit status."""
        dead = asyncio.create_task(client.wait_dead())
        try:
            await _first_of(dead, self._signalled.wait())
            self._traffic.is_draining = True
            if not dead.done():
                await self._drain(dead)
            if dead.done():
                _say(f"error: {dead.result()}")
            elif self._traffic.num_open:
                _say(f"ending {self._traffic.num_open} requests that are still open")
                client.end_open(DrainingError("the server is shutting down"))
            # Every request has its end by now, and needs a moment to tell its client.
            await _first_of(self._traffic.idle.wait(), asyncio.sleep(_LAST_ANSWERS_S))
            return 1 if dead.done() else 0
        finally:
            dead.cancel()

    async def _drain(self, dead: asyncio.Task[SamebitError]) -> None:
        """Wait until no answer is in progress, the time is up, a second signal comes, or the engine dies."""
        timeout_s = self._options.shutdown_timeout_s
        if self._traffic.num_open:
            _say(f"shutting down; {self._traffic.num_open} open requests have {timeout_s:g} s to finish")
        await _first_of(dead, self._traffic.idle.wait(), self._signalled_again.wait(), asyncio.sleep(timeout_s))


async def _first_of(*waits: Awaitable[object]) -> None:
    """Return when one of `waits` has; the others, unless they are tasks of their own, are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()


def _allow_connections() -> None:
    """As many open files, and so connections, as this user may have: the usual limit is below what a server holds."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _keys(options: ServeOptions, listener: socket.socket) -> Keys:
    """All keys there are; tells when others can connect and need none."""
    api, admin = keys_in_environment()
    api += options.api_keys
    if options.api_key_file is not None:
        api += read_keys(Path(options.api_key_file))
    admin = admin if options.admin_api_key is None else options.admin_api_key
    if admin in api:
        raise ConfigError("admin_api_key: is one of the API keys, so every client could administrate; choose another")
    if any(not key or not key.isascii() or " " in key for key in (*api, *([] if admin is None else [admin]))):
        raise ConfigError("api_key: a key is one or more ASCII characters without blanks")
    host = listener.getsockname()[0]
    is_local = ip_address(host.partition("%")[0]).is_loopback
    if not is_local and not api:
        _say(f"warning: everyone who can reach {host} can use this server; set --api-key or {API_KEY_VARIABLE}")
    return Keys(tuple(api), admin, is_local)


def _origins(options: ServeOptions, keys: Keys) -> Origins:
    """Which pages may ask, and under which names where no key keeps them out."""
    is_guarded = bool(keys.api) or not keys.is_local
    return Origins(options.allowed_origins, None if is_guarded else (options.host.lower(), *options.allowed_hosts))


def _open_traces(endpoint: str, metrics: ServerMetrics) -> "OtlpTraces":
    """What sends spans to `endpoint`. Raises ConfigError if that is no URL, or if the extra for it is missing."""
    try:
        url = urlsplit(endpoint)
        is_url = url.scheme in ("http", "https") and url.hostname is not None
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError("otlp_traces_endpoint: must be a whole URL, such as http://127.0.0.1:4318/v1/traces")
    try:
        from samebit.server.otlp import OtlpTraces  # noqa: PLC0415 - an extra that few need
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_traces_endpoint: needs packages that are not installed ({error.name}): pip install 'samebit[otel]'"
        ) from error
    try:
        return OtlpTraces(endpoint, installed_version(), drop=metrics.drop_spans, say=_say)
    except ValueError as error:
        raise ConfigError(f"otlp_traces_endpoint: opentelemetry does not take its settings: {error}") from error


def _known_servers(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in COMPATIBLE:
            raise ConfigError(f"metrics_compat={name!r}: must be one of {', '.join(COMPATIBLE)}")
    return names


def _bind(host: str, port: int) -> socket.socket:
    """A socket with the address, taken before the model is loaded so that a taken port is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Two servers that load at the same time can both bind, but only one of them can listen.
            listener.listen(_BACKLOG)
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
