"""StateManager: the only one that changes ids. It gives sequences their slot and pages, publishes, resumes and evicts.

It decides nothing about time: the scheduler asks, this answers or says that there is no room. It knows no torch; what
the device must be told (page deltas, checkpoint entries) is returned as plan values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from samebit.core.plan import (
    NO_SNAPSHOT,
    SINK_PAGE,
    CheckpointEntry,
    PageDelta,
    PageId,
    RetiredIds,
    SlotId,
    SnapshotId,
    entry_tag,
    owner_tag,
    position_tag,
)
from samebit.state.allocator import IdPool
from samebit.state.evicted import EvictedPrefixes
from samebit.state.layout import PageGroup, StateGeometry
from samebit.state.nodes import Checkpoint, CheckpointKind, HeldPage, Node
from samebit.state.prefix_tree import PrefixTree


@dataclass(slots=True)
class GroupPages:
    """A sequence's pages of one group: entry i is page index i; SINK_PAGE where the window has passed it."""

    pages: list[PageId] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    first: int = 0


@dataclass(slots=True, eq=False)
class SequenceState:
    """All ids of a sequence's device state. Changed by StateManager only.

    `length` is the committed length. `resume` is the checkpoint whose rows the first step reads, pinned until then.
    `fork` is where this prompt leaves a cached path (0: it does not), `published` the deepest boundary published, `trimmed` that of the last `trim`.
    Positions below `reach` have pages in every group.
    """

    slot: SlotId
    owner: int
    namespace: str
    length: int
    groups: list[GroupPages]
    resume: Checkpoint | None
    fork: int
    published: int
    trimmed: int = 0
    reach: int = 0
    deltas: list[PageDelta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint that a step was asked to write; it exists once the device has acknowledged every part."""

    entry: CheckpointEntry
    kind: CheckpointKind


class StateManager:
    """Owner of every id pool and of the prefix tree."""

    def __init__(self, geometry: StateGeometry, *, enable_caching: bool = True, order_seed: int | None = None) -> None:
        self.geometry = geometry
        self.enable_caching = enable_caching
        self.tree = PrefixTree(geometry.page_size)
        self.pages = [
            IdPool(f"pages[{g}]", [PageId(i + 1) for i in range(count)], order_seed=order_seed)
            for g, count in enumerate(geometry.num_pages)
        ]
        snapshots = [SnapshotId(i + 1) for i in range(geometry.num_snapshots)]
        self.snapshots = IdPool("snapshots", snapshots, order_seed=order_seed)
        self.slots = IdPool("slots", [SlotId(i + 1) for i in range(geometry.num_slots)], order_seed=order_seed)
        self._last_step = self._num_owners = self._epoch = 0
        self.evicted = EvictedPrefixes()
        self.num_evicted_tokens = 0

    # Admission and growth

    def namespace(self, salt: str) -> str:
        """Where prefixes of a tenant are cached that were computed with the present weights."""
        return f"{self._epoch}:{salt}"

    def match_length(self, salt: str, tokens: list[int], limit: int) -> int:
        """Tokens of the deepest checkpoint with at most `limit` tokens of `tokens`."""
        return _depth(self.tree.walk(self.namespace(salt), tokens, limit)) * self.geometry.page_size

    def admit(self, salt: str, tokens: list[int], limit: int) -> SequenceState | None:
        """A new sequence at the deepest checkpoint with at most `limit` tokens of `tokens`; None without a free slot."""
        slot = self.slots.take()
        if slot is None:
            return None
        namespace = self.namespace(salt)
        path = self.tree.walk(namespace, tokens, limit) if self.enable_caching else []
        depth = _depth(path)
        checkpoint = path[depth - 1].checkpoint if depth else None
        self._num_owners += 1
        state = SequenceState(
            slot=slot,
            owner=self._num_owners,
            namespace=namespace,
            length=depth * self.geometry.page_size,
            groups=[GroupPages() for _ in self.geometry.layout.groups],
            resume=checkpoint,
            fork=path[-1].num_tokens if len(path) > depth else 0,
            published=depth * self.geometry.page_size,
        )
        if checkpoint is not None:
            self._adopt(state, checkpoint, path[:depth])
        return state

    def grow(self, state: SequenceState, wanted: int, *, whole: int = 0) -> int:
        """Give pages for up to `wanted` tokens after the committed ones, evicting if needed; returns for how many.

        With `whole`, pages of the full-attention group must reach that length too, or nothing is given (0).
        """
        if not whole and state.reach >= state.length + wanted:
            return max(0, wanted)
        if whole and (full := self._full_group()) is not None and not self._extend(state, full, whole, partly=False):
            return 0
        for g in range(len(state.groups)):
            self._extend(state, g, state.length + wanted)
        return max(0, min(wanted, state.reach - state.length))

    def take_deltas(self, state: SequenceState) -> list[PageDelta]:
        """What the device's page tables have yet to learn about this sequence."""
        deltas, state.deltas = state.deltas, []
        return deltas

    # Checkpoints

    def plan_checkpoint(
        self, state: SequenceState, row: int, boundary: int, kind: CheckpointKind, step: int
    ) -> PendingCheckpoint | None:
        """An entry that writes `boundary`'s conv rows in this step; None when no snapshot can be had."""
        snapshot = self.snapshots.take()
        if snapshot is None and self._evict_one():
            snapshot = self.snapshots.take()
        if snapshot is None:
            return None
        tag = entry_tag(step, state.owner, boundary)
        return PendingCheckpoint(CheckpointEntry(row, boundary, snapshot, tag), kind)

    def resume_entry(self, state: SequenceState, row: int) -> CheckpointEntry:
        """The entry that has the pages below a resumed length compared again: the resume is about to happen."""
        if state.resume is not None:
            state.resume.num_hits += 1
        return CheckpointEntry(row, state.length, NO_SNAPSHOT, 0)

    def publish(self, state: SequenceState, tokens: list[int], pending: PendingCheckpoint) -> None:
        """Make an acknowledged checkpoint part of the tree. Where one is already, that one stays (its bits are equal)."""
        boundary = pending.entry.boundary
        state.published = max(state.published, boundary)
        full = self._full_group()
        pages = [] if full is None else self._page_stamps(state, full)
        node, made = self.tree.extend(state.namespace, tokens, boundary, pages)
        for new in made:
            if full is not None and new.page is not None:
                self.pages[full].share(new.page, kept=True)
        if node.checkpoint is not None:
            self.tree.promote(node.checkpoint, pending.kind)
            self.discard(pending)
            return
        windows = {
            g: self._window_pages(state, g, group, boundary)
            for g, group in enumerate(self.geometry.layout.groups)
            if group.window is not None
        }
        for g, held in windows.items():
            for item in held:
                self.pages[g].share(item.page, kept=True)
        snapshot, tag = pending.entry.snapshot, pending.entry.tag
        self.tree.attach(Checkpoint(node, snapshot, tag, pending.kind, windows))

    def discard(self, pending: PendingCheckpoint) -> None:
        """Give back a snapshot that is not published."""
        self.snapshots.drop(pending.entry.snapshot, self._last_step)

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out of the cache, with the span that only it kept."""
        gone = self.tree.remove(checkpoint)
        self.evicted.note(gone[-1] if gone else checkpoint.node)
        full = self._full_group()
        for node in gone:
            if full is not None and node.page is not None:
                self.pages[full].drop(node.page, self._last_step, kept=True)
        for g, held in checkpoint.windows.items():
            for item in held:
                self.pages[g].drop(item.page, self._last_step, kept=True)
        self.snapshots.drop(checkpoint.snapshot, self._last_step)
        self.num_evicted_tokens += len(gone) * self.geometry.page_size

    def drop_damaged(self, checkpoint: Checkpoint) -> None:
        """Take a damaged checkpoint out with all that share its first page, or nothing if that was done.

        Which page is damaged is not known, and a path that stayed would get the next checkpoint attached to that page.
        """
        first_page = [*checkpoint.node.lineage()][-2]
        for other in self.tree.checkpoints:
            if any(node is first_page for node in other.node.lineage()):
                self.drop_checkpoint(other)

    def drop_all_checkpoints(self) -> None:
        """Empty the cache, but for checkpoints that a planned step reads."""
        for checkpoint in self.tree.order.all():
            self.drop_checkpoint(checkpoint)
        self.evicted.clear()

    def begin_epoch(self) -> None:
        """The weights are about to change: what was computed with the old ones is never hit again. No sequence may be left."""
        assert not self.slots.num_used, "a sequence has state of the old weights"
        self.drop_all_checkpoints()
        self._epoch += 1

    # Progress and end

    def launch(self, step: int) -> None:
        """Note that `step` has been planned: ids freed from now on may be touched by it."""
        self._last_step = step

    def retire(self, step: int) -> None:
        """Note that every step up to `step` has ended."""
        for pages in self.pages:
            pages.retire(step)
        self.snapshots.retire(step)
        self.slots.retire(step)

    def take_newly_free(self) -> RetiredIds:
        """Ids that became free since the last call."""
        pages = [(g, page) for g, pool in enumerate(self.pages) for page in pool.take_newly_free()]
        return RetiredIds(pages, self.snapshots.take_newly_free(), self.slots.take_newly_free())

    def unpin(self, state: SequenceState) -> Checkpoint | None:
        """Let go of the checkpoint a sequence resumed from, once its first step has ended; returns it."""
        checkpoint, state.resume = state.resume, None
        if checkpoint is not None:
            checkpoint.pins -= 1
        return checkpoint

    def advance(self, state: SequenceState, length: int, step: int) -> None:
        """Commit `length` tokens: note the stamps of pages that `step` completed."""
        size = self.geometry.page_size
        for index in range(state.length // size, length // size):
            stamp = position_tag(owner_tag(step, state.owner), (index + 1) * size - 1)
            for held in state.groups:
                held.stamps[index] = stamp
        state.length = length

    def trim(self, state: SequenceState) -> None:
        """Let window pages go that no later boundary or query of this sequence needs."""
        size = self.geometry.page_size
        floor = state.length // size * size
        if floor == state.trimmed:
            return
        state.trimmed = floor
        for g, group in enumerate(self.geometry.layout.groups):
            if group.window is None:
                continue
            held = state.groups[g]
            for index in range(held.first, min(group.first_position(floor) // size, len(held.pages))):
                self.pages[g].drop(held.pages[index], self._last_step)
                held.pages[index] = SINK_PAGE
                held.first = index + 1

    def release(self, state: SequenceState) -> None:
        """Give back everything a sequence holds."""
        self.unpin(state)
        for g, held in enumerate(state.groups):
            for page in held.pages[held.first :]:
                self.pages[g].drop(page, self._last_step)
        state.groups = []
        self.slots.drop(state.slot, self._last_step)

    def check(self, live: list[SequenceState], pending: list[PendingCheckpoint]) -> None:
        """Assert that every reference is accounted for: live sequences, checkpoints, nodes and pending entries."""
        for pages in self.pages:
            pages.check()
        self.snapshots.check()
        self.slots.check()
        expected: list[dict[PageId, int]] = [{} for _ in self.pages]

        def count(g: int, page: PageId) -> None:
            expected[g][page] = expected[g].get(page, 0) + 1

        for state in live:
            assert state.reach == self._reach(state), "a page was taken that nobody counts on"
            for g, held in enumerate(state.groups):
                for page in held.pages[held.first :]:
                    count(g, page)
        full = self._full_group()
        for node in self.tree.nodes():
            if full is not None and node.page is not None:
                count(full, node.page)
        for checkpoint in self.tree.checkpoints:
            for g, items in checkpoint.windows.items():
                for item in items:
                    count(g, item.page)
        for g, pool in enumerate(self.pages):
            assert pool.references() == expected[g], f"{pool.name}: references differ from holders"
        snapshots = [c.snapshot for c in self.tree.checkpoints] + [p.entry.snapshot for p in pending]
        assert sorted(self.snapshots.references()) == sorted(snapshots), "snapshots: references differ from holders"
        assert sorted(self.slots.references()) == sorted(s.slot for s in live), "slots: references differ from holders"

    def _full_group(self) -> int | None:
        groups = self.geometry.layout.groups
        return next((g for g, group in enumerate(groups) if group.window is None), None)

    def _adopt(self, state: SequenceState, checkpoint: Checkpoint, path: list[Node]) -> None:
        checkpoint.pins += 1
        self.tree.touch(checkpoint)
        for g, group in enumerate(self.geometry.layout.groups):
            if group.window is None:
                for node in path:
                    assert node.page is not None, "a node of a model with full attention has a page"
                    self.pages[g].share(node.page)
                    self._append(state, g, node.page, node.stamp)
                continue
            held = checkpoint.windows[g]
            state.groups[g].first = held[0].index
            state.groups[g].pages = [SINK_PAGE] * held[0].index
            state.groups[g].stamps = [0] * held[0].index
            for item in held:
                self.pages[g].share(item.page)
                self._append(state, g, item.page, item.stamp)
        state.reach = self._reach(state)

    def _reach(self, state: SequenceState) -> int:
        return min([len(held.pages) for held in state.groups]) * self.geometry.page_size

    def _append(self, state: SequenceState, group: int, page: PageId, stamp: int) -> None:
        held = state.groups[group]
        state.deltas.append(PageDelta(group, state.slot, len(held.pages), page, stamp))
        held.pages.append(page)
        held.stamps.append(stamp)

    def _page_stamps(self, state: SequenceState, group: int) -> list[tuple[PageId, int]]:
        return list(zip(state.groups[group].pages, state.groups[group].stamps, strict=True))

    def _window_pages(self, state: SequenceState, g: int, group: PageGroup, boundary: int) -> list[HeldPage]:
        size, held = self.geometry.page_size, state.groups[g]
        first = min(group.first_position(boundary), boundary - 1) // size
        assert held.first <= first, "a window page was let go before its boundary was published"
        return [HeldPage(i, held.pages[i], held.stamps[i]) for i in range(first, boundary // size)]

    def _extend(self, state: SequenceState, group: int, length: int, *, partly: bool = True) -> bool:
        """Pages of one group up to `length` tokens, evicting for as many as can be had; whether all were found.

        Unless `partly`, nothing is evicted where all cannot be had.
        """
        held, pool = state.groups[group], self.pages[group]
        want = -(-length // self.geometry.page_size)
        missing = want - len(held.pages)
        if missing <= 0:
            return True
        if missing > pool.num_free:
            available = pool.num_free + pool.num_kept_only
            aim = min(missing, available) if partly or missing <= available else 0
            while pool.num_free < aim and not pool.num_quarantined and self._evict_one():
                pass
        while len(held.pages) < want and (page := pool.take()) is not None:
            self._append(state, group, page, 0)
        state.reach = self._reach(state)
        return len(held.pages) >= want

    def _evict_one(self) -> bool:
        """Drop the least valuable checkpoint; ids it frees are usable at once when no step is in flight."""
        started_s = time.perf_counter()
        checkpoint = self.tree.order.first()
        if checkpoint is None:
            return False
        self.drop_checkpoint(checkpoint)
        self.evicted.took(time.perf_counter() - started_s)
        return True


def _depth(path: list[Node]) -> int:
    """Nodes from the first of a path to the deepest that has a checkpoint."""
    return max((place for place, node in enumerate(path, start=1) if node.checkpoint), default=0)
