"""Two ways to answer while watching whether anybody still listens. Knows ASGI; does not know what is sent."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


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

    `close` is called at the end, however it comes: all sent, client gone, error, or cancelled.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

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
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
