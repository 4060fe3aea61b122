"""What a prompt finds in the cache: how deep a hit is, what is kept, what goes first, and who shares with whom."""

from __future__ import annotations

import random

import pytest

from samebit.core.config import Schedule
from samebit.state.nodes import CheckpointKind
from tests.fakes import VOCAB, make_geometry
from tests.scheduler.world import World

PAGE, WINDOW, TAPS, GRID = 4, 6, 4, 8
EDGES = sorted({edge + d for edge in (1, TAPS, PAGE, WINDOW, GRID, 2 * GRID) for d in (-1, 0, 1)} - {0})


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def page_floor(length: int) -> int:
    return length // PAGE * PAGE


def with_answer(watched) -> list[int]:
    return [*watched.request.prompt_token_ids, *watched.token_ids]


@pytest.mark.parametrize("length", EDGES)
def test_an_exact_repeat_leaves_one_token_to_compute(length):
    world = World()
    first = world.ask(tokens(length), max_tokens=1)
    second = world.ask(tokens(length), max_tokens=3)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == page_floor(length - 1)
    assert second.token_ids[:1] == first.token_ids


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("tail", [1, TAPS - 2, TAPS - 1, TAPS, PAGE + 1])
@pytest.mark.parametrize("cut", [1, 3, 64])
def test_the_next_turn_hits_the_page_floor_of_the_answered_state(length, tail, cut):
    world = World(schedule=Schedule(chunk_sizes=(cut,)))
    first = world.ask(tokens(length), max_tokens=7)
    turn = world.ask(with_answer(first) + tokens(tail, seed=1))
    # The last drawn token has no state yet.
    assert turn.num_cached_tokens == page_floor(length + 7 - 1)
    third = world.ask(with_answer(turn) + tokens(tail, seed=2))
    assert third.num_cached_tokens == page_floor(len(with_answer(turn)) - 1)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("length", [5, 13, 16, 29])
def test_a_next_turn_that_comes_with_the_last_token_of_the_answer_waits_for_its_state(length, runs_ahead):
    world = World(runs_ahead=runs_ahead)
    first = world.add(tokens(length), max_tokens=7)
    while world.live:
        world.step()
    turn = world.ask(with_answer(first) + tokens(5, seed=1))
    assert turn.num_cached_tokens == page_floor(length + 7 - 1)


@pytest.mark.parametrize("length", [13, 16, 17, 20, 29])
def test_a_repeated_prompt_with_a_new_tail_hits_at_the_last_boundary(length):
    world = World()
    world.ask(tokens(length))
    for seed in (1, 2):
        again = world.ask(tokens(length) + tokens(6, seed=seed))
        # A prompt that ends with a page: one page less, unless there is a grid checkpoint, or by then a fork's.
        last_page = length % GRID == 0 or (length % PAGE == 0 and seed == 2)
        assert again.num_cached_tokens == page_floor(length - 1) + PAGE * last_page


@pytest.mark.parametrize("shared", range(2 * GRID + 1, 3 * GRID))
@pytest.mark.parametrize("suffix", [PAGE, GRID, 4 * GRID - 6])
def test_a_fork_inside_a_page_hits_for_the_third_sibling(shared, suffix):
    world = World(interval=64)
    hits = [world.ask(tokens(shared) + tokens(suffix, seed=10 + i)).num_cached_tokens for i in range(4)]
    assert hits[0] == 0
    assert hits[2:] == [page_floor(shared)] * 2


@pytest.mark.parametrize("length", [3, 4, 5, 20, 23])
def test_thirty_two_identical_prompts_at_once_answer_alike(length):
    world = World(make_geometry(num_slots=32, num_pages=(300, 300)), budget=1024)
    siblings = [world.add(tokens(length), seed=7) for _ in range(32)]
    world.step()
    # A prompt of up to a page is nothing to wait for; of a longer one the first is computed, and nothing matched before.
    assert len(world.plan.rows) == (32 if length <= PAGE else 1)
    assert not any(row.resume_snapshot for row in world.plan.rows), "nothing is matched before it is written"
    world.step()
    assert len(world.plan.rows) == 32
    assert all(row.resume_snapshot for row in world.plan.rows[1:]) == (length > PAGE)
    world.run()
    assert len({tuple(sibling.outputs) for sibling in siblings}) == 1
    # One path: duplicates were given back.
    assert len(list(world.manager.tree.nodes())) == (length + 4) // PAGE


@pytest.mark.parametrize("length", [2, 5, 9, 17, 30])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11])
def test_every_chunk_size_gives_the_same_checkpoints(length, chunk):
    world = World(schedule=Schedule(chunk_sizes=(chunk,)), budget=64)
    world.ask(tokens(length), max_tokens=6)
    grid = set(range(GRID, length + 6, GRID))
    expected = (grid | {page_floor(length - 1), page_floor(length + 5)}) - {0}
    assert {c.boundary for c in world.checkpoints} == expected


def test_three_hits_of_one_checkpoint_leave_it_as_it_was():
    world = World(interval=64)
    world.ask(tokens(21), max_tokens=1)
    (checkpoint,) = world.checkpoints
    for tail in (1, TAPS - 1, PAGE, 9):
        for chunk in range(2):
            assert world.ask(tokens(21) + tokens(tail, seed=tail + chunk)).num_cached_tokens == 20
            world.check_bytes(checkpoint)


@pytest.mark.parametrize("start", range(1, 24))
def test_prompt_logprobs_are_complete_whatever_is_cached(start):
    world = World()
    world.ask(tokens(22))
    scored = world.ask(tokens(22), prompt_logprobs=2, start=start)
    assert len(scored.prompt) == max(0, 22 - start)
    assert scored.num_cached_tokens <= min(start - 1, 21) or start >= 22
    deepest = max([b for b in (8, 16, 20) if b <= min(start - 1 if start < 22 else 21, 21)], default=0)
    assert scored.num_cached_tokens == deepest


