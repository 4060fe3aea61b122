"""Questions that want JSON for a schema; a sentence beside it or what was told earlier gives the values. Knows no dialogue."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from samebit.train.fields import NOUNS, Scalar, compact, fields, object_schema, worded
from samebit.train.transcript import ANSWER, WORDING, Pieces
from samebit.train.words import Split


@dataclass(frozen=True, slots=True)
class JsonTask:
    """A question and the object that answers it; `schema` describes the object and stands in the question."""

    question: str
    schema: Mapping[str, object]
    expected: Mapping[str, Scalar]


_QUESTIONS: Mapping[Split, tuple[str, ...]] = {
    "train": (
        "Answer with JSON for this schema: {s}\n{x}", "{x} Write it as JSON that fits the schema {s}",
        "JSON schema: {s}\nText: {x}", "Turn the sentence into JSON. {x}\nSchema: {s}", "{s}\nFill this schema from: {x}",
        "Extract the values as JSON with the schema {s}: {x}", "Here is a schema: {s} Here is a text: {x} Give me the JSON.",
        "{x}\nGive me a JSON object for {s}", "Reply in JSON only. {x} The schema is {s}", "Using the schema {s}, put this into JSON: {x}",
    ),
    "probe": (
        "Represent this as JSON. {x} The schema: {s}", "I need a JSON object that follows {s} for this text: {x}",
        "Please convert the text to JSON.\nSchema: {s}\nText: {x}", "{x} Return JSON according to {s}",
    ),
}  # fmt: skip
_TOLD: Mapping[Split, tuple[str, ...]] = {
    "train": ("The {n} has {w}.", "A {n} with {w}.", "There is a {n}: {w}.", "{w}; that is the {n}.", "We got a {n} with {w}.", "{n}: {w}."),
    "probe": ("This {n} comes with {w}.", "I received the {n} with {w}.", "Our {n} has {w}."),
}  # fmt: skip
_ABOUT: Mapping[Split, tuple[str, ...]] = {
    "train": (
        "Describe the {t} as JSON with this schema: {s}", "What do you know about the {t}? Answer in JSON: {s}",
        "Give me the {t} as a JSON object. Schema: {s}", "JSON for the {t}, please: {s}", "Fill in this schema for the {t}: {s}",
        "Using the schema {s}, tell me about the {t}.",
    ),
    "probe": ("Summarise the {t} in JSON that follows {s}", "I need the {t} as JSON. The schema is {s}"),
}  # fmt: skip


def json_task(rng: random.Random, split: Split) -> JsonTask:
    """An object of one to four fields, whose values a sentence tells."""
    values = [(f, f.draw(rng)) for f in fields(rng, split, rng.choice((1, 2, 2, 3, 3, 4)))]
    schema = object_schema({f.name: f.schema for f, _ in values}, [f.name for f, _ in values])
    told = rng.choice(_TOLD[split]).format(n=rng.choice(NOUNS[split]), w=worded(rng, values))
    told = told[0].upper() + told[1:]
    expected = {f.name: value for f, value in sorted(values, key=lambda pair: pair[0].name)}
    return JsonTask(rng.choice(_QUESTIONS[split]).format(s=compact(schema), x=told), schema, expected)


def task_about(rng: random.Random, split: Split, thing: str, known: Mapping[str, str]) -> JsonTask:
    """An object of what was told about a thing earlier, by attribute; values of digits alone are integers."""
    attributes = sorted(rng.sample(sorted(known), min(len(known), 4)))
    told = {name.replace(" ", "_"): known[name] for name in attributes}
    expected = {name: int(value) if value.isdigit() else value for name, value in told.items()}
    kinds = {name: {"type": "integer" if isinstance(value, int) else "string"} for name, value in expected.items()}
    schema = object_schema(kinds, list(kinds))
    return JsonTask(rng.choice(_ABOUT[split]).format(t=thing, s=compact(schema)), schema, expected)


def object_pieces(value: Mapping[str, Scalar]) -> Pieces:
    """An object as JSON in pieces that are encoded as the whole would be; values are answers."""
    pieces: list[tuple[str, int]] = []
    before = "{"
    for name, item in value.items():
        if isinstance(item, str):
            pieces += [(f'{before}"{name}": "', WORDING), (json.dumps(item, ensure_ascii=False)[1:-1], ANSWER)]
            before = '", '
        else:
            # A space opens the token of the word behind it.
            pieces += [(f'{before}"{name}":', WORDING), (f" {json.dumps(item)}", ANSWER)]
            before = ", "
    return [*pieces, (before.removesuffix(", ") + "}", WORDING)]
