"""The order in which checkpoints go is the one that its rule gives, whatever came, went and was used, and costs no look at all of them."""

from __future__ import annotations

import random

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


def test_a_full_cache_finds_what_goes_without_looking_at_everything(monkeypatch):
    looks = []
    value = eviction._Place.value.fget
    monkeypatch.setattr(eviction._Place, "value", property(lambda place: looks.append(1) or value(place)))
    tree, num_kept, num_more = PrefixTree(PAGE), 2000, 500
    for number in range(num_kept):
        put(tree, [1, 1, number, 0, number, 1], CheckpointKind.PROMPT_END, number + 1)
    looks.clear()
    for number in range(num_kept, num_kept + num_more):
        gone = tree.order.first()
        tree.remove(gone)
        put(tree, [1, 1, number, 0, number, 1], CheckpointKind.PROMPT_END, gone.snapshot)
    assert len(looks) < 20 * num_more
