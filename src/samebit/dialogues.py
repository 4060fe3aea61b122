"""Seeded dialogues in which facts are stated early and asked for late, for models that speak Inkling's message format.

A dialogue is plain text turns; `Spoken` turns it into token ids, and can place a fact's value just behind a page boundary.
Knows a tokenizer, no engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from samebit.core.errors import InvalidRequestError
from samebit.engine.tokenizer import Tokenizer

ADJECTIVES = (
    "amber bright calm clever copper dusty golden hidden ivory marble narrow olive quiet rusty silver wooden".split()
)
NOUNS = "anchor beacon bridge cabin camera castle clock engine ferry garden harbor lantern library market tower wagon".split()
_ATTRIBUTES = ("access code", "room number", "price", "color", "owner", "location")
COLORS = "black blue brown gold gray green orange pink purple red teal white yellow".split()
NAMES = (
    "Ada Boris Clara Daniel Elena Felix Greta Hugo Ines Jonas Karim Lina Marta Nora Oscar Petra Ravi Sofia Vera".split()
)
CITIES = "Athens Berlin Cairo Denver Geneva Helsinki Kyoto Lagos Lima Madrid Oslo Paris Quito Riga Seoul Tunis Vienna".split()
OPENINGS = (
    "",
    "By the way. ",
    "Thanks. ",
    "All right. ",
    "I see. ",
    "Good. ",
    "One more thing. ",
    "Before I forget. ",
    "Okay. ",
)
STATE = (
    "The {key} is {value}.",
    "Remember that the {key} is {value}.",
    "Please note: the {key} is {value}.",
    "For later, the {key} is {value}.",
)
ASK = ("What is the {key}?", "Can you tell me the {key}?", "Remind me, what is the {key}?")
TALK = (
    "I had a long day at work.",
    "The weather is nice today.",
    "Let us go on with the plan.",
    "I will read the report tomorrow.",
    "That part is finished now.",
    "We should add a test for it.",
    "My train was late again.",
    "The meeting went well.",
)
REPLIES = ("Noted.", "I see.", "That makes sense.", "Good to know.", "Understood.")


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, what the written history answers, and the value that a right answer must contain (questions)."""

    user: str
    reply: str
    value: str | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """An attribute of a thing, and its value."""

    key: str
    value: str


def facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts about different things."""
    things = rng.sample([f"{a} {n}" for a in ADJECTIVES for n in NOUNS], count)
    return [
        Fact(f"{attribute} of the {thing}", _value(rng, attribute))
        for thing in things
        for attribute in [rng.choice(_ATTRIBUTES)]
    ]


def small_talk(rng: random.Random) -> Turn:
    """A turn in which nothing is stated or asked."""
    return Turn(rng.choice(OPENINGS) + rng.choice(TALK), rng.choice(REPLIES))


def question(rng: random.Random, fact: Fact) -> Turn:
    """A turn that asks for a fact."""
    return Turn(rng.choice(ASK).format(key=fact.key), f"The {fact.key} is {fact.value}.", fact.value)


class Spoken:
    """A dialogue as token ids, in the message format that Inkling models are trained on."""

    def __init__(self, tokenizer: Tokenizer, page_size: int) -> None:
        self._tokenizer = tokenizer
        self._page_size = page_size
        names = ("message_user", "message_model", "content_text", "end_message", "content_model_end_sampling")
        found = {name: tokenizer.id_of(f"<|{name}|>") for name in names}
        missing = [name for name, token in found.items() if token is None]
        if missing:
            raise InvalidRequestError(
                f"the model has no <|{missing[0]}|>: it does not speak this message format", param="model"
            )
        self._mark = {name: token for name, token in found.items() if token is not None}
        start = tokenizer.id_of("<|endoftext|>")
        self.token_ids = [] if start is None else [start]

    def ask(self, turn: Turn) -> list[int]:
        """The prompt for the model's answer to `turn`."""
        return [*self.token_ids, *self._user(turn.user), self._mark["message_model"]]

    def say(self, turn: Turn) -> None:
        """Add `turn` and its written reply to the history."""
        text = self._tokenizer.encode(turn.reply, allow_special=False)
        ends = [self._mark["end_message"], self._mark["content_model_end_sampling"]]
        self.token_ids = [*self.ask(turn), self._mark["content_text"], *text, *ends]

    def statement(self, rng: random.Random, fact: Fact, *, behind_boundary: bool) -> Turn:
        """A turn that states a fact; with `behind_boundary`, its value begins at most 2 tokens behind the last page boundary.

        The next request that hits the prefix cache starts there, and computes the value on what the cache holds.
        """
        reply = rng.choice(REPLIES)
        for _ in range(500):
            opening = "".join(rng.choice(OPENINGS) for _ in range(3)) if behind_boundary else rng.choice(OPENINGS)
            before, after = rng.choice(STATE).format(key=fact.key, value="\0").split("\0")
            turn = Turn(opening + before + fact.value + after, reply)
            if not behind_boundary:
                return turn
            prompt = self.ask(turn)
            tail = self._tokenizer.encode(f" {fact.value}{after}", allow_special=False)
            value_at = len(prompt) - 2 - len(tail)
            boundary = (len(prompt) - 1) // self._page_size * self._page_size
            if 0 <= value_at - boundary <= 2:
                return turn
        raise AssertionError("some opening puts the value behind a boundary")

    def _user(self, text: str) -> list[int]:
        mark = self._mark
        body = self._tokenizer.encode(text, allow_special=False)
        return [mark["message_user"], mark["content_text"], *body, mark["end_message"]]


def _value(rng: random.Random, attribute: str) -> str:
    if attribute == "access code":
        return str(rng.randrange(1000, 10000))
    if attribute == "room number":
        return str(rng.randrange(100, 1000))
    if attribute == "price":
        return f"{rng.randrange(11, 999)} dollars"
    return rng.choice({"color": COLORS, "owner": NAMES, "location": CITIES}[attribute])
