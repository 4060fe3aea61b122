"""A write that did not happen is a refused publication; damage found at a resume is a miss. The tokens are right anyway."""

from __future__ import annotations

import random

import pytest

from tests.fakes import VOCAB, make_geometry
from tests.scheduler.world import World

GEOMETRY = {"windows": (6, None), "layers": 2}
STREAMS, LAYERS, HISTORY = 3, 4, 3
PROMPT = random.Random(1).choices(range(VOCAB), k=24)
TAIL = random.Random(2).choices(range(VOCAB), k=6)


def make_world(**options) -> World:
    return World(make_geometry(**GEOMETRY), **options)


@pytest.mark.parametrize("row", range(HISTORY))
@pytest.mark.parametrize("stream", range(STREAMS))
@pytest.mark.parametrize("budget", [7, 64])
def test_one_unwritten_checkpoint_row_is_refused(stream, row, budget):
    world = make_world(budget=budget)
    world.runner.skip = {("entry", stream, row)}
    first = world.ask(PROMPT)
    assert first.finish_reason == "length"
    assert not world.checkpoints
    assert not list(world.manager.tree.nodes())
    assert world.counters.num_published == 0
    # 8, 16, 24 and 20 (the prompt's end), and 28 after the answer.
    assert world.counters.num_refused_checkpoints == 5
    world.runner.skip = set()
    assert world.ask(PROMPT + TAIL).num_cached_tokens == 0
    assert world.ask(PROMPT + TAIL + TAIL).num_cached_tokens == 28
    assert world.counters.num_damaged_resumes == 0


@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_unstamped_page_is_refused(layer):
    """Only boundaries whose state holds the page: a window forgets it."""
    world = make_world(budget=8)
    world.add(PROMPT)
    world.runner.skip = {("stamp", layer)}
    world.step()
    assert not world.checkpoints
    assert world.counters.num_refused_checkpoints == 1
    world.runner.skip = set()
    world.run()
    is_window = layer < LAYERS // 2
    assert [c.boundary for c in world.checkpoints] == ([16, 20, 24, 28] if is_window else [])
    assert world.counters.num_refused_checkpoints == (1 if is_window else 5)
    assert world.ask(PROMPT + TAIL).num_cached_tokens == (24 if is_window else 0)
    assert world.counters.num_damaged_resumes == 0


@pytest.mark.parametrize("stream", range(STREAMS))
@pytest.mark.parametrize("step", range(1, 8))
def test_a_ring_that_was_not_written_starts_the_request_over(stream, step):
    world = make_world(budget=8)
    world.add(PROMPT)
    for number in range(8):
        world.runner.skip = {("ring", stream)} if number == step else set()
        if world.scheduler.has_work:
            world.step()
    world.runner.skip = set()
    world.run()
    # Step 6 draws the last token, so only the publication of 28 reads what it has left; step 7 is that publication.
    assert world.counters.num_damaged_resumes == (1 if step < 6 else 0)
    assert (28 in {c.boundary for c in world.checkpoints}) == (step != 6)
    assert world.ask(PROMPT + TAIL).num_cached_tokens > 0


@pytest.mark.parametrize("row", range(HISTORY))
@pytest.mark.parametrize("stream", range(STREAMS))
@pytest.mark.parametrize("budget", [3, 64])
def test_a_damaged_conv_row_is_dropped_at_resume(stream, row, budget):
    world = make_world(budget=budget)
    world.ask(PROMPT)
    deepest = max((c for c in world.checkpoints if c.boundary <= 24), key=lambda c: c.boundary)
    world.runner.damage_snapshot(deepest.snapshot, stream, row)
    hit = world.ask(PROMPT + TAIL)
    assert hit.finish_reason == "length"
    assert deepest not in world.checkpoints
    assert world.counters.num_damaged_resumes == 1
    # It was computed cold, published again, and is sound.
    assert world.ask(PROMPT + TAIL[:1]).num_cached_tokens == 24
    assert world.counters.num_damaged_resumes == 1


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("index", range(6))
def test_a_damaged_page_is_dropped_at_resume(layer, index):
    world = make_world()
    world.ask(PROMPT)
    deepest = max((c for c in world.checkpoints if c.boundary <= 24), key=lambda c: c.boundary)
    pages = {i: n.page for i, n in enumerate([*deepest.node.lineage()][-2::-1])}
    if layer < LAYERS // 2:
        pages = {held.index: held.page for held in deepest.windows[0]}
    if index not in pages:
        assert index < (24 - 5) // 4, "the window's pages are all there"
        return
    world.runner.damage_page(layer, pages[index])
    for _ in range(4):
        assert world.ask(PROMPT + TAIL).finish_reason == "length"
        world.step()
    assert deepest not in world.checkpoints
    # The damage is paid for once, not by every later request.
    assert world.counters.num_damaged_resumes == 1
    assert world.ask(PROMPT + TAIL).num_cached_tokens >= 24


@pytest.mark.parametrize("part", ["row", "page"])
@pytest.mark.parametrize("aborted", [False, True])
def test_all_who_resume_from_a_damaged_checkpoint_in_one_step_start_over(part, aborted):
    world = make_world(budget=64)
    world.ask(PROMPT, max_tokens=1)
    deepest = max(world.checkpoints, key=lambda c: c.boundary)
    if part == "row":
        world.runner.damage_snapshot(deepest.snapshot, 1, 0)
    else:
        world.runner.damage_page(LAYERS - 1, deepest.node.page)
    siblings = [world.add(PROMPT + TAIL[:n], seed=n) for n in (2, 3, 4)]
    other = world.add(TAIL * 3)
    world.step(abort=siblings[:1] if aborted else ())
    assert world.counters.num_damaged_resumes == 3
    assert deepest not in world.checkpoints
    world.run()
    assert [len(each.outputs) for each in (*siblings, other)] == [0 if aborted else 5, 5, 5, 5]
    assert world.counters.num_damaged_resumes == 3
    world.check_empty()


def test_a_request_that_met_damage_takes_nothing_from_the_cache_again():
    world = make_world(budget=64)
    world.ask(PROMPT, max_tokens=1)
    damaged = max(world.checkpoints, key=lambda c: c.boundary)
    world.runner.damage_snapshot(damaged.snapshot, 0, 0)
    victim = world.add(PROMPT + TAIL)
    # This one computes the same prefix from the start, and publishes it in the step in which the damage is found.
    world.add(PROMPT, prompt_logprobs=0)
    world.step()
    assert world.counters.num_damaged_resumes == 1
    assert world.manager.tree.walk(world.manager.namespace(""), PROMPT, 24)
    world.step()
    row = next(row for row in world.plan.rows if row.request_id == victim.request.request_id)
    assert (row.start, row.resume_snapshot) == (0, 0)
    world.run()


def test_a_device_that_keeps_losing_state_ends_the_request_with_an_error():
    world = make_world(budget=8)
    world.add(PROMPT)
    world.runner.skip = {("ring", 0)}
    errors = []
    for _ in range(20):
        if world.scheduler.has_work:
            plan = world.scheduler.plan()
            errors += [item.error for item in world.scheduler.commit(world.runner.execute(plan)) if item.error]
    assert len(errors) == 1
    assert "loses state" in errors[0]
    assert not world.scheduler.has_work
    world.check_drained()
    world.runner.skip = set()
    world.live.clear()
    assert world.ask(PROMPT).finish_reason == "length"
