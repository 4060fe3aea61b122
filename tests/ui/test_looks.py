"""However many look, and however often, the engine is asked seldom."""

import asyncio
import time

import pytest

from samebit.core.errors import EngineDeadError, OverloadedError
from samebit.engine.calls import Calls
from samebit.engine.views import Look, RequestsView
from samebit.server import looks
from samebit.server.looks import Looks

LOOK = Look(subject="requests", is_admin=True)


class Slow:
    """An engine that says that every look takes it so long, and how many are on their way at once."""

    def __init__(self, took_s=0.001):
        self.took_s = took_s
        self.asked = []
        self.times_s = []
        self.num_now = self.most_now = 0

    async def look(self, look):
        self.asked.append(look)
        self.times_s.append(time.monotonic())
        self.num_now += 1
        self.most_now = max(self.most_now, self.num_now)
        await asyncio.sleep(self.took_s)
        self.num_now -= 1
        return self.took_s, RequestsView(requests=[])


def others(count):
    return [Look(subject="requests", is_admin=True, name=str(number)) for number in range(count)]


def test_those_who_look_at_the_same_share_one_look():
    async def run():
        engine = Slow()
        seen = Looks(engine)
        views = await asyncio.gather(*(seen.see(LOOK) for _ in range(20)))
        assert len(engine.asked) == 1
        assert all(view is views[0] for view in views)

    asyncio.run(run())


def test_after_a_look_the_engine_is_left_alone_for_many_times_as_long():
    async def run():
        engine = Slow(took_s=0.002)
        seen = Looks(engine)
        await asyncio.gather(*(seen.see(look) for look in others(3)))
        assert engine.most_now == 1
        gaps = [after - before for before, after in zip(engine.times_s, engine.times_s[1:], strict=False)]
        assert min(gaps) >= 50 * 0.002

    asyncio.run(run())


def test_what_was_seen_for_whom_is_never_shown_to_another():
    async def run():
        engine = Slow(took_s=0.0)
        seen = Looks(engine)
        stranger = Look(subject="requests", is_admin=False)
        await seen.see(LOOK)
        await seen.see(stranger)
        assert engine.asked == [LOOK, stranger]

    asyncio.run(run())


def test_what_is_kept_is_bounded_and_so_are_those_who_wait(monkeypatch):
    async def run():
        engine = Slow(took_s=0.0)
        seen = Looks(engine)
        for look in others(100):
            await seen.see(look)
        assert len(seen._kept) <= looks._MAX_KEPT
        engine.took_s = 0.01
        waiting = [asyncio.ensure_future(seen.see(look)) for look in others(looks._MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="too many look"):
            await seen.see(LOOK)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await seen.see(LOOK)

    asyncio.run(run())


def test_a_question_gets_its_own_answer_or_the_error_that_ends_all():
    async def run():
        calls = Calls[str]()
        (one, first), (two, second), (_, third) = calls.begin(), calls.begin(), calls.begin()
        calls.answer(two, "two")
        calls.answer(one, OverloadedError("no"))
        calls.answer(one, "late")
        calls.answer(99, "nobody asked")
        assert await second == "two"
        with pytest.raises(OverloadedError):
            await first
        third.cancel()
        calls.fail(OverloadedError("gone"))
        assert third.cancelled()

    asyncio.run(run())


def test_after_a_look_that_failed_the_engine_is_left_alone_too():
    class Failing(Slow):
        async def look(self, look):
            await super().look(look)
            raise EngineDeadError("no")

    async def run():
        engine = Failing(took_s=0.002)
        seen = Looks(engine)
        await asyncio.gather(*(seen.see(look) for look in others(3)), return_exceptions=True)
        gaps = [after - before for before, after in zip(engine.times_s, engine.times_s[1:], strict=False)]
        assert min(gaps) >= 50 * 0.002

    asyncio.run(run())
