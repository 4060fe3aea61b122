"""The order in which checkpoints go is the one that its rule gives, whatever came, went and was used, and costs no look at all of them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.plan import SnapshotId
from samebit.state import eviction
from samebit.state.nodes import Checkpoint, CheckpointKind
from samebit.state.prefix_tree import PrefixTree

PAGE = 2
KINDS = list(CheckpointKind)


def by_the_rule(tree: PrefixTree) -> list[Checkpoint]:
    """Grid checkpoints but the last two of their path, then the others, both by last use; found by looking at everything."""

    def grid_below(checkpoint: Checkpoint) -> int:
        paths = [
            [node.checkpoint for node in other.node.lineage() if node.checkpoint is not None]
            for other in tree.checkpoints
        ]
        below = [path[: path.index(checkpoint)] for path in paths if checkpoint in path]
        return max(sum(other.kind is CheckpointKind.GRID for other in path) for path in below)

    def value(checkpoint: Checkpoint) -> tuple[bool, int]:
        return checkpoint.kind is not CheckpointKind.GRID or grid_below(checkpoint) < 2, checkpoint.last_used

    return sorted((c for c in tree.checkpoints if not c.pins), key=value)


def put(tree: PrefixTree, tokens: list[int], kind: CheckpointKind, snapshot: int, namespace: str = "") -> None:
    """A checkpoint at the end of `tokens`, or a better kind for the one that is there."""
    node, _ = tree.extend(namespace, tokens, len(tokens), [])
    if node.checkpoint is None:
        tree.attach(Checkpoint(node, SnapshotId(snapshot), 0, kind, {}))
    else:
        tree.promote(node.checkpoint, kind)


def some_path(rng: random.Random) -> list[int]:
    """Pages of one of few long texts, which part from one another here and there."""
    pages = [0] * rng.randint(1, 7)
    pages[rng.randrange(len(pages))] = rng.choice([0, 0, 1])
    return [token for page in pages for token in (page, 0)]


@given(st.integers(0, 2**32))
def test_the_order_is_the_rules_after_anything(seed):
    rng, tree = random.Random(seed), PrefixTree(PAGE)
    for _ in range(60):
        op = rng.choices(["put", "evict", "drop", "touch", "pin", "unpin"], [10, 3, 1, 2, 1, 2])[0]
        if op == "put":
            # Ids of snapshots come again.
            free = min(set(range(1, 99)) - {c.snapshot for c in tree.checkpoints})
            kind = rng.choice([CheckpointKind.GRID] * 6 + KINDS)
            put(tree, some_path(rng), kind, free, rng.choice("aab"))
        elif tree.checkpoints:
            picked = rng.choice(tree.checkpoints)
            if op == "evict" and (first := tree.order.first()) is not None:
                tree.remove(first)
            elif op == "drop":
                tree.remove(picked)
            elif op == "touch":
                tree.touch(picked)
            elif op != "evict":
                picked.pins = int(op == "pin")
        wanted = by_the_rule(tree)
        assert tree.order.all() == wanted
        assert tree.order.first() is (wanted[0] if wanted else None)


@pytest.fixture
def looks(monkeypatch):
    """Grows with each look at a checkpoint's value or counts."""
    seen = []
    for name in ("value", "num_grid_below"):
        look = getattr(eviction._Place, name).fget
        monkeypatch.setattr(eviction._Place, name, property(lambda place, look=look: seen.append(1) or look(place)))
    return seen


def test_a_full_cache_finds_what_goes_without_looking_at_everything(looks):
    tree, num_kept, num_more = PrefixTree(PAGE), 2000, 500
    # All begin alike; a path is a few grid checkpoints and an end.
    kinds = [CheckpointKind.GRID] * 3 + [CheckpointKind.PROMPT_END]

    def add(number, snapshots):
        for depth, kind in enumerate(kinds, start=1):
            put(tree, [1, 1, *([number, depth] * depth)], kind, next(snapshots))

    numbers = itertools.count(1)
    put(tree, [1, 1], CheckpointKind.FORK, next(numbers))
    for number in range(num_kept):
        add(number, numbers)
    looks.clear()
    for number in range(num_kept, num_kept + num_more):
        gone = [tree.order.first()]
        tree.remove(gone[0])
        for _ in kinds[1:]:
            gone.append(tree.order.first())
            tree.remove(gone[-1])
        add(number, iter([one.snapshot for one in gone]))
    assert len(looks) < 60 * len(kinds) * num_more


def test_a_long_path_costs_a_new_checkpoint_no_look_at_all_of_it(looks):
    tree, length = PrefixTree(PAGE), 1000
    for number in range(1, length + 1):
        put(tree, [0] * (PAGE * number), CheckpointKind.GRID, number)
    assert len(looks) < 30 * length
