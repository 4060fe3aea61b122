"""Ids of pages, snapshots and slots: free lists with quarantine and reference counts. Knows no memory and no request.

A freed id is quarantined until the last step that may touch it has retired. Id 0 of every kind is reserved and never
given out.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Generic, TypeVar

from samebit.core.plan import PageId, SlotId, SnapshotId

Id = TypeVar("Id", PageId, SnapshotId, SlotId)


class IdPool(Generic[Id]):
    """Ids 1 .. count with a reference count each; owner of their free list. `order_seed` shuffles it (tests)."""

    def __init__(self, name: str, ids: list[Id], *, order_seed: int | None = None) -> None:
        self.name = name
        self.total = len(ids)
        self._free: deque[Id] = deque(ids)
        self._quarantine: deque[tuple[int, Id]] = deque()
        self._references: dict[Id, int] = {}
        # Of these, those that are not the cache's.
        self._others: dict[Id, int] = {}
        self._newly_free: list[Id] = []
        self._retired = 0
        self._order = random.Random(order_seed) if order_seed is not None else None
        if self._order is not None:
            self._order.shuffle(self._free)

    @property
    def num_free(self) -> int:
        """Ids that can be given out now."""
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Freed ids that a step in flight may still touch."""
        return len(self._quarantine)

    @property
    def num_used(self) -> int:
        """Ids with at least one reference."""
        return len(self._references)

    @property
    def num_kept_only(self) -> int:
        """Ids that nobody but the cache refers to."""
        return len(self._references) - len(self._others)

    def take(self) -> Id | None:
        """An id with one reference, or None when none is free."""
        if not self._free:
            return None
        taken = self._free.popleft()
        self._references[taken] = self._others[taken] = 1
        return taken

    def share(self, taken: Id, *, kept: bool = False) -> None:
        """Add a reference, which is the cache's if `kept`."""
        self._references[taken] += 1
        if not kept:
            self._others[taken] = self._others.get(taken, 0) + 1

    def drop(self, taken: Id, last_step: int, *, kept: bool = False) -> None:
        """Remove a reference, the cache's if `kept`; without any left, the id is free once `last_step` has retired."""
        left = self._references[taken] - 1
        others = self._others.get(taken, 0) - (not kept)
        assert 0 <= others <= left, f"{self.name}: {taken} has no such reference"
        if others:
            self._others[taken] = others
        else:
            self._others.pop(taken, None)
        if left:
            self._references[taken] = left
            return
        del self._references[taken]
        self._quarantine.append((last_step, taken))
        self._free_retired()

    def retire(self, step: int) -> None:
        """Free the ids that nothing after `step` touches, now and from now on."""
        self._retired = step
        self._free_retired()

    def take_newly_free(self) -> list[Id]:
        """Ids freed since the last call; their memory may be overwritten before the next step."""
        freed, self._newly_free = self._newly_free, []
        return freed

    def _free_retired(self) -> None:
        while self._quarantine and self._quarantine[0][0] <= self._retired:
            freed = self._quarantine.popleft()[1]
            self._newly_free.append(freed)
            if self._order is None:
                self._free.append(freed)
            else:
                self._free.insert(self._order.randint(0, len(self._free)), freed)

    def references(self) -> dict[Id, int]:
        """A copy of the reference counts."""
        return dict(self._references)

    def check(self) -> None:
        """Assert that free, quarantined and used ids are disjoint and make up the whole pool."""
        free, held = set(self._free), {taken for _, taken in self._quarantine}
        used = set(self._references)
        assert len(free) == len(self._free), f"{self.name}: an id is in the free list twice"
        assert len(free | held | used) == len(free) + len(held) + len(used), f"{self.name}: an id has two owners"
        assert len(free) + len(self._quarantine) + len(used) == self.total, f"{self.name}: an id was lost"
        assert 0 not in free | held | used, f"{self.name}: a reserved id was given out"
        assert self._others.keys() <= used, f"{self.name}: a free id has an owner"
