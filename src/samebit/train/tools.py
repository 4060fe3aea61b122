"""Tools that training dialogues declare and call, in the wording of Inkling's chat format. Knows a random generator only."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samebit.train.words import CITIES, NAMES, invented_word


@dataclass(frozen=True, slots=True)
class Tool:
    """A function with one text argument. `results`: what it may return; sentences take {a} and {r}."""

    description: str
    argument: str
    arguments: Sequence[str]
    results: Sequence[str]
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One use: the user's question, the call's JSON, the tool's result, and what the model says then."""

    name: str
    question: str
    call: str
    result: str
    answer: str


_TOOLS: Mapping[str, Tool] = {
    "get_weather": Tool(
        "Weather of a city", "city", CITIES, ("sunny", "cold", "rainy", "windy", "mild"), "How is the weather in {a}?", "It is {r} in {a}."
    ),
    "get_time": Tool(
        "Local time of a city", "city", CITIES, [f"{h}:{m:02d}" for h in range(24) for m in range(0, 60, 5)], "What time is it in {a}?", "It is {r} in {a}."
    ),
    "find_phone": Tool(
        "Phone number of a person", "name", NAMES, [str(n) for n in range(20000, 99999, 37)], "What is the phone number of {a}?", "The number of {a} is {r}."
    ),
    "get_birthday": Tool(
        "Birthday of a person", "name", NAMES, [f"{m} {d}" for m in ("March", "June", "October") for d in range(1, 29)], "When is the birthday of {a}?", "The birthday of {a} is {r}."
    ),
    "count_items": Tool(
        "Number of items in stock", "item", (), [str(n) for n in range(2, 500)], "How many {a} are in stock?", "There are {r} {a} in stock."
    ),
    "run_job": Tool(
        "Start a job and return its state", "job", (), ("queued", "running", "done", "failed"), "Please start the job {a}.", "The job {a} is {r}."
    ),
}  # fmt: skip


def declaration(rng: random.Random) -> tuple[str, list[str]]:
    """A list of one to three tools as the chat format declares them, and their names."""
    names = rng.sample(list(_TOOLS), rng.choice((1, 2, 3)))
    declared = [
        {
            "description": _TOOLS[name].description,
            "name": name,
            "parameters": {
                "properties": {_TOOLS[name].argument: {"type": "string"}},
                "required": [_TOOLS[name].argument],
                "type": "object",
            },
            "type": "function",
        }
        for name in names
    ]
    return _compact(declared), names


def tool_use(rng: random.Random, names: Sequence[str]) -> ToolUse:
    """A question that one of the declared tools answers, and all that follows."""
    name = rng.choice(names)
    tool = _TOOLS[name]
    argument = rng.choice(tool.arguments) if tool.arguments else invented_word(rng)
    result = rng.choice(tool.results)
    return ToolUse(
        name=name,
        question=tool.question.format(a=argument),
        call='{"name":' + _compact(name) + ',"args":' + _compact({tool.argument: argument}) + "}",
        result=result,
        answer=tool.answer.format(a=argument, r=result),
    )


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
