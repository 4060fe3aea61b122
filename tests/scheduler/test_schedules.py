"""Timing changes nothing: chunk cuts, forced preemption, batch caps, row order, tiny pools, slot reuse."""

from __future__ import annotations

import random

import pytest

from samebit.core.config import Schedule
from tests.fakes import VOCAB, make_geometry
from tests.scheduler.world import World


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("when", range(1, 13))
def test_preemption_at_any_step_costs_time_only(when):
    world = World(budget=8)
    world.add(tokens(5), max_tokens=25)
    victim = world.add(tokens(22, seed=1), max_tokens=10)
    for _ in range(when):
        world.step()
    sequence = world.scheduler._sequences["r1"]
    held = sequence.state.length if sequence.state else None
    assert held is not None
    world.scheduler._preempt(sequence)
    world.run()
    assert victim.num_preemptions == 1
    assert victim.num_cached_tokens == 0, "only the hit of the first admission counts"
    # It goes on where its last whole page ended.
    assert held // 4 * 4 in {0} | {c.boundary for c in world.checkpoints}


@pytest.mark.parametrize("percent", [20, 60])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_under_constant_preemption(percent, seed):
    schedule = Schedule(seed=seed, preempt_percent=percent, chunk_sizes=(5, 1, 8), shuffle_rows=True)
    world = World(make_geometry(num_pages=(12, 16)), schedule=schedule, budget=8)
    watched = [world.add(tokens(4 + 3 * i, seed=i % 3), max_tokens=8) for i in range(8)]
    world.run()
    assert sum(each.num_preemptions for each in watched) > 3
    assert all(len(each.outputs) == 8 for each in watched)


def test_a_pool_for_one_request_serves_many_in_turn():
    world = World(make_geometry(num_slots=4, num_snapshots=1, num_pages=(4, 10), max_length=40), budget=8)
    watched = [world.add(tokens(20, seed=i), max_tokens=20) for i in range(4)]
    world.run()
    assert all(len(each.outputs) == 20 for each in watched)
    world.check_empty()


def steps_in_a_pool_that_is_outgrown(*, runs_ahead):
    """The steps that sixteen requests take, for less than half of which there are pages in the end."""
    geometry = make_geometry(num_slots=16, num_pages=(400, 50), num_snapshots=40, page_size=16, max_length=256)
    world = World(geometry, budget=128, interval=64, runs_ahead=runs_ahead)
    for i in range(16):
        world.add([(5 * i + 3 * j) % VOCAB for j in range(30 + i)], max_tokens=80, seed=i)
    count = 0
    while world.scheduler.has_work:
        world.step()
        count += 1
    assert world.counters.num_preemptions > 0
    return count


def test_where_pages_run_out_planning_ahead_takes_no_more_steps():
    """Who finds no page must not sit out step after step because there is always one in flight."""
    assert steps_in_a_pool_that_is_outgrown(runs_ahead=True) <= 1.1 * steps_in_a_pool_that_is_outgrown(runs_ahead=False)


def test_requests_that_outgrow_the_pool_are_preempted_youngest_first():
    world = World(make_geometry(num_slots=3, num_snapshots=8, num_pages=(40, 15), max_length=60), budget=32)
    watched = [world.add(tokens(10, seed=i), max_tokens=40) for i in range(3)]
    world.run()
    assert watched[0].num_preemptions == 0
    assert world.counters.num_preemptions > 0
    assert watched[1].num_preemptions <= watched[2].num_preemptions


def test_fifty_requests_on_two_slots_never_see_a_former_tenant():
    world = World(make_geometry(num_slots=2), budget=8, order_seed=3)
    for i in range(50):
        world.add(tokens(1 + i % 7, seed=i), max_tokens=1 + i % 4)
    world.run()


@pytest.mark.parametrize("chunk", [1, 4, 5, 6, 7, 11, 12, 13])
def test_a_prompt_of_three_windows_keeps_every_key_it_can_see(chunk):
    world = World(schedule=Schedule(chunk_sizes=(chunk,)), budget=64)
    watched = world.ask(tokens(3 * 6 + 5), max_tokens=14)
    assert len(watched.outputs) == 14
    world.add(tokens(3 * 6 + 5, seed=1), max_tokens=20)
    most = 0
    while world.scheduler.has_work:
        world.step()
        most = max(most, world.manager.pages[0].num_used - len(world._cached_pages()[0]))
    # Pages of the window of 6, those of a chunk, and one begun.
    assert most <= -(-(6 + chunk) // 4) + 2


def test_admission_takes_only_prompts_that_fit_whole():
    world = World(make_geometry(num_slots=4, num_pages=(40, 12), max_length=48), budget=8)
    big = [world.add(tokens(40, seed=i), max_tokens=2) for i in range(2)]
    small = world.add(tokens(4, seed=5), max_tokens=2)
    world.step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (1, 2)
    world.run()
    assert world.counters.num_preemptions == 0
    assert all(each.finish_reason == "length" for each in (*big, small))


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_stop_tokens_end_a_request_once_they_may(min_tokens):
    world = World()
    # Every token but 0 is a stop: below the minimum only 0 can be drawn.
    watched = world.ask(tokens(9), max_tokens=12, stop_token_ids=list(range(1, VOCAB)), min_tokens=min_tokens)
    assert watched.finish_reason == "stop"
    assert watched.token_ids[:-1] == [0] * (len(watched.outputs) - 1)
    assert watched.token_ids[-1] != 0
    assert len(watched.outputs) > min_tokens


def test_seeds_and_samples_reach_their_own_rows():
    world = World(schedule=Schedule(shuffle_rows=True, seed=4))
    several = [world.add(tokens(9), seed=seed) for seed in range(4)]
    world.run()
    assert len({tuple(each.outputs) for each in several}) == 4


@pytest.mark.parametrize("max_rows", [1, 2])
def test_a_cap_on_rows_holds_for_rows_with_tokens(max_rows):
    world = World(schedule=Schedule(max_rows=max_rows))
    for i in range(5):
        world.add(tokens(6, seed=i))
    while world.scheduler.has_work:
        world.step()
        assert sum(row.num_tokens > 0 for row in world.plan.rows) <= max_rows
    assert not world.live


def test_the_oldest_waits_for_pages_that_an_ending_request_still_holds():
    world = World(make_geometry(num_pages=(40, 10), max_length=40), budget=64)
    oldest = world.add(tokens(17), max_tokens=10)
    ending = world.add(tokens(17, seed=1), max_tokens=4)
    for _ in range(4):
        world.step()
    assert ending.finish_reason == "length"
    world.step()
    # All ten pages are taken; the only row is the one that stores the state of the ended request.
    assert [row.num_tokens for row in world.plan.rows] == [0]
    world.run()
    assert oldest.num_preemptions == 0
