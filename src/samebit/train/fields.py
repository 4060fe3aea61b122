"""Named and typed values that tools take and JSON objects hold: their schemas, and how a user words them.

In training most names have another type each time, so that a schema has to be read. Knows a random generator only.
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
        "template ticket transfer trip user video wallet window "
        "address alert answer article asset auction badge balance basket batch benchmark bill block board book box branch bridge bucket "
        "bundle cabin cache car card cart case catalog chapter chart chat claim class client clip cluster color comment commit company "
        "container cookie country cover crate credit cycle database deal deck delay depot design desk diagram diary dinner discount disk "
        "domain donation door draft drawing driver episode error estimate exam exhibit fact farm feature fee feed figure filter flag "
        "font forecast forum frame friend gadget gallery gift goal graph guide habit handle hotel house icon idea index ingredient interview "
        "island item joke journey lamp layer layout lease ledger license link loan location machine magazine manual market mask match "
        "medal menu meter mission mixture mode monitor movie museum needle network notebook notice number object offer office option "
        "outline owner package painting panel paper part partner patch path pattern person phase phone piece pipe planet plant plate "
        "platform player plot poem point port portal poster price printer prize problem process profile program proof prototype puzzle "
        "queue quote race rack raffle range rate reading receipt region reward ring river robot roof sale sample scene school score screen "
        "script seat section sensor series shelf shift ship shop signal site sketch slide slot snapshot socket source space speaker stage "
        "station step store story stream street student study suit summary switch symbol team test text thread tile timer token tool topic "
        "tour tower toy train tree trial tunnel unit vehicle vendor version view village voice vote voucher warehouse watch widget "
        "workshop zone".split()
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
        if split == "train" and rng.random() < _FREE_SHARE:
            kind = _free(rng)
        else:
            known: Split = split if rng.random() < 0.5 else "train"
            pool = _STRINGS if rng.random() < 0.4 else _OTHERS
            kind = rng.choice(pool[known])
        found.setdefault(kind.name, kind)
    return list(found.values())


def _free(rng: random.Random) -> Field:
    """A field whose name tells neither its type nor its values."""
    draw = rng.random()
    if draw < 0.22:
        return Field(rng.choice(_ADJECTIVES), {"type": "boolean"}, _switch)
    name = rng.choice(_NAMES) if rng.random() < 0.9 else invented_word(rng)
    if rng.random() < 0.2:
        name = f"{rng.choice(_PREFIXES)}_{name}"
    if draw < 0.4:
        high = rng.choice((10, 200, 5000, 100_000))
        return Field(name, {"type": "integer"}, _integer(high // 10, high))
    if draw < 0.52:
        return Field(name, {"type": "number"}, _decimal)
    if draw < 0.72:
        words = rng.sample(_WORDS, rng.choice((2, 3, 3, 4)))
        return Field(name, {"enum": words, "type": "string"}, _pick(words))
    return Field(name, {"type": "string"}, rng.choice(_DRAWS))


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


def _code(rng: random.Random) -> str:
    return f"{rng.choice(_LETTERS)}{rng.choice(_LETTERS)}-{rng.randrange(100, 1000)}"


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

# Which part of the fields in training have a name that tells nothing.
_FREE_SHARE = 0.65
_LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"
_DRAWS: Sequence[Draw] = (
    _path, _title, _code, invented_word, invented_word, _pick(CITIES), _pick(NAMES), _pick(FOODS), _pick(COLORS),
)  # fmt: skip
_PREFIXES = "base end first last max min my next other start target total".split()
_UNSEEN = {field.name for pool in (_STRINGS, _OTHERS) for field in pool["probe"]}
# Any noun may name a field.
_NAMES = sorted(
    {
        *NOUNS["train"],
        *"angle area author birthday brand brightness budget capacity category century channel contrast currency date deadline debt "
        "degree density depth diet direction distance district duration effort energy factor fraction gain genre grade hobby income "
        "interest interval kind latitude length longitude margin mass material maximum minimum month motto name nation noise offset "
        "origin parent percent period pitch place position power pressure priority purpose quality quarter radius rank ratio reason "
        "resolution result rhythm room salary scale sector sender share side signature skill speed spelling start style suffix surname "
        "temperature theme thickness threshold time title tone type value variant velocity voltage volume wave week width winner word".split(),
    }
    - _UNSEEN
)
_ADJECTIVES = (
    "active automatic blocked bold broken cached checked clean closed compact complete confirmed daily dirty done double empty enabled "
    "exact expired external fake final fixed flat folded foreign fragile free fresh frozen full global hidden huge idle internal joined "
    "late lazy legal linked local locked loud loose manual mobile muted native nested noisy online open optional original parallel "
    "pinned plain portable premium quick quiet random ready real recent regular remote safe saved secure short signed simple single "
    "smart sorted stable static strict synced temporary tested tiny trusted unique used valid verified visible warm weekly wide wild"
).split()
_WORDS = [
    *_ADJECTIVES,
    *COLORS,
    *FOODS,
    *"north south east west left right top bottom inner outer alpha beta gamma delta bronze iron wood glass paper stone lion tiger eagle "
    "shark horse mouse basic plus expert novice never always often rarely small medium large cash card cheque bus train ship plane walk "
    "piano violin drums guitar oak pine maple birch solid liquid gas monday friday sunday".split(),
]
