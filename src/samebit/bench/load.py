"""Drives conversations against something that answers, and notes when what came. Open loop: an answer that is late delays no arrival.

The clock is that of the running event loop. Knows neither HTTP nor summaries.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from samebit.bench.api import Call, Piece
from samebit.bench.datasets import Conversation
from samebit.bench.http import FailedError
from samebit.bench.rows import Row


class Ask(Protocol):
    """Sends one request and hands on its pieces; raises FailedError when it fails."""

    def __call__(self, call: Call) -> AsyncGenerator[Piece, None]: ...


def arrival_times(rng: random.Random, count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    """Seconds of `count` arrivals, `rate` a second on average, all at 0 for an infinite rate.

    Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, infinity is a constant gap.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [number / rate for number in range(count)]
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count))
    return list(itertools.accumulate(gaps))


class Load:
    """One run and what it has measured so far. `rows` grow while it goes on; `on_end` is called with each row that has ended.

    With `max_concurrency`, at most so many conversations go on at once. One that arrives when there is no place waits, and
    its waiting counts; but where all arrive at once (a closed loop), it arrives when there is a place for it.
    """

    def __init__(
        self,
        ask: Ask,
        conversations: Sequence[Conversation],
        arrivals: Sequence[float],
        *,
        max_concurrency: int | None = None,
        timeout_s: float | None = None,
        on_end: Callable[[Row], None] = lambda _: None,
    ) -> None:
        self._ask, self._conversations, self._arrivals = ask, conversations, arrivals
        self._places = asyncio.Semaphore(max_concurrency or len(conversations))
        self._is_closed = max_concurrency is not None and not any(arrivals)
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._begin_s = 0.0
        self.rows: list[Row] = []
        self.duration_s = 0.0

    async def run(self) -> bool:
        """Go on until everything has been answered or has failed. False if it was cancelled before."""
        loop = asyncio.get_running_loop()
        self._begin_s = loop.time()
        try:
            async with asyncio.TaskGroup() as group:
                for number, planned_s in enumerate(self._arrivals):
                    await asyncio.sleep(planned_s - self._now())
                    group.create_task(self._converse(number, planned_s))
        except asyncio.CancelledError:
            return False
        finally:
            self.duration_s = self._now()
        return True

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._begin_s

    async def _converse(self, number: int, planned_s: float) -> None:
        conversation = self._conversations[number]
        said: list[str] = []
        async with self._places:
            if self._is_closed:
                planned_s = self._now()
            for index, turn in enumerate(conversation.turns):
                row = Row(
                    conversation=number,
                    turn=index,
                    max_tokens=turn.max_tokens,
                    planned_s=planned_s,
                    sent_s=self._now(),
                )
                said.append(turn.text)
                said.append(await self._answer(row, Call(conversation.system, tuple(said), turn.max_tokens)))
                self._on_end(row)
                if row.error is not None:
                    return  # what would follow is another conversation
                planned_s = self._now()

    async def _answer(self, row: Row, call: Call) -> str:
        """The text of the answer; the row tells when it came, or why it did not."""
        self.rows.append(row)
        texts: list[str] = []
        try:
            async with asyncio.timeout(self._timeout_s), contextlib.aclosing(self._ask(call)) as pieces:
                async for piece in pieces:
                    self._note(row, piece)
                    texts.append(piece.text)
            if not row.token_s:
                raise FailedError("an answer without a token")
            row.is_complete = True
        except FailedError as error:
            row.error = str(error)
        except TimeoutError:
            row.error = f"no whole answer within {self._timeout_s:g} s"
        return "".join(texts)

    def _note(self, row: Row, piece: Piece) -> None:
        if piece.has_tokens:
            row.token_s.append(self._now())
            row.num_output_tokens += 1
        if piece.num_output_tokens is not None:
            row.num_output_tokens, row.has_usage = piece.num_output_tokens, True
            row.num_input_tokens, row.num_cached_tokens = piece.num_input_tokens, piece.num_cached_tokens
