"""Endless seeded text, in words or in code, and pieces of it that are so many tokens long.

Knows neither servers nor engines. How many tokens a piece comes to is told by a `Cost`: counted with a tokenizer, or estimated.
"""

from __future__ import annotations

import functools
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samebit.engine.tokenizer import Tokenizer

Cost = Callable[[str], float]
"""Tokens that a piece of text comes to: a word, and the white space before it."""

# Short and common, so that large vocabularies hold each of them as one token.
_WORDS = (
    "air age area art back bank bed bit body book box boy bus car case cat city class club cost cup date day deal desk dog "
    "door drop edge end eye face fact farm film fire fish floor food foot form game girl glass gold group hair half hall hand "
    "head heat help hill home horse hour house idea iron job key kind king lake land law left life light line list look lot "
    "man map mark milk mind month moon name need news night note oil page paper park part past path piece place plan plant "
    "plate point pool post price queue rain rate rest rice river road rock role room rule salt sea seat ship shop side sign "
    "size skin snow soil song sort sound space star step stone store sun table task tax team term test text thing time tool "
    "top town tree trip truth turn type unit use view voice wall war water way week wife wind wine wood word work world year"
).split()
_PIECE = re.compile(r"\s*\S+")
# What large vocabularies mostly hold as one token.
_LIKELY_TOKEN = re.compile(r"[^\W\d_]{1,6}|\d{1,3}|_|[^\w\s]{1,3}|\n\s*")
_SMALLEST_MODULE_BYTES = 8_000


def words(rng: random.Random) -> Iterator[str]:
    """Common words at random, each with the space before it."""
    while True:
        yield " " + rng.choice(_WORDS)


def code(rng: random.Random) -> Iterator[str]:
    """The standard library from some line of some module on, and then its other modules, around and around."""
    modules = _modules()
    number = rng.randrange(len(modules))
    lines = _read(modules[number]).splitlines(keepends=True)
    text = "".join(lines[rng.randrange(len(lines) // 2) :])
    while True:
        yield from _PIECE.findall(text)
        number = (number + 1) % len(modules)
        text = "\n" + _read(modules[number])


def take(pieces: Iterator[str], num_tokens: int, cost: Cost) -> str:
    """Text of about `num_tokens` tokens, the nearest that whole pieces allow; at least one piece."""
    taken = [next(pieces)]
    total = cost(taken[0])
    for piece in pieces:
        spent = cost(piece)
        if total + spent / 2 > num_tokens:
            break
        taken.append(piece)
        total += spent
    return "".join(taken).lstrip()


def estimated(scale: float = 1.0) -> Cost:
    """`scale` times an estimate for a large vocabulary: short words, digits, signs and line ends are a token each."""
    return lambda piece: scale * max(1, len(_LIKELY_TOKEN.findall(piece)))


def counted(tokenizer: Tokenizer) -> Cost:
    """The tokens of each piece by itself, by `tokenizer`."""

    @functools.cache
    def cost(piece: str) -> float:
        return len(tokenizer.encode(piece, allow_special=False))

    return cost


@functools.cache
def _modules() -> list[Path]:
    """Modules of some size, by name: the same on every machine with the same version of Python."""
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return [path for path in found if path.stat().st_size > _SMALLEST_MODULE_BYTES]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
