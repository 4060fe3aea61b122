"""Words and values that training dialogues are made of, and what facts are about.

Knows a random generator; knows no tokens. Extends the vocabulary of `samebit.dialogues`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from samebit import dialogues

Split = Literal["train", "probe"]
Kind = Literal["thing", "mine", "setting"]

ADJECTIVES = (
    *dialogues.ADJECTIVES,
    *(
        "ancient blue brass broken carbon cedar cobalt crimson early emerald faint frozen gentle granite green hollow humble indigo "
        "iron jade keen linen little lunar mellow misty modest mossy nimble noble northern orange pale paper plain polar purple "
        "rapid red rough royal scarlet sharp simple slate small snowy solar southern steady stone sunny swift tall timber tiny "
        "velvet violet western white wide wild winter yellow"
    ).split(),
)
NOUNS = (
    *dialogues.NOUNS,
    *(
        "archive atlas badge balcony barn basket bell bench boat bottle bucket cabinet canal candle canoe cellar chapel chest "
        "circuit clinic cluster coach compass console cottage crane crate depot desk dock drawer drone factory falcon farm fountain "
        "garage gate gateway glacier hangar helmet hotel kettle kitchen ladder ledger lighthouse locker lodge mill mirror monitor "
        "museum needle notebook orchard oven panel parcel pavilion piano pipeline planet portal printer probe pump quarry rabbit "
        "radio ranch reactor registry ribbon robot rocket router saddle satellite scanner school scooter sensor server shelter "
        "shuttle signal spindle stable station statue stove studio table tavern telescope temple tent theater ticket tractor train "
        "tunnel turbine vault vessel viaduct village warehouse well whistle windmill workshop"
    ).split(),
)
NAMES = (
    *dialogues.NAMES,
    *(
        "Adrian Aisha Akira Alice Amara Andre Anita Arjun Astrid Bao Beatriz Bruno Camila Carlos Cecilia Chen David Diego Dina Elias "
        "Emil Emma Enzo Erik Esther Fatima Fiona Frida Gabriel Hana Hassan Helen Ibrahim Ingrid Irene Isaac Ivan Jamal Jana Jorge "
        "Julia Kai Keiko Kofi Lara Leila Leon Lucas Luna Magnus Malik Marco Maria Mei Mina Mohan Nadia Naomi Nina Noah Olga Omar Pablo "
        "Paula Priya Rafael Rosa Ruth Samuel Sara Selma Simon Stefan Tara Theo Tomas Uma Victor Wanda Wei Xavier Yara Yusuf Zoe"
    ).split(),
)
CITIES = (
    *dialogues.CITIES,
    *(
        "Accra Almaty Ankara Antwerp Austin Bangkok Bergen Bilbao Bogota Boston Brno Calgary Cardiff Chennai Dakar Dallas Delhi Dublin "
        "Durban Fukuoka Ghent Graz Hanoi Havana Houston Izmir Jakarta Kampala Kobe Krakow Leeds Leipzig Lisbon London Lyon Malaga "
        "Manila Milan Montreal Mumbai Munich Nairobi Naples Osaka Ottawa Perth Porto Prague Rome Salzburg Santiago Seville Sofia Sydney "
        "Taipei Tallinn Tampere Tokyo Toronto Turin Utrecht Valencia Vilnius Warsaw Zagreb Zurich"
    ).split(),
)
FOODS = "apples bread cheese curry dumplings lentils mango noodles olives pancakes pasta pears pizza rice salad soup tacos waffles".split()
MONTHS = "January February March April May June July August September October November December".split()
_SYLLABLES = "ba be bo da de di do fa fe ga go ka ke ki ko la le li lo lu ma me mi mo na ne no pa pe ra re ri ro sa se so ta te ti to va ve vi za zo".split()
_SETTING = "BATCH BLOCK BUFFER CACHE CHUNK CLIENT DISK FRAME GRID HEADER INDEX JOB KEY LAYER LOCK LOG MEMORY NODE PACKET PAGE POOL PORT QUEUE RETRY SHARD SLOT STREAM TASK THREAD WINDOW WORKER".split()
_QUANTITY = "BYTES COUNT DELAY DEPTH FACTOR INTERVAL LEVEL LIMIT OFFSET SIZE STEPS THRESHOLD TIMEOUT TTL WIDTH".split()
_LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"

Maker = Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to know: its key as sentences name it, and what draws a value for it."""

    kind: Kind
    key: str
    make: Maker

    @property
    def attribute(self) -> str:
        """What is known of a thing; the whole key of anything else."""
        return self.key.partition(" of the ")[0]

    @property
    def thing(self) -> str:
        """The thing that the key names, if any."""
        return self.key.partition(" of the ")[2]

    def filled(self, template: str) -> str:
        """A sentence with the key in place, or the attribute and the thing that it consists of."""
        return template.replace("{k}", self.key).replace("{a}", self.attribute).replace("{t}", self.thing)


