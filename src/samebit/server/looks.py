"""Looks at the engine, shared and paced so that however many watch, it spends a small part of its time on them. Knows no endpoint."""

import asyncio
import time

from samebit.core.errors import OverloadedError, SamebitError
from samebit.engine.client import AsyncEngineClient
from samebit.engine.views import Look, View

# Of its time the engine spends at most one part in so many.
_SHARE = 50
_FRESH_S = 0.4
_MAX_PAUSE_S = 5.0
_MAX_KEPT = 16
_MAX_WAITING = 32


class Looks:
    """Owner of what was seen last. One look at a time is on its way; after it the engine gets time for requests."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client
        self._kept: dict[Look, tuple[float, View]] = {}
        self._turn = asyncio.Lock()
        self._next_s = 0.0
        self._num_waiting = 0

    async def see(self, look: Look) -> View:
        """What the engine shows, not older than a moment. Raises EngineDeadError, and OverloadedError when too many look."""
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError("too many look at the engine; try again later")
        self._num_waiting += 1
        try:
            async with self._turn:
                return self._fresh(look) or await self._look(look)
        finally:
            self._num_waiting -= 1

    def _fresh(self, look: Look) -> View | None:
        seen_s, view = self._kept.get(look, (-_FRESH_S, None))
        return view if time.monotonic() - seen_s < _FRESH_S else None

    async def _look(self, look: Look) -> View:
        await asyncio.sleep(max(0.0, self._next_s - time.monotonic()))
        asked_s = time.monotonic()
        try:
            took_s, view = await self._client.look(look)
        except SamebitError:
            # How long the engine took over an error is not told: at most as long as it was waited for.
            self._next_s = time.monotonic() + min(_SHARE * (time.monotonic() - asked_s), _MAX_PAUSE_S)
            raise
        now_s = time.monotonic()
        self._next_s = now_s + _SHARE * took_s
        self._kept.pop(look, None)
        while len(self._kept) >= _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[look] = now_s, view
        return view
