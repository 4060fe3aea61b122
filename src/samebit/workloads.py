"""Seeded text and prompt lengths for audits and benchmarks: the same seed gives the same workload on every machine.

Knows neither engines nor tokenizers: texts are plain characters, lengths are plain numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

_NOUNS = (
    "index",
    "window",
    "table",
    "record",
    "stream",
    "buffer",
    "parser",
    "graph",
    "token",
    "queue",
    "cache",
    "node",
)
_VERBS = ("merge", "read", "write", "count", "split", "find", "update", "check", "build", "drop", "sort", "load")
_PLACES = ("harbour", "valley", "tower", "market", "library", "station", "garden", "bridge")
_TRAITS = ("old", "quiet", "narrow", "bright", "distant", "wooden", "crowded", "small")
_PEOPLE = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goro", "Hana")


def document(seed: int, num_chars: int) -> str:
    """Text of exactly `num_chars` characters in which Python functions and short prose take turns."""
    rng = random.Random(seed)
    text = ""
    while len(text) < num_chars:
        text += _function(rng) if rng.random() < 0.6 else _paragraph(rng)
    return text[:num_chars]


def question(seed: int) -> str:
    """A short request in words."""
    rng = random.Random(seed)
    return rng.choice(
        [
            f"Write a function that can {rng.choice(_VERBS)} a {rng.choice(_NOUNS)} and explain it.",
            f"Describe the {rng.choice(_TRAITS)} {rng.choice(_PLACES)} that {rng.choice(_PEOPLE)} saw.",
            f"How does one {rng.choice(_VERBS)} the {rng.choice(_NOUNS)} of a {rng.choice(_PLACES)}?",
        ]
    )


def edge_lengths(periods: Iterable[int], limit: int) -> list[int]:
    """Lengths from 1 to `limit` just below, at and just above small multiples of each period, ascending.

    Page sizes, windows and checkpoint intervals are such periods: faults of state live at their edges.
    """
    found = {1, 2, 3}
    for period in periods:
        found |= {period * times + off for times in (1, 2, 3) for off in (-1, 0, 1)}
    return sorted(length for length in found if 1 <= length <= limit)


def spread(items: list[int], count: int) -> list[int]:
    """At most `count` of `items`, evenly spread, the first and the last among them."""
    if count >= len(items):
        return list(items)
    if count == 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _function(rng: random.Random) -> str:
    verb, noun, other = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_NOUNS)
    number = rng.randrange(2, 100)
    body = rng.choice(
        [
            f"    for item in {noun}s:\n        if item.{other} > {number}:\n            yield item\n",
            f"    result = {{}}\n    for key in {noun}:\n        result[key] = {noun}[key] + {number}\n    return result\n",
            f"    left, right = {noun}[:{number}], {noun}[{number}:]\n    return {verb}_all(left) + {verb}_all(right)\n",
        ]
    )
    return f'def {verb}_{noun}({noun}, {other}=None):\n    """{verb.title()} the {noun} of a {other}."""\n{body}\n\n'


def _paragraph(rng: random.Random) -> str:
    sentences = [
        f"{rng.choice(_PEOPLE)} walked to the {rng.choice(_TRAITS)} {rng.choice(_PLACES)} "
        f"and found {rng.randrange(2, 1000)} letters in a {rng.choice(_NOUNS)}."
        for _ in range(rng.randrange(1, 4))
    ]
    return "# " + " ".join(sentences) + "\n\n"
