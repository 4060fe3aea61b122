"""What the prefix tree is made of: nodes, which are pages of tokens, and the checkpoints at them. Knows ids and tokens.

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
