"""The check of the battery in which each step is planned while the one before it is in flight."""

from __future__ import annotations

import random

from samebit.audit.replay import Abort, Damage, Step
from tests.hash.fuzzer import SHARED, VOCAB
from tests.mutants.worlds import MIXED, TWO_WINDOWS, any_request, expect, finish, make_drafting_world, make_world


def check_ahead() -> None:
    """Each step is planned while the one before it is in flight: sure rows only, and what turns out to have ended is dropped."""
    for layout, chunks, loses in ((MIXED, (), False), (TWO_WINDOWS, (16, 3, 8), False), (MIXED, (4,), True)):
        world = make_world(layout, schedule={"chunk_sizes": chunks}, max_num_batched_tokens=24, async_scheduling=True)
        rng = random.Random(9)
        for number in range(24):
            asked = any_request(rng, number)
            asked["params"] |= {"max_tokens": 1 + number % 9, "min_tokens": number % 3}
            if number % 5 == 4:  # two likely tokens, which take turns
                asked["params"] |= {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": {1: 90.0, 2: 89.0}}
            world.add(SHARED[: 3 + number], **asked)
            world.do(Step(1 + number % 2))
            if number % 7 == 6 and world.player.live:
                world.do(Abort(world.player.live[0]))
            if loses and number % 4 == 3:
                world.do(Damage(number, 0, 0))
        finish(world)
        world.check_cache()
        world.check_hits()
        world.check_empty()
        assert world.player.num_hits > 3, "little came from the cache"
    check_guesses()
    world = make_world(MIXED, async_scheduling=True)
    ahead: list[int] = []
    plan = world.engine.scheduler.plan_ahead

    def watched():
        found = plan()
        ahead.extend(row.start for row in found.rows) if found else None
        return found

    world.engine.scheduler.plan_ahead = watched
    for number in range(4):
        expect(world, SHARED[:9], 8 * (number > 0), max_tokens=5)
    assert len(ahead) >= 12, "little was planned ahead"
    assert max(ahead) <= 9 + 5 - 2, "a token beyond the last"


def check_guesses() -> None:
    """Rows with guesses are planned before those in flight are verified; requests stop inside of them, and at boundaries."""
    for layout, max_drafts, interval, count in ((MIXED, 2, 64, 16), (TWO_WINDOWS, 4, 64, 12), (MIXED, 4, 8, 12)):
        sizes = {"num_pages": 90, "num_window_pages": 90, "checkpoint_interval": interval}
        world = make_drafting_world(layout, max_drafts, async_scheduling=True, **sizes)
        rng = random.Random(interval)
        for number in range(count):
            asked = any_request(rng, number)
            stops = rng.sample(range(VOCAB), VOCAB // 12)
            asked["params"] |= {
                "max_tokens": 24 + number % 8,
                "temperature": 0.9,
                "min_tokens": number % 5,
                "stop_token_ids": stops,
            }
            world.add(SHARED[: 3 + number], **asked)
            world.do(Step(1 + number % 3))
        finish(world, max_steps=400)
        world.check_cache()
        world.check_hits()
        boundaries = {checkpoint.boundary for checkpoint in world.engine.manager.tree.checkpoints}
        assert interval > 8 or {16, 24} <= boundaries, "no checkpoint at a boundary that was decoded"
        world.check_empty()
