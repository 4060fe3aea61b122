"""Reads bodies up to a limit, and answers while watching whether anybody still listens.

Knows ASGI; knows no endpoint and not what is sent.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from samebit.server.errors import HttpError, invalid_body

_LARGE_BYTES = 64 << 10
# A client reads its answer only after it has sent everything, so a somewhat larger body is read and thrown away.
_DISCARD_FACTOR = 8
_PING = b": still here\n\n"

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def parse_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body as a `model`. Raises HttpError: 415 if it is not called JSON, 413 above `max_bytes`, 400 if it is not what it should be.

    A page of another origin cannot send what is called JSON without the browser asking first whether it may.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise HttpError(415, f"Content-Type: {kind[:100]!r}: must be application/json", code="unsupported_media_type")
    data = await _read(request, max_bytes)
    try:
        if len(data) < _LARGE_BYTES:
            return model.model_validate_json(data)
        # Other requests go on while a large one is parsed.
        return await asyncio.to_thread(model.model_validate_json, data)
    except ValidationError as error:
        raise invalid_body(error) from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled, with ClientGoneError, when the client disconnects.

    Any: what is sent into a coroutine, which is nothing. The body must have been read.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.wait([task, watcher])


class EventStream(Response):
    """Server-sent events, one at a time as the client takes them.

    `close` is called at the end, however it comes: all sent, client gone, error, or cancelled. When there was nothing to
    send for `ping_interval_s` (0: never mind), a comment is, so that nobody on the way takes the connection for dead.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], ping_interval_s: float = 0.0
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._ping_interval_s = ping_interval_s
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. `send` waits while the client does not read."""
        try:
            with contextlib.suppress(ClientGoneError):
                await unless_gone(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pinger = asyncio.create_task(self._ping(send)) if self._ping_interval_s else None
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    self._sent_s = time.monotonic()
            finally:
                if pinger is not None:
                    pinger.cancel()
                    await asyncio.wait([pinger])
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        self._sent_s = time.monotonic()
        while True:
            wait_s = self._sent_s + self._ping_interval_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            await send({"type": "http.response.body", "body": _PING, "more_body": True})
            self._sent_s = time.monotonic()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = HttpError(413, f"the body is too large: at most {max_bytes} bytes are allowed", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes * _DISCARD_FACTOR:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes * _DISCARD_FACTOR:
                raise too_large
            if size <= max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
    except ClientDisconnect:
        raise ClientGoneError from None
    if size > max_bytes:
        raise too_large
    return b"".join(chunks)
