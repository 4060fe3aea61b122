"""Sentences with choices, drawn in one of their many forms. Knows a random generator; knows no dialogue.

In "[We|They] met <who> in <city>." a bracket holds alternatives and a name in angles stands for a list. Alternatives may hold names,
and lists may hold brackets; brackets do not nest. Places in braces ({k}, {v}) are left as they are.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

_CHOICE = re.compile(r"\[([^\[\]]*)\]|<(\w+)>")
_BEGIN = re.compile(r"(?:^|(?<=[.?!]\s))[a-z]")
# A text is its parts one after another; a part is a text as it stands or a choice among sequences.
_Sequence = tuple["str | tuple[_Sequence, ...]", ...]


class Forms:
    """Texts from `templates`, each as likely as another whatever its choices. `lists`: what the names in angles stand for;
    those of `words` do not count as forms of their own.
    """

    def __init__(
        self,
        templates: Iterable[str],
        *,
        lists: Mapping[str, Sequence[str]] | None = None,
        words: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._lists = {**(words or {}), **(lists or {})}
        self._known: dict[str, tuple[_Sequence, ...]] = {}
        self._words = {self._list(name) for name in words or {}}
        self._templates = tuple(self._compiled(text) for text in templates)

    def draw(self, rng: random.Random) -> str:
        """One form of one template."""
        return _drawn(self._templates[int(rng.random() * len(self._templates))], rng.random)

    @property
    def count(self) -> int:
        """How many forms there are."""
        return sum(self._count(sequence) for sequence in set(self._templates))

    def _compiled(self, text: str) -> _Sequence:
        parts: list[str | tuple[_Sequence, ...]] = []
        end = 0
        for found in _CHOICE.finditer(text):
            choices, name = found.groups()
            parts += [text[end : found.start()]]
            parts += [self._list(name) if name else tuple(self._compiled(choice) for choice in choices.split("|"))]
            end = found.end()
        return tuple(part for part in (*parts, text[end:]) if part)

    def _list(self, name: str) -> tuple[_Sequence, ...]:
        if name not in self._known:
            self._known[name] = tuple(self._compiled(text) for text in self._lists[name])
        return self._known[name]

    def _count(self, sequence: _Sequence) -> int:
        choices = [part for part in sequence if not isinstance(part, str) and part not in self._words]
        return math.prod(sum(self._count(choice) for choice in set(part)) for part in choices)


def capital(text: str) -> str:
    """The text with a capital letter at the beginning of each sentence. Values are filled in later: they stay as they are."""
    return _BEGIN.sub(lambda found: found[0].upper(), text)


def _drawn(sequence: _Sequence, draw: Callable[[], float]) -> str:
    return "".join(
        [part if isinstance(part, str) else _drawn(part[int(draw() * len(part))], draw) for part in sequence]
    )
