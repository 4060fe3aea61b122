"""The prefix tree: token pages that lead to checkpoints. Knows ids and tokens, no device and no scheduler.

One node is one whole page of tokens under its parent, and owns one reference to the page of the full-attention group.
A checkpoint sits at a node and owns all that a resume needs beyond the path: its window pages and its snapshot of conv
rows. A node lives as long as a checkpoint lies at or below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from samebit.core.plan import PageId, SnapshotId


class CheckpointKind(IntEnum):
    """Why a checkpoint was made; grid checkpoints are the first to go."""

    GRID = 0
    PROMPT_END = 1
    FORK = 2
    RESPONSE_END = 3
    PREEMPTED = 4


@dataclass(frozen=True, slots=True)
class HeldPage:
    """A page at an absolute index of a page table, and the stamp its last row carries."""

    index: int
    page: PageId
    stamp: int


@dataclass(slots=True, eq=False)
class Checkpoint:
    """State(boundary): conv rows in `snapshot` tagged `tag`, window pages per group, full pages on the path to `node`."""

    node: Node
    snapshot: SnapshotId
    tag: int
    kind: CheckpointKind
    windows: dict[int, list[HeldPage]]
    last_used: int = 0
    pins: int = 0
    num_hits: int = 0

    @property
    def boundary(self) -> int:
        """Tokens whose state it holds: always the length of its key."""
        return self.node.num_tokens


@dataclass(slots=True, eq=False, weakref_slot=True)
class Node:
    """One page of tokens; `page` is None where the model has no full-attention group. Only a root has a `namespace`."""

    parent: Node | None
    key: tuple[int, ...]
    page: PageId | None = None
    stamp: int = 0
    num_tokens: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    namespace: str = ""

    @property
    def is_root(self) -> bool:
        """Whether it stands for no tokens."""
        return self.parent is None

    @property
    def is_bare(self) -> bool:
        """Whether nothing at or below this node is worth its page."""
        return self.checkpoint is None and not self.children

    def lineage(self) -> Iterator[Node]:
        """This node and those above it."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixTree:
    """Owner of nodes and checkpoints, one root a namespace. Reports the ids it lets go; frees none itself."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._checkpoints: dict[SnapshotId, Checkpoint] = {}
        self._clock = 0

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, in the order of publication."""
        return list(self._checkpoints.values())

    def has(self, namespace: str) -> bool:
        """Whether anything is cached in `namespace`."""
        return namespace in self._roots

    def walk(self, namespace: str, tokens: list[int], limit: int) -> list[Node]:
        """Nodes along `tokens`, at most `limit` tokens deep."""
        node, path = self._roots.get(namespace), []
        for start in range(0, limit - self._page_size + 1, self._page_size):
            if node is None:
                break
            node = node.children.get(tuple(tokens[start : start + self._page_size]))
            if node is not None:
                path.append(node)
        return path

    def touch(self, checkpoint: Checkpoint) -> None:
        """Mark as just used."""
        self._clock += 1
        checkpoint.last_used = self._clock

    def extend(
        self, namespace: str, tokens: list[int], boundary: int, pages: list[tuple[PageId, int]]
    ) -> tuple[Node, list[Node]]:
        """The node at `boundary`, made with the caller's pages where the path is new; returns it and the new nodes.

        `pages` are (page, stamp) of the full-attention group by page index, empty where there is no such group.
        """
        assert boundary > 0, "a checkpoint holds at least one page"
        assert boundary % self._page_size == 0, "a boundary is a multiple of the page size"
        node = self._roots.setdefault(namespace, Node(parent=None, key=(), namespace=namespace))
        made: list[Node] = []
        for index in range(boundary // self._page_size):
            key = tuple(tokens[index * self._page_size : (index + 1) * self._page_size])
            child = node.children.get(key)
            if child is None:
                page, stamp = pages[index] if pages else (None, 0)
                child = Node(node, key, page, stamp, node.num_tokens + self._page_size)
                node.children[key] = child
                made.append(child)
            node = child
        return node, made

    def attach(self, checkpoint: Checkpoint) -> None:
        """Put a checkpoint at its node, which must have none."""
        assert checkpoint.node.checkpoint is None, "a published checkpoint is never replaced"
        checkpoint.node.checkpoint = checkpoint
        self._checkpoints[checkpoint.snapshot] = checkpoint
        self.touch(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> list[Node]:
        """Take a checkpoint out, and the nodes that no checkpoint needs any more; returns those nodes."""
        del self._checkpoints[checkpoint.snapshot]
        node = checkpoint.node
        node.checkpoint = None
        gone: list[Node] = []
        while node.parent is not None and node.is_bare:
            del node.parent.children[node.key]
            gone.append(node)
            node = node.parent
        if node.parent is None and node.is_bare:
            self._roots = {name: root for name, root in self._roots.items() if root is not node}
        return gone

    def eviction_order(self) -> Iterator[Checkpoint]:
        """Unpinned checkpoints, least valuable first: grid ones but the last two of their path, then by last use."""
        below = self._grid_checkpoints_below()

        def value(checkpoint: Checkpoint) -> tuple[bool, int]:
            spare = checkpoint.kind is CheckpointKind.GRID and below[checkpoint.snapshot] >= 2
            return (not spare, checkpoint.last_used)

        return iter(sorted((c for c in self._checkpoints.values() if not c.pins), key=value))

    def roots(self) -> list[Node]:
        """The root of each namespace."""
        return list(self._roots.values())

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node

    def _grid_checkpoints_below(self) -> dict[SnapshotId, int]:
        """For each checkpoint, the most grid checkpoints on one path below it."""
        below = dict.fromkeys(self._checkpoints, 0)
        for checkpoint in sorted(self._checkpoints.values(), key=lambda c: -c.boundary):
            node = checkpoint.node.parent
            while node is not None and node.checkpoint is None:
                node = node.parent
            above = node.checkpoint.snapshot if node and node.checkpoint else None
            if above is not None:
                count = below[checkpoint.snapshot] + (checkpoint.kind is CheckpointKind.GRID)
                below[above] = max(below[above], count)
        return below
