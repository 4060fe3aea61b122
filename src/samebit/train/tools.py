"""Tools that training dialogues declare and call, in the wording of Inkling's chat format. Knows a random generator only.

A generated tool is named by a verb and a noun; every call is valid under its declaration, because both come from the same
fields. Six tools have questions of their own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samebit.train.fields import NOUNS, Draw, Field, Scalar, compact, fields, object_schema, worded
from samebit.train.words import CITIES, NAMES, Split, invented_word


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a dialogue declares. `declared`: the JSON object; `required`: how many of the fields, from the first,
    every call has; `does`: what the user asks for ("create a ticket"). `questions` take {a} (fixed tools) or {do} and {with}.
    """

    name: str
    declared: Mapping[str, Any]  # Any: JSON
    arguments: Sequence[Field]
    required: int
    does: str
    questions: Sequence[str]
    answer: str
    result: Draw


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One use: the user's question, the call's arguments and JSON, the tool's result, and what the model says then."""

    name: str
    question: str
    arguments: Mapping[str, Scalar]
    call: str
    result: str
    answer: str


_QUESTIONS: Mapping[Split, tuple[str, ...]] = {
    "train": (
        "Please {do} with {with}.", "{Do}: {with}.", "I need you to {do}. Use {with}.", "Could you {do} with {with}?",
        "Can you {do}? It should have {with}.", "With {with}, {do} please.", "We have to {do}; take {with}.",
        "{Do} with {with}.", "Let us {do} using {with}.", "I would like you to {do} ({with}).", "Now {do}, {with}.",
        "Use {with} and {do}.",
    ),
    "probe": (
        "Go ahead and {do} with {with}.", "I want to {do}: {with}.", "It is time to {do}. The details are {with}.",
        "Would you {do} with {with}, please?", "Help me {do} with {with}.",
    ),
}  # fmt: skip
_VERBS = (
    "add archive assign book cancel check clear close copy count create delete describe download duplicate edit export fetch find get "
    "hide import inspect list load lock log make merge move open order pause pin plan prepare print publish read rename repeat reset "
    "restore review save schedule search send set share show sort start stop submit sync tag track update upload validate verify"
).split()
_RESULTS = ("done", "ok", "queued", "accepted", "finished", "not found")


def _fixed(name: str, about: str, argument: str, values: Draw, result: Draw, question: str, answer: str) -> Tool:
    taken = Field(argument, {"type": "string"}, values)
    declared = _declared(name, about, object_schema({argument: taken.schema}, [argument]))
    return Tool(name, declared, (taken,), 1, "", (question,), answer, result)


def _declared(name: str, description: str, parameters: Mapping[str, object]) -> dict[str, object]:
    return {"description": description, "name": name, "parameters": parameters, "type": "function"}


_FIXED = (
    _fixed(
        "get_weather", "Weather of a city", "city", lambda rng: rng.choice(CITIES),
        lambda rng: rng.choice(("sunny", "cold", "rainy", "windy", "mild")), "How is the weather in {a}?", "It is {r} in {a}.",
    ),
    _fixed(
        "get_time", "Local time of a city", "city", lambda rng: rng.choice(CITIES),
        lambda rng: f"{rng.randrange(24)}:{rng.randrange(60):02d}", "What time is it in {a}?", "It is {r} in {a}.",
    ),
    _fixed(
        "find_phone", "Phone number of a person", "name", lambda rng: rng.choice(NAMES),
        lambda rng: rng.randrange(20000, 99999), "What is the phone number of {a}?", "The number of {a} is {r}.",
    ),
    _fixed(
        "get_birthday", "Birthday of a person", "name", lambda rng: rng.choice(NAMES),
        lambda rng: f"{rng.choice(('March', 'June', 'October'))} {rng.randrange(1, 29)}", "When is the birthday of {a}?",
        "The birthday of {a} is {r}.",
    ),
    _fixed(
        "count_items", "Number of items in stock", "item", invented_word, lambda rng: rng.randrange(2, 500),
        "How many {a} are in stock?", "There are {r} {a} in stock.",
    ),
    _fixed(
        "run_job", "Start a job and return its state", "job", invented_word,
        lambda rng: rng.choice(("queued", "running", "done", "failed")), "Please start the job {a}.", "The job {a} is {r}.",
    ),
)  # fmt: skip


def declare(rng: random.Random, split: Split = "train", most: int = 4) -> list[Tool]:
    """One to four tools of different names, at most so many. A probe's are all unseen; in training one in five is one of the six."""
    found: dict[str, Tool] = {}
    count = min(most, rng.choice((1, 2, 2, 3, 3, 4)))
    nouns: list[str] = []
    while len(found) < count:
        if split == "train" and rng.random() < 0.2:
            tool = rng.choice(_FIXED)
        else:
            # Two tools about the same thing must be told apart by their verbs.
            noun = rng.choice(nouns) if nouns and rng.random() < 0.3 else rng.choice(NOUNS[split])
            nouns.append(noun)
            tool = _generated(rng, split, noun)
        found.setdefault(tool.name, tool)
    return list(found.values())


def declaration(tools: Sequence[Tool]) -> str:
    """A list of tools as the chat format declares them."""
    return compact([tool.declared for tool in tools])


def tool_use(rng: random.Random, tools: Sequence[Tool]) -> ToolUse:
    """A question that one of the declared tools answers, and all that follows."""
    tool = rng.choice(tools)
    given = [f for number, f in enumerate(tool.arguments) if number < tool.required or rng.random() < 0.5]
    values = [(f, f.draw(rng)) for f in given]
    words = {
        "a": values[0][1],
        "do": tool.does,
        "Do": tool.does[:1].upper() + tool.does[1:],
        "with": worded(rng, values),
    }
    result = str(tool.result(rng))
    arguments = {f.name: value for f, value in values}
    return ToolUse(
        name=tool.name,
        question=rng.choice(tool.questions).format_map(words),
        arguments=arguments,
        call=f'{{"name":{compact(tool.name)},"args":{compact(arguments)}}}',
        result=result,
        answer=tool.answer.format(a=words["a"], r=result),
    )


def _generated(rng: random.Random, split: Split, noun: str) -> Tool:
    verb = rng.choice(_VERBS)
    name = f"{verb}_{noun}" if rng.random() < 0.8 else verb + noun.capitalize()
    arguments = fields(rng, split, rng.choice((1, 2, 2, 3)))
    required = rng.randrange(1, len(arguments) + 1)
    properties: dict[str, object] = {f.name: f.schema for f in arguments}
    if rng.random() < 0.25:
        properties = {f.name: {"description": f"{f.name.capitalize()} of the {noun}", **f.schema} for f in arguments}
    parameters = object_schema(properties, [f.name for f in arguments[:required]])
    article = rng.choice(("the", "an" if noun[0] in "aeio" else "a"))
    return Tool(
        name=name,
        declared=_declared(name, f"{verb.capitalize()} {article} {noun}", parameters),
        arguments=arguments,
        required=required,
        does=f"{verb} {article} {noun}",
        questions=_QUESTIONS[split],
        answer="The result is {r}.",
        result=_result,
    )


def _result(rng: random.Random) -> Scalar:
    return rng.choice(_RESULTS) if rng.random() < 0.5 else rng.choice((rng.randrange(1, 5000), invented_word(rng)))
