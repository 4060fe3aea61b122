"""Requests whose grammars are being compiled, beside the steps of all others. Knows no sockets and no grammars."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from samebit.core.request import Request


class Preparation:
    """Owner of a thread that prepares requests, one after another. `prepare` is called in that thread.

    What it raises is raised again when the request is taken on, so it is not looked at here.
    """

    def __init__(self, prepare: Callable[[Request], None]) -> None:
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._open: dict[str, tuple[Request, Future[None]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether requests are being prepared, or have been and were not taken."""
        return bool(self._open)

    def begin(self, request: Request) -> None:
        """Prepare a request."""
        self._open[request.request_id] = request, self._pool.submit(self._prepare, request)

    def forget(self, request_ids: Collection[str]) -> None:
        """These are not wanted any more; unknown ones are fine."""
        for request_id in request_ids:
            if request_id in self._open:
                self._open.pop(request_id)[1].cancel()

    def take_ready(self) -> list[Request]:
        """The requests that are prepared, or cannot be; each once."""
        ready = [request for request, future in self._open.values() if future.done()]
        for request in ready:
            del self._open[request.request_id]
        return ready

    def close(self) -> None:
        """Give up what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