def test_salts_never_share():
    world = World()
    for salt in ("", "a", "b"):
        assert world.ask(tokens(20), salt=salt).num_cached_tokens == 0
    for salt in ("", "a", "b"):
        assert world.ask(tokens(20), salt=salt).num_cached_tokens == 16


def test_a_hit_with_two_windows_is_complete_in_both():
    """Prefixes between the two windows, and around them."""
    world = World(make_geometry(windows=(3, 9, None), num_pages=(60,) * 3), interval=4)
    for length in range(2, 24):
        world.ask(tokens(length, seed=length), max_tokens=1)
        assert world.ask([*tokens(length, seed=length), 1]).num_cached_tokens == page_floor(length - 1) + PAGE * (
            length % PAGE == 0
        )


def test_an_answer_longer_than_the_window_of_a_window_only_model_hits_after_churn():
    world = World(make_geometry(windows=(6,), num_pages=(80,), num_snapshots=60), budget=16)
    first = world.ask(tokens(9), max_tokens=3 * WINDOW)
    for seed in range(1, 8):
        world.ask(tokens(9, seed=seed), max_tokens=3 * WINDOW)
    assert world.ask([*with_answer(first), 1]).num_cached_tokens == page_floor(9 + 3 * WINDOW - 1)
    assert world.ask([*tokens(9), 2]).num_cached_tokens == 8


def test_without_caching_nothing_is_kept():
    world = World(enable_caching=False)
    for _ in range(2):
        assert world.ask(tokens(20)).num_cached_tokens == 0
    assert not world.checkpoints
    assert all(pool.num_used == 0 for pool in world.manager.pages)


def test_grid_checkpoints_go_first_but_for_the_last_two_of_their_path():
    world = World(budget=64)
    for seed in (0, 1):
        world.ask(tokens(45, seed=seed), max_tokens=1)
    kinds = {c.boundary: c.kind for c in world.checkpoints}
    assert kinds == dict.fromkeys((8, 16, 24, 32, 40), CheckpointKind.GRID) | {44: CheckpointKind.PROMPT_END}
    first_key = tuple(tokens(4))
    order = [(int([*c.node.lineage()][-2].key != first_key), c.boundary) for c in world.manager.tree.order.all()]
    # The spare ones of the newer path go before anything that is worth something in the older.
    assert order == [
        *((path, boundary) for path in (0, 1) for boundary in (8, 16, 24)),
        *((path, boundary) for path in (0, 1) for boundary in (32, 40, 44)),
    ]


def test_a_state_that_is_computed_again_counts_as_used():
    """Prompt logprobs bar the cache, siblings miss it; either way the checkpoint has proved useful."""
    world = World(make_geometry(num_snapshots=3), interval=64)
    for seed in (1, 2):
        world.ask(tokens(9, seed=seed), max_tokens=1)
    again = world.ask(tokens(9, seed=1), max_tokens=1, prompt_logprobs=0)
    assert again.num_cached_tokens == 0
    for seed in (3, 4):
        world.ask(tokens(9, seed=seed), max_tokens=1)
    assert [bool(world.manager.tree.walk(world.manager.namespace(""), tokens(9, seed=seed), 8)) for seed in (1, 2, 3, 4)] == [
        True, False, True, True,
    ]  # fmt: skip


def test_what_was_used_last_is_evicted_last():
    world = World(make_geometry(num_snapshots=3), interval=64)
    for seed in (1, 2, 3):
        world.ask(tokens(9, seed=seed), max_tokens=1)
    world.ask(tokens(9, seed=1), max_tokens=1)
    world.ask(tokens(9, seed=4), max_tokens=1)
    hits = {
        seed: world.manager.tree.walk(world.manager.namespace(""), tokens(9, seed=seed), 8) != []
        for seed in (1, 2, 3, 4)
    }
    assert hits == {1: True, 2: False, 3: True, 4: True}


def test_a_checkpoint_that_a_step_reads_is_never_evicted():
    world = World(make_geometry(num_snapshots=2), interval=64, budget=64)
    world.ask(tokens(9), max_tokens=1)
    (pinned,) = world.checkpoints
    for seed in range(3):
        world.add(tokens(9) + tokens(9, seed=seed))
    plan = world.scheduler.plan()
    assert [row.resume_snapshot for row in plan.rows] == [pinned.snapshot] * 3
    assert pinned.pins == 3
    world.manager.drop_all_checkpoints()
    assert world.checkpoints == [pinned]
    # One free snapshot, three prompt ends to keep: two had to go without.
    assert len([entry for entry in plan.entries if entry.snapshot]) == 1
    output = world.runner.execute(plan)
    world._check_writes()
    assert all(output.rows_intact)
    assert all(output.pages_intact)
    for progress in world.scheduler.commit(output):
        world._take(progress)
    world.run()


def test_an_evicted_cache_holds_nothing_and_later_answers_are_the_same():
    world = World()
    first = world.ask(tokens(30))
    world.check_empty()
    again = world.ask(tokens(30))
    assert (again.num_cached_tokens, again.outputs) == (0, first.outputs)


def test_pressure_on_snapshots_frees_the_pages_too():
    """No page stays that no checkpoint leads to."""
    world = World(make_geometry(num_snapshots=2), interval=64)
    for seed in range(6):
        world.ask(tokens(20, seed=seed), max_tokens=1)
        assert len(world.checkpoints) <= 2
        paths = {id(node) for c in world.checkpoints for node in c.node.lineage() if node.parent}
        assert {id(node) for node in world.manager.tree.nodes()} == paths
