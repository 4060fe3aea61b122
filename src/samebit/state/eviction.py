"""Which checkpoint is let go first: grid ones but the last two of their path, then by last use. Knows checkpoints, no page and no sequence.

A change costs what lies between a checkpoint and the next ones above and below it, as no more is counted than is kept, and the first is
found without looking at the others: a cache is full most of the time, and then every few steps something must go.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from samebit.core.plan import SnapshotId
from samebit.state.nodes import Checkpoint, CheckpointKind, Node

# Grid checkpoints of a path that are kept as long as others are.
_KEPT_OF_A_PATH = 2
# Entries of the heap beside four for each checkpoint, before those that say nothing any more are thrown away.
_SPARE_ENTRIES = 64

Value = tuple[bool, int]


@dataclass(slots=True, eq=False)
class _Place:
    """A checkpoint, and the next ones `above` and `below` it.

    `told`: how many grid checkpoints a path has from here on, up to _KEPT_OF_A_PATH, as `above` knows; `counts[n]`: how many below told n.
    """

    checkpoint: Checkpoint
    above: _Place | None = None
    below: set[_Place] = field(default_factory=set)
    counts: list[int] = field(default_factory=lambda: [0] * (_KEPT_OF_A_PATH + 1))
    told: int = 0

    @property
    def num_grid_below(self) -> int:
        """The most grid checkpoints on one path below it, up to _KEPT_OF_A_PATH."""
        return max((number for number, count in enumerate(self.counts) if count), default=0)

    @property
    def num_grid(self) -> int:
        """The most on one path from here on, likewise."""
        return min(_KEPT_OF_A_PATH, self.num_grid_below + (self.checkpoint.kind is CheckpointKind.GRID))

    @property
    def value(self) -> Value:
        """The lower, the sooner it goes."""
        is_spare = self.checkpoint.kind is CheckpointKind.GRID and self.num_grid_below >= _KEPT_OF_A_PATH
        return not is_spare, self.checkpoint.last_used


class EvictionOrder:
    """Owner of the order in which checkpoints of a tree go; told of each that comes, changes or goes."""

    def __init__(self) -> None:
        self._places: dict[SnapshotId, _Place] = {}
        # By value; what is true no more is skipped when it comes up.
        self._heap: list[tuple[bool, int, SnapshotId]] = []

    def add(self, checkpoint: Checkpoint) -> None:
        """Take in a checkpoint that was put at its node."""
        place = self._places[checkpoint.snapshot] = _Place(checkpoint)
        for other in _next_below(checkpoint.node):
            self._hang(self._places[other.snapshot], place)
        above = next((node.checkpoint for node in _above(checkpoint.node) if node.checkpoint), None)
        self._hang(place, None if above is None else self._places[above.snapshot])
        self._push(place)
        self._tell(place)

    def remove(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint."""
        place = self._places.pop(checkpoint.snapshot)
        for other in list(place.below):
            self._hang(other, place.above)
        self._hang(place, None)

    def changed(self, checkpoint: Checkpoint) -> None:
        """Take in that a checkpoint was used, or is of another kind."""
        place = self._places[checkpoint.snapshot]
        self._push(place)
        self._tell(place)

    def first(self) -> Checkpoint | None:
        """The checkpoint of least value that nobody reads."""
        in_use, found = [], None
        while self._heap and found is None:
            *value, snapshot = self._heap[0]
            place = self._places.get(snapshot)
            if place is None or place.value != tuple(value):
                heapq.heappop(self._heap)
            elif place.checkpoint.pins:
                in_use.append(heapq.heappop(self._heap))
            else:
                found = place.checkpoint
        for entry in in_use:
            heapq.heappush(self._heap, entry)
        return found

    def all(self) -> list[Checkpoint]:
        """All that nobody reads, least valuable first."""
        unused = [place for place in self._places.values() if not place.checkpoint.pins]
        return [place.checkpoint for place in sorted(unused, key=lambda place: place.value)]

    def _hang(self, place: _Place, above: _Place | None) -> None:
        """Put a place right below another, or below none. What is new to the other is told by whoever calls."""
        before, place.above = place.above, above
        if before is not None:
            before.below.discard(place)
            before.counts[place.told] -= 1
            self._settle(before)
        if above is not None:
            above.below.add(place)
            above.counts[place.told] += 1

    def _settle(self, place: _Place) -> None:
        """What lies below a place has changed: it may have another value, and something else to tell."""
        self._push(place)
        self._tell(place)

    def _tell(self, place: _Place) -> None:
        """Let those above know how many grid checkpoints a path has from `place` on."""
        before, place.told = place.told, place.num_grid
        if place.above is not None and place.told != before:
            place.above.counts[before] -= 1
            place.above.counts[place.told] += 1
            self._settle(place.above)

    def _push(self, place: _Place) -> None:
        heapq.heappush(self._heap, (*place.value, place.checkpoint.snapshot))
        if len(self._heap) > _SPARE_ENTRIES + 4 * len(self._places):
            self._heap = [(*place.value, snapshot) for snapshot, place in self._places.items()]
            heapq.heapify(self._heap)


def _above(node: Node) -> Iterator[Node]:
    """The nodes above one, the next first."""
    lineage = node.lineage()
    next(lineage)
    return lineage


def _next_below(node: Node) -> Iterator[Checkpoint]:
    """The checkpoints below a node that have no other in between."""
    pending = list(node.children.values())
    while pending:
        found = pending.pop()
        if found.checkpoint is not None:
            yield found.checkpoint
        else:
            pending.extend(found.children.values())
