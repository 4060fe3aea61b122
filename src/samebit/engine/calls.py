"""Questions that one process has put to the other, and their answers as they come. Knows no message."""

import asyncio
import itertools
from typing import Generic, TypeVar

from samebit.core.errors import SamebitError

Answer = TypeVar("Answer")


class Calls(Generic[Answer]):
    """Owner of the questions that wait. Use it in one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def begin(self) -> tuple[int, asyncio.Future[Answer]]:
        """A question's number, and what will be its answer."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, self._waiting[number]

    def answer(self, number: int, value: Answer | SamebitError) -> None:
        """What came of the question: a value, or an error to raise. Nobody may be waiting any more."""
        waiting = self._waiting.pop(number, None)
        if waiting is None or waiting.done():
            return
        if isinstance(value, SamebitError):
            waiting.set_exception(value)
        else:
            waiting.set_result(value)

    def fail(self, error: SamebitError) -> None:
        """No question gets an answer."""
        for number in list(self._waiting):
            self.answer(number, error)
