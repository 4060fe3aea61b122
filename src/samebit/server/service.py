"""What the routes share: the engine's client, the text side, counts of open answers, limits. Knows no endpoint."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from samebit.core.config import EngineConfig
from samebit.engine.client import AsyncEngineClient
from samebit.engine.metrics import ServerMetrics
from samebit.server.auth import Keys
from samebit.server.errors import DrainingError
from samebit.server.origins import Origins
from samebit.server.traces import RequestSpan
from samebit.server.translate import Translator


class Traffic:
    """Counts the requests whose answers are in progress. Owned by the server's run, which decides when to drain."""

    def __init__(self) -> None:
        self.num_open = 0
        self.is_draining = False
        self.idle = asyncio.Event()
        """Set while no answer is in progress."""
        self.idle.set()

    def open(self) -> None:
        """An answer begins."""
        self.num_open += 1
        self.idle.clear()

    def close(self) -> None:
        """An answer has ended, one way or another."""
        self.num_open -= 1
        if not self.num_open:
            self.idle.set()


@dataclass(frozen=True, slots=True)
class Service:
    """What the handlers need; owner of nothing. `started` is in seconds since 1970.

    `ping_interval_s`: a stream that has had nothing to tell for so long gets a comment (0: never). `has_page`: there is a page at `/`.
    `record_span`: takes the span of each request for an answer (None: nobody wants them).
    """

    client: AsyncEngineClient
    translator: Translator
    metrics: ServerMetrics
    traffic: Traffic
    config: EngineConfig
    started: int
    max_body_bytes: int
    keys: Keys = field(default_factory=Keys)
    origins: Origins = field(default_factory=Origins)
    ping_interval_s: float = 0.0
    has_page: bool = True
    record_span: Callable[[RequestSpan], None] | None = None

    @property
    def state(self) -> str:
        """Whether new requests are welcome ("ok"), or why they are not."""
        if self.traffic.is_draining:
            return "shutting down"
        if self.client.is_updating:
            return "loading weights"
        return "engine dead" if self.client.is_dead else "ok"

    def check_open(self) -> None:
        """Raise DrainingError if nothing new is taken."""
        if self.traffic.is_draining:
            raise DrainingError("the server is shutting down")


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint: `description` is what the OpenAPI document says of it.

    Any: ASGI's coroutines and OpenAPI's JSON.
    """

    method: str
    path: str
    handler: Callable[[Request], Coroutine[Any, Any, Response]]
    description: dict[str, Any]


def json_answer(value: msgspec.Struct, status: int = 200) -> Response:
    """`value` as a JSON body."""
    return json_bytes(msgspec.json.encode(value), status)


def json_bytes(body: bytes, status: int = 200) -> Response:
    """A JSON body that is encoded already."""
    return Response(body, status, media_type="application/json")
