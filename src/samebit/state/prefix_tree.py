"""The prefix tree: token pages that lead to checkpoints. Knows ids and tokens, no device and no scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from samebit.core.plan import PageId, SnapshotId
from samebit.state.eviction import EvictionOrder
from samebit.state.nodes import Checkpoint, CheckpointKind, Node


class PrefixTree:
    """Owner of nodes and checkpoints, one root a namespace. Reports the ids it lets go; frees none itself.

    `order`: in which its checkpoints go.
    """

    def __init__(self, page_size: int) -> None:
        self.order = EvictionOrder()
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
        self._use(checkpoint)
        self.order.changed(checkpoint)

    def promote(self, checkpoint: Checkpoint, kind: CheckpointKind) -> None:
        """Note that a checkpoint is of this kind, too: it keeps the better one. It was just used."""
        checkpoint.kind = max(checkpoint.kind, kind)
        self.touch(checkpoint)

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
        self._use(checkpoint)
        self.order.add(checkpoint)

    def remove(self, checkpoint: Checkpoint) -> list[Node]:
        """Take a checkpoint out, and the nodes that no checkpoint needs any more; returns those nodes."""
        del self._checkpoints[checkpoint.snapshot]
        self.order.remove(checkpoint)
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

    def _use(self, checkpoint: Checkpoint) -> None:
        self._clock += 1
        checkpoint.last_used = self._clock
