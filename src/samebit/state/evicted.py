"""Remembers what the cache let go of, so that a miss can be told from a first time, and how long that took. Statistics only."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from samebit.state.nodes import Node

_MAX_REMEMBERED = 1 << 16
_MAX_TIMES = 1 << 10


class EvictedPrefixes:
    """Owner of the paths that led to checkpoints which are gone, the most recent ones of them, each known by a hash.

    Of a path that went with its checkpoint only what nothing else shares is gone: it is known up to the first such page.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._times_s: deque[float] = deque(maxlen=_MAX_TIMES)

    def depths(self, namespace: str, pages: Iterable[tuple[int, ...]]) -> list[int]:
        """How many of `pages`, from the first on, are such a path; ascending."""
        return [depth for depth, key in enumerate(_keys(namespace, pages), start=1) if key in self._seen]

    def note(self, node: Node) -> None:
        """The checkpoint at `node` is gone, or all that was at and below it."""
        *nodes, root = node.lineage()
        *_, key = _keys(root.namespace, (node.key for node in reversed(nodes)))
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """What was cached before does not count any more."""
        self._seen.clear()

    def took(self, time_s: float) -> None:
        """Room was made in so much time."""
        self._times_s.append(time_s)

    def take_times(self) -> list[float]:
        """Seconds of each eviction since the last call, of so many as are kept."""
        times = [*self._times_s]
        self._times_s.clear()
        return times


def _keys(namespace: str, pages: Iterable[tuple[int, ...]]) -> Iterator[int]:
    """A hash of the first page, of the first two, and so on."""
    key = hash(namespace)
    for page in pages:
        key = hash((key, page))
        yield key
