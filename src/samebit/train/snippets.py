"""Functions cut in two: the head that a user shows, and the rest up to the function's end. Knows token streams and a tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from samebit.train.tokens import DOCUMENT_START, SPECIAL_TOKENS, TokenStream

_WINDOW = 320  # tokens behind `def` in which the function must end
_SHORTEST, _LONGEST = 20, 180  # tokens of the rest
_TRIES = 40


@dataclass(frozen=True, slots=True)
class Snippet:
    """A function without its indentation, cut between two lines; neither part begins or ends with a line break."""

    head: str
    rest: str


class Snippets:
    """Draws functions from a stream."""

    def __init__(self, tokenizer: Tokenizer, code: TokenStream) -> None:
        self._tokenizer, self._code = tokenizer, code
        words = [tokenizer.token_to_id(text) for text in ("def", "Ġdef")]
        self._starts: NDArray[np.int32] = np.flatnonzero(np.isin(code, [i for i in words if i is not None])).astype(
            np.int32
        )

    def draw(self, rng: random.Random) -> Snippet | None:
        """A function whose rest has 20 to 180 tokens; None if none is found soon."""
        for _ in range(_TRIES if len(self._starts) else 0):
            lines = self._function(int(self._starts[rng.randrange(len(self._starts))]))
            places = [i for i in range(1, len(lines)) if lines[i].strip()]
            if not places:
                continue
            place = rng.choice(places)
            head, rest = "\n".join(lines[:place]).rstrip("\n"), "\n".join(lines[place:])
            if _SHORTEST <= len(self._tokenizer.encode(rest, add_special_tokens=False).ids) <= _LONGEST:
                return Snippet(head, rest)
        return None

    def _function(self, start: int) -> list[str]:
        """The lines of the function that begins with the `def` at `start`; none if its end or its indentation is not seen."""
        before = self._text(self._code[max(0, start - 4) : start + 1])
        indent = before[before.rfind("\n") + 1 :].removesuffix("def")
        window = self._code[start : start + _WINDOW]
        special = np.flatnonzero(window < len(SPECIAL_TOKENS))
        text = self._text(window[: special[0]] if len(special) else window)
        if indent.strip() or "\n" not in before or "```" in text:
            return []
        lines = (indent + text.lstrip()).split("\n")
        ends_document = len(special) > 0 and window[special[0]] == DOCUMENT_START
        last = function_end(lines)
        if last is None and not ends_document:
            return []
        text = "\n".join(line.removeprefix(indent) for line in lines[:last])
        return text.rstrip().split("\n")

    def _text(self, token_ids: TokenStream) -> str:
        text: str = self._tokenizer.decode(token_ids.tolist())
        return text


def function_end(lines: list[str]) -> int | None:
    """How many of the lines belong to the function that the first one opens, without blank lines at its end; None if all may."""
    indent, length = _indent(lines[0]), 1
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        # A bracket at the margin closes the parameters.
        if _indent(line) <= indent and line.lstrip()[0] not in ")]}":
            return length
        length = number
    return None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
