"""StateManager on its own: leaks are seen, ids wait for steps in flight, paths and windows are shared exactly."""

from __future__ import annotations

import pytest

from samebit.core.plan import SINK_PAGE
from samebit.state.manager import SequenceState, StateManager
from samebit.state.nodes import CheckpointKind
from samebit.state.prefix_tree import PrefixTree
from tests.fakes import make_geometry

FULL, WINDOW = 1, 0


def make_manager(**sizes) -> StateManager:
    return StateManager(make_geometry(windows=(6, None), **{"num_pages": (12, 12), **sizes}))


def run_step(
    manager: StateManager, state: SequenceState, tokens: list[int], step: int, boundaries: tuple[int, ...] = ()
) -> None:
    """All of `tokens` in one step, published at `boundaries`."""
    length = len(tokens)
    assert manager.grow(state, length - state.length) == length - state.length
    pending = [manager.plan_checkpoint(state, 0, b, CheckpointKind.GRID, step) for b in boundaries]
    manager.launch(step)
    manager.retire(step)
    manager.unpin(state)
    manager.advance(state, length, step)
    for item in pending:
        manager.publish(state, tokens, item)
    manager.trim(state)


def admit(manager: StateManager, tokens: list[int], namespace: str = "") -> SequenceState:
    state = manager.admit(namespace, tokens, len(tokens) - 1)
    assert state is not None
    return state


@pytest.mark.parametrize("kind", ["page", "window page", "snapshot", "slot", "shared page"])
def test_one_leaked_id_fails_the_check(kind):
    manager, tokens = make_manager(), list(range(16))
    state = admit(manager, tokens)
    run_step(manager, state, tokens, 1, (8, 16))
    manager.check([state], [])
    match kind:
        case "page":
            manager.pages[FULL].take()
        case "window page":
            manager.pages[WINDOW].take()
        case "snapshot":
            manager.snapshots.take()
        case "slot":
            manager.slots.take()
        case "shared page":
            manager.pages[FULL].share(state.groups[FULL].pages[0])
    with pytest.raises(AssertionError, match="differ from holders"):
        manager.check([state], [])


def test_a_sequence_left_out_fails_the_check():
    manager = make_manager()
    state = admit(manager, [1, 2, 3])
    manager.check([state], [])
    with pytest.raises(AssertionError, match="slots"):
        manager.check([], [])
    manager.release(state)
    manager.check([], [])


def test_what_a_step_in_flight_may_touch_is_not_given_out():
    manager, tokens = make_manager(num_slots=1, num_pages=(4, 4)), list(range(16))
    state = admit(manager, tokens)
    assert manager.grow(state, 16) == 16
    manager.launch(1)
    manager.release(state)
    assert manager.admit("", tokens, 15) is None
    assert [pool.num_quarantined for pool in manager.pages] == [4, 4]
    assert manager.take_newly_free().pages == []
    manager.check([], [])
    manager.retire(1)
    freed = manager.take_newly_free()
    assert len(freed.pages) == 8
    assert len(freed.slots) == 1
    assert manager.admit("", tokens, 15) is not None


def test_a_trimmed_window_page_waits_too():
    manager, tokens = make_manager(), list(range(40))
    state = admit(manager, tokens)
    run_step(manager, state, tokens[:16], 1)
    held = state.groups[WINDOW].pages[state.groups[WINDOW].first]
    assert manager.grow(state, 12) == 12
    manager.launch(2)
    manager.advance(state, 28, 2)
    manager.trim(state)
    assert held not in state.groups[WINDOW].pages
    assert manager.pages[WINDOW].num_quarantined > 0
    assert held not in {manager.pages[WINDOW].take() for _ in range(manager.pages[WINDOW].num_free)}


