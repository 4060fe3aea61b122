"""Aborts, failed steps and non-finite logits: nothing wrong is published, nothing is held, others are unaffected."""

from __future__ import annotations

import random

import pytest

from samebit.core.errors import InvalidRequestError, PromptTooLongError
from tests.fakes import VOCAB, make_geometry
from tests.scheduler.world import World


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("chunk", [4, 7, 8, 9, 16])
@pytest.mark.parametrize("aborted", [False, True])
def test_a_chunk_with_non_finite_logits_is_never_published(chunk, aborted):
    world = World(budget=chunk, interval=64)
    watched = world.add(tokens(40))
    for _ in range(-(-40 // chunk) - 1):
        world.step()
    world.runner.not_finite.add("r0")
    plan = world.scheduler.plan()
    output = world.runner.execute(plan)
    assert not all(output.finite)
    if aborted:
        world.abort(watched)
    failed = world.scheduler.commit(output)
    assert [item.error is not None for item in failed] == [True] * (not aborted)
    world.live.clear()
    world.run()
    # What may be published is what was committed before; its bytes were compared by `run`.
    assert all(checkpoint.boundary <= 40 - 1 for checkpoint in world.checkpoints)
    for n in (40, 39, 20):
        assert world.ask(tokens(n)).finish_reason


def test_non_finite_logits_end_their_request_only():
    world = World(budget=32)
    sick, well = world.add(tokens(9)), world.add(tokens(9, seed=1))
    world.runner.not_finite.add("r0")
    plan = world.scheduler.plan()
    sick_progress, well_progress = world.scheduler.commit(world.runner.execute(plan))
    assert (sick_progress.request_id, sick_progress.finish_reason) == ("r0", "error")
    assert "finite" in (sick_progress.error or "")
    assert well_progress.tokens[0].token_id == well.wanted.outputs[0][0]
    assert not world.checkpoints or all(c.boundary <= 8 for c in world.checkpoints)
    world.live.discard(sick.request.request_id)
    well.outputs.append(well.wanted.outputs[0])
    world.run()


@pytest.mark.parametrize("executed", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_a_failed_step_ends_its_requests_and_no_others(executed, steps_before):
    world = World(make_geometry(num_slots=2), budget=8)
    world.ask(tokens(20))
    first = [world.add(tokens(20)[:n] + tokens(5, seed=n)) for n in (19, 12)]
    waiting = world.add(tokens(20) + tokens(3))
    for _ in range(steps_before):
        world.step()
    plan = world.scheduler.plan()
    if executed:
        world.runner.execute(plan)
    in_step = {row.request_id for row in plan.rows} & world.live
    failed = world.scheduler.fail("the device is gone")
    assert {item.request_id for item in failed} == in_step
    assert all((item.finish_reason, item.error) == ("error", "the device is gone") for item in failed)
    world.scheduler.check()
    world.live -= in_step
    world.run()
    assert waiting.finish_reason == "length"
    again = [world.ask(watched.request.prompt_token_ids) for watched in (*first, waiting)]
    assert all(watched.finish_reason for watched in again)
    world.check_empty()


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_at_any_step_leaves_nothing_behind(steps, in_flight):
    world = World(make_geometry(num_slots=2), budget=8)
    world.ask(tokens(14))
    victim, neighbour = world.add(tokens(14) + tokens(8, seed=1), max_tokens=8), world.add(tokens(9, seed=2))
    queued = world.add(tokens(6, seed=3))
    for _ in range(steps):
        if world.scheduler.has_work:
            world.step()
    if in_flight and world.scheduler.has_work:
        world.step(abort=[victim])
    else:
        world.abort(victim)
    world.run()
    assert neighbour.finish_reason == queued.finish_reason == "length"
    follow_up = world.ask(victim.request.prompt_token_ids + tokens(3, seed=4))
    # What an aborted request had computed up to a page is not lost.
    done = len(victim.request.prompt_token_ids) + len(victim.outputs) - 1 if victim.outputs else 12
    assert follow_up.num_cached_tokens >= min(done, 22) // 4 * 4
    world.check_empty()


def test_the_end_of_a_request_is_known_only_once():
    world = World(budget=32)
    watched = world.add(tokens(6))
    assert world.scheduler.finish("r0", "abort")
    assert not world.scheduler.finish("r0", "abort")
    assert not world.scheduler.finish("nobody", "abort")
    world.live.clear()
    assert not world.scheduler.has_work
    assert watched.outputs == []


def test_requests_that_can_never_run_are_refused_with_the_limit():
    world = World(make_geometry(max_length=20))
    world.add(tokens(15))
    with pytest.raises(InvalidRequestError, match="already in use"):
        world.scheduler.add(world.requests["r0"].request)
    with pytest.raises(InvalidRequestError, match="at least 1"):
        world.add([])
    for prompt, wanted in ((20, 1), (16, 5), (20, None)):
        with pytest.raises(PromptTooLongError, match="20"):
            world.add(tokens(prompt), max_tokens=wanted)
    world.run()
    # Every token of room is usable.
    assert len(world.ask(tokens(19), max_tokens=1).outputs) == 1
    assert len(world.ask(tokens(11), max_tokens=9, seed=5).outputs) <= 9


def test_without_a_limit_a_request_runs_to_the_maximum_length():
    world = World(make_geometry(max_length=20))
    watched = world.ask(tokens(13), max_tokens=None, ignore_eos=True)
    assert len(watched.outputs) == 7


def test_an_aborted_request_that_lost_its_state_with_a_row_in_flight_is_not_queued():
    world = World(runs_ahead=True)
    world.ask(tokens(20))
    for checkpoint in world.checkpoints:
        world.runner.damage_snapshot(checkpoint.snapshot, 0, 0)
    watched = world.add([*tokens(20), 5], max_tokens=6)
    world.step()
    assert world.counters.num_damaged_resumes == world.scheduler.num_waiting == 1, "it begins anew"
    world.abort(watched)
    assert world.scheduler.num_waiting == 0
    world.run()