def invented_word(rng: random.Random) -> str:
    """A word that no dictionary has."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 3, 3)))) + rng.choice(("", "n", "r", "s", "x"))


def _name(rng: random.Random) -> str:
    return invented_word(rng).capitalize()


def _number(low: int, high: int) -> Maker:
    return lambda rng: str(rng.randrange(low, high))


def _one_of(words: tuple[str, ...] | list[str]) -> Maker:
    return lambda rng: rng.choice(words)


def _serial(rng: random.Random) -> str:
    return f"{rng.choice(_LETTERS)}{rng.choice(_LETTERS)}-{rng.randrange(100, 1000)}"


THING: Mapping[str, Maker] = {
    "access code": _number(1000, 10000),
    "room number": _number(100, 1000),
    "serial number": _serial,
    "port": _number(2000, 10000),
    "price": lambda rng: f"{rng.randrange(11, 999)} dollars",
    "color": _one_of(dialogues.COLORS),
    "owner": _one_of(NAMES),
    "contact": _one_of(NAMES),
    "location": _one_of(CITIES),
    "codename": invented_word,
    "password": invented_word,
    "version": lambda rng: f"{rng.randrange(1, 10)}.{rng.randrange(40)}",
    "branch": lambda rng: f"fix-{invented_word(rng)}",
    "deadline": lambda rng: f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}",
}
MINE: Mapping[str, Maker] = {
    "dog's name": _name,
    "cat's name": _name,
    "sister's name": _one_of(NAMES),
    "brother's name": _one_of(NAMES),
    "manager's name": _one_of(NAMES),
    "home town": _one_of(CITIES),
    "favorite color": _one_of(dialogues.COLORS),
    "favorite food": _one_of(FOODS),
    "lucky number": _number(100, 1000),
    "user name": invented_word,
    "locker number": _number(100, 1000),
    "team name": _name,
}


def subject(rng: random.Random, split: Split) -> Subject:
    """Something to state a fact about. The names of things belong to one split alone."""
    draw = rng.random()
    if draw < 0.72:
        attribute = rng.choice(list(THING))
        return Subject("thing", f"{attribute} of the {thing(rng, split)}", THING[attribute])
    if draw < 0.86:
        key = rng.choice(list(MINE))
        return Subject("mine", key, MINE[key])
    return Subject("setting", f"{rng.choice(_SETTING)}_{rng.choice(_QUANTITY)}", _number(2, 5000))


def thing(rng: random.Random, split: Split) -> str:
    """An adjective and a noun; one pair in eight is for probes only."""
    while True:
        adjective, noun = rng.randrange(len(ADJECTIVES)), rng.randrange(len(NOUNS))
        if ((adjective * 131 + noun * 17) % 8 == 0) == (split == "probe"):
            return f"{ADJECTIVES[adjective]} {NOUNS[noun]}"
