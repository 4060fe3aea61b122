"""Named and typed values that tools take and JSON objects hold: their schemas, and how a user words them.

Knows a random generator only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from samebit.dialogues import COLORS
from samebit.train.words import CITIES, FOODS, NAMES, Split, invented_word

Scalar = str | int | float | bool
Draw = Callable[[random.Random], Scalar]

NOUNS: Mapping[Split, tuple[str, ...]] = {
    "train": tuple(
        "account alarm album backup banner bookmark budget calendar channel contract coupon course customer dataset device "
        "document email event experiment file folder form game group image invoice job key lesson letter list meeting member "
        "message model note order page parcel payment photo playlist policy post product project query recipe record release "
        "reminder report request reservation room route rule schedule server session shipment song stock survey table task "
        "template ticket transfer trip user video wallet window".split()
    ),
    "probe": tuple("appointment brochure concert delivery engine flight garden hospital journal kit laptop mortgage".split()),
}  # fmt: skip
_WORDING = ("{n} {v}", "{n}: {v}", "{n} = {v}", "the {n} {v}", "{v} as {n}", "{v} for the {n}", "{n} set to {v}")
_SWITCHED = (("{n}", "not {n}"), ("{n}: yes", "{n}: no"), ("{n} = true", "{n} = false"))


@dataclass(frozen=True, slots=True)
class Field:
    """A value's name, its JSON schema, and what draws it."""

    name: str
    schema: Mapping[str, object]
    draw: Draw


def fields(rng: random.Random, split: Split, count: int) -> list[Field]:
    """So many fields of different names. One in two of a probe has a name that no training dialogue has."""
    found: dict[str, Field] = {}
    while len(found) < count:
        known: Split = split if rng.random() < 0.5 else "train"
        pool = _STRINGS if rng.random() < 0.4 else _OTHERS
        kind = rng.choice(pool[known])
        found.setdefault(kind.name, kind)
    return list(found.values())


def worded(rng: random.Random, values: Sequence[tuple[Field, Scalar]]) -> str:
    """The fields and their values as a user lists them, in any order."""
    style = rng.randrange(len(_WORDING))
    clauses = []
    for part, value in rng.sample(list(values), len(values)):
        name = part.name.replace("_", " ")
        if isinstance(value, bool):
            wording = _SWITCHED[style if style < len(_SWITCHED) else 0][not value]
        else:
            wording = _WORDING[style]
        clauses.append(wording.format(n=name, v=value))
    last = clauses.pop()
    return f"{', '.join(clauses)}{' and ' if rng.random() < 0.8 else ', '}{last}" if clauses else last


def object_schema(properties: Mapping[str, object], required: Sequence[str]) -> dict[str, object]:
    """The JSON schema of an object."""
    return {"properties": dict(properties), "required": sorted(required), "type": "object"}


def compact(value: object) -> str:
    """JSON as the chat template writes it: sorted, without spaces."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def _pick(words: Sequence[str]) -> Draw:
    return lambda rng: rng.choice(words)


def _integer(low: int, high: int) -> Draw:
    return lambda rng: rng.randrange(low, high)


def _decimal(rng: random.Random) -> float:
    return rng.randrange(1, 1000) / 10


def _switch(rng: random.Random) -> bool:
    return rng.random() < 0.5


def _path(rng: random.Random) -> str:
    return f"{invented_word(rng)}/{invented_word(rng)}.{rng.choice(('csv', 'json', 'py', 'txt', 'md'))}"


def _title(rng: random.Random) -> str:
    return f"{rng.choice(COLORS)} {invented_word(rng)}"


def _strings(**draws: Draw) -> tuple[Field, ...]:
    return tuple(Field(name, {"type": "string"}, draw) for name, draw in draws.items())


def _integers(names: str, low: int, high: int) -> tuple[Field, ...]:
    return tuple(Field(name, {"type": "integer"}, _integer(low, high)) for name in names.split())


def _numbers(names: str) -> tuple[Field, ...]:
    return tuple(Field(name, {"type": "number"}, _decimal) for name in names.split())


def _booleans(names: str) -> tuple[Field, ...]:
    return tuple(Field(name, {"type": "boolean"}, _switch) for name in names.split())


def _choices(**words: str) -> tuple[Field, ...]:
    return tuple(
        Field(name, {"enum": known.split(), "type": "string"}, _pick(known.split())) for name, known in words.items()
    )


_STRINGS: Mapping[Split, tuple[Field, ...]] = {
    "train": _strings(
        city=_pick(CITIES), name=_pick(NAMES), title=_title, path=_path, label=invented_word, username=invented_word, team=invented_word,
        topic=invented_word, color=_pick(COLORS), author=_pick(NAMES), destination=_pick(CITIES), code=invented_word, item=_pick(FOODS),
        recipient=_pick(NAMES), location=_pick(CITIES), subject=_title, target=_path, owner=_pick(NAMES), product=invented_word,
    ),
    "probe": _strings(
        venue=_pick(CITIES), nickname=invented_word, headline=_title, archive=_path, guest=_pick(NAMES), flavor=_pick(FOODS)
    ),
}  # fmt: skip
_OTHERS: Mapping[Split, tuple[Field, ...]] = {
    "train": (
        *_integers("count limit hours minutes page size floor amount guests age copies level", 1, 200),
        *_integers("year port number id", 1900, 9000),
        *_numbers("price weight score"),
        *_booleans("urgent public recursive verbose silent archived active private paid visible"),
        *_choices(
            priority="low normal high", unit="celsius fahrenheit kelvin", format="csv json xml", status="open closed pending",
            order="ascending descending", language="english french german spanish", mode="fast safe slow", role="admin editor reader",
        ),
    ),
    "probe": (
        *_integers("quota seats days", 1, 200),
        *_numbers("height"),
        *_booleans("encrypted shared"),
        *_choices(shade="dark light pale", season="spring summer autumn winter"),
    ),
}  # fmt: skip