@pytest.mark.parametrize("length", range(1, 40))
def test_a_live_window_holds_what_queries_and_its_page_floor_need(length):
    manager, tokens = make_manager(), list(range(length))
    state = admit(manager, tokens)
    run_step(manager, state, tokens, 1)
    held = state.groups[WINDOW]
    first = max(0, length // 4 * 4 - 6 + 1) // 4
    assert held.first == first
    assert all(page == SINK_PAGE for page in held.pages[:first])
    assert SINK_PAGE not in held.pages[first:]


def test_a_resumed_sequence_shares_path_and_window_and_copies_nothing():
    manager, tokens = make_manager(), list(range(17))
    first = admit(manager, tokens)
    run_step(manager, first, tokens, 1, (8, 16))
    manager.release(first)
    manager.take_newly_free()
    before = [dict(pool.references()) for pool in manager.pages]
    second = admit(manager, tokens)
    assert (second.length, second.published, second.fork) == (16, 16, 0)
    assert second.groups[FULL].pages == [*before[FULL]]
    # State(16) of a window of 6 is positions 11 .. 15: pages 2 and 3.
    assert second.groups[WINDOW].first == 2
    assert second.groups[WINDOW].pages[:2] == [SINK_PAGE] * 2
    deltas = manager.take_deltas(second)
    assert [(d.group, d.index) for d in deltas] == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert all(d.stamp and d.slot == second.slot for d in deltas)
    assert manager.take_deltas(second) == []
    manager.release(second)
    assert [pool.references() for pool in manager.pages] == before


def test_a_newcomer_keeps_its_duplicates_and_the_path_keeps_its_pages():
    manager, tokens = make_manager(), list(range(9))
    first, second = admit(manager, tokens), admit(manager, tokens)
    run_step(manager, first, tokens, 1, (8,))
    (checkpoint,) = manager.tree.checkpoints
    path = [node.page for node in manager.tree.nodes()]
    run_step(manager, second, tokens, 2, (8,))
    assert manager.tree.checkpoints == [checkpoint]
    assert [node.page for node in manager.tree.nodes()] == path
    assert not set(second.groups[FULL].pages) & set(first.groups[FULL].pages)
    manager.check([first, second], [])


@pytest.mark.parametrize(
    ("tokens", "fork"),
    [([*range(14), 90, 91, 92, 93, 94], 12), ([*range(13)], 12), ([*range(9)], 0), ([*range(21)], 0), ([90] * 9, 0)],
)
def test_a_fork_is_where_a_prompt_leaves_a_path_that_goes_on(tokens, fork):
    manager = make_manager()
    first = admit(manager, list(range(17)))
    run_step(manager, first, list(range(17)), 1, (8, 16))
    assert admit(manager, tokens).fork == fork


def test_a_pinned_checkpoint_survives_every_eviction():
    manager, tokens = make_manager(num_pages=(12, 8), num_snapshots=2), list(range(17))
    first = admit(manager, tokens)
    run_step(manager, first, tokens, 1, (8, 16))
    manager.release(first)
    reader = admit(manager, [*tokens, 5])
    other = admit(manager, [77] * 40)
    # Four pages are free; the path of the other checkpoint is the pinned one's.
    assert manager.grow(other, 40, whole=40) == 0
    assert reader.resume in manager.tree.checkpoints
    manager.drop_all_checkpoints()
    assert manager.tree.checkpoints == [reader.resume]
    manager.check([reader, other], [])


def test_eviction_gives_up_nothing_when_it_cannot_help():
    manager, tokens = make_manager(num_pages=(12, 6)), list(range(9))
    first = admit(manager, tokens)
    run_step(manager, first, tokens, 1, (8,))
    manager.release(first)
    # Of six pages two are cached, and two are somebody's, who has not published.
    holder = admit(manager, [55] * 8)
    assert manager.grow(holder, 8) == 8
    other = admit(manager, [77] * 60)
    for wanted in (60, 20):
        assert manager.grow(other, wanted, whole=wanted) == 0
        assert [c.boundary for c in manager.tree.checkpoints] == [8]
    assert manager.grow(other, 16, whole=16) == 16
    assert not manager.tree.checkpoints


def test_a_tree_finds_what_was_inserted_under_its_namespace_only():
    tree = PrefixTree(4)
    tokens = list(range(12))
    node, made = tree.extend("a", tokens, 8, [(1, 11), (2, 12), (3, 13)])
    assert [(n.page, n.stamp, n.num_tokens) for n in made] == [(1, 11, 4), (2, 12, 8)]
    assert tree.walk("a", tokens, 12) == made
    assert tree.walk("a", tokens, 7) == made[:1]
    assert tree.walk("b", tokens, 12) == []
    assert tree.walk("a", [9, *tokens[1:]], 12) == []
    again, none = tree.extend("a", tokens, 8, [(5, 0), (6, 0), (7, 0)])
    assert (again, none) == (node, [])
    for boundary in (0, 6):
        with pytest.raises(AssertionError, match="page"):
            tree.extend("a", tokens, boundary, [])
