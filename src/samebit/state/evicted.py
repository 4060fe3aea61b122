"""Remembers which prefixes were cached once, so that a miss can be told from a first time. Knows tokens, no ids."""

from __future__ import annotations

from collections import OrderedDict

_MAX_REMEMBERED = 1 << 16


class EvictedPrefixes:
    """Owner of the first pages that the cache let go of, the most recent ones of them. It serves statistics only."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: tuple[str, tuple[int, ...]]) -> bool:
        return hash(key) in self._seen

    def note(self, namespace: str, page: tuple[int, ...]) -> None:
        """The path of `namespace` that begins with the tokens of `page` is gone."""
        key = hash((namespace, page))
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """What was cached before does not count any more."""
        self._seen.clear()
