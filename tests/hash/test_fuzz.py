"""Any history of arrivals, aborts, evictions, preemptions and damage gives every request the interpreter's answer."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings as hypothesis_settings

from samebit.audit.replay import Abort, Damage, Drain, Evict, Step
from tests.hash.fuzzer import LAYOUTS, SHARED, VOCAB, EngineMachine, World

TestAnyHistory = EngineMachine.TestCase
TestAnyHistory.settings = hypothesis_settings(max_examples=100, stateful_step_count=25)


@pytest.mark.slow
class TestLongHistories(EngineMachine.TestCase):
    settings = hypothesis_settings(stateful_step_count=60)


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_a_long_busy_run_is_exact(layout, kernel_kind):
    world = busy_world(layout, kernel_kind)
    keep_busy(world, random.Random(layout), 500)
    # The run must have been worth it: every kind of event, many times.
    counters = world.engine.scheduler.counters
    assert counters.num_preemptions > 20
    assert counters.num_published > 100
    assert world.engine.manager.num_evicted_tokens > 100
    assert world.player.num_hits > 10


# Recording takes most of a recorded run: every second layout is left to longer runs.
WITH_A_DRAFTER = [
    pytest.param(layout, graph, marks=[pytest.mark.slow] if graph == "trace" and layout % 4 else [])
    for layout in range(len(LAYOUTS))
    for graph in ("eager", "trace")
]


@pytest.mark.parametrize(("layout", "graph"), WITH_A_DRAFTER)
def test_a_long_busy_run_with_a_drafter_is_exact(layout, graph):
    speculation = {"method": "mtp", "num_speculative_tokens": 1 + layout}
    world = busy_world(layout, "auto", speculative_config=speculation, graph=graph)
    keep_busy(world, random.Random(layout), 300)
    counters = world.engine.scheduler.counters
    assert counters.num_accepted_tokens > 60
    assert counters.num_draft_tokens > counters.num_accepted_tokens + 50
    assert world.num_drafts_checked > 200
    assert world.player.num_hits > 5


@pytest.mark.parametrize("layout", [0, 3])
def test_nobody_believes_a_damaged_cache(layout, kernel_kind):
    world = busy_world(layout, kernel_kind)
    keep_busy(world, random.Random(layout), 300, damage=15)
    assert world.player.num_damages > 10
    assert world.engine.scheduler.counters.num_damaged_resumes > 3
    assert world.player.num_hits > 5


def busy_world(layout: int, kernels: str, **more) -> World:
    schedule = {"seed": 5, "preempt_percent": 8, "chunk_sizes": (7, 3, 16), "pad_rows": 1, "shuffle_rows": True}
    pools = {"max_num_seqs": 4, "num_checkpoints": 6, "num_pages": 14, "num_window_pages": 20}
    settings = {"schedule": schedule, "max_num_batched_tokens": 16, "checkpoint_interval": 8, "kernels": kernels}
    return World(*LAYOUTS[layout], **pools, **settings, **more)


def keep_busy(world: World, rng: random.Random, times: int, *, damage: int = 0) -> None:
    """Random operations, then silence; `damage` is how often a checkpoint loses a row, in about a hundred."""
    kinds, weights = ("arrive", "step", "abort", "evict", "damage"), (25, 70, 4, 1, damage)
    for kind in rng.choices(kinds, weights, k=times):
        live = world.player.live
        match kind:
            case "arrive" if len(live) < 12:
                prompt = SHARED[: rng.randint(0, 24)] + rng.choices(range(VOCAB), k=rng.randint(1, 8))
                prompt[rng.randrange(len(prompt))] = rng.choice([prompt[0], rng.randrange(VOCAB)])
                params = {"max_tokens": rng.randint(1, 8), "temperature": rng.choice([0.0, 1.0]), "logprobs": 2}
                salt = rng.choice(["", "", "", "tenant", f"tenant {rng.randrange(40)}"])
                world.add(prompt, n=rng.choice([1, 1, 3]), params=params, salt=salt)
            case "abort" if live:
                world.do(Abort(rng.choice(live)))
            case "evict":
                world.do(Evict())
            case "damage":
                world.do(Damage(rng.randrange(16), rng.randrange(8), rng.randrange(6)))
            case _:
                world.do(Step(2))
    world.do(Drain())
    world.check_cache()
    world.check_hits()
    world.check_empty()
