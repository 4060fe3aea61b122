"""Tools that training dialogues declare and call, in the wording of Inkling's chat format. Knows a random generator only.

A generated tool is named by a verb and a noun; every call is valid under its declaration, because both come from the same
fields. Six tools have questions of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samebit.train.fields import NOUNS, Draw, Field, Scalar, compact, fields, object_schema, worded
from samebit.train.forms import Forms, capital
from samebit.train.noise import CLOSINGS, OPENINGS, around, remarked
from samebit.train.words import CITIES, NAMES, Split, invented_word


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a dialogue declares. `declared`: the JSON object; `required`: how many of the fields, from the first,
    every call has; `does`: what the user asks for ("create a ticket"). `question` draws a sentence with {a} (fixed tools) or with
    {do} and {with}.
    """

    name: str
    declared: Mapping[str, Any]  # Any: JSON
    arguments: Sequence[Field]
    required: int
    does: str
    question: Callable[[random.Random], str]
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


_PROBE_QUESTIONS = (
    "Go ahead and {do} with {with}.", "I want to {do}: {with}.", "It is time to {do}. The details are {with}.",
    "Would you {do} with {with}, please?", "Help me {do} with {with}.",
)  # fmt: skip
_ASKED = (
    "{do}", "{do}", "please {do}", "[can|could|will] you [|please ]{do}", "I need you to {do}", "I would like you to {do}", "let us {do}",
    "[we|I] [have to|need to|must|should|are going to] {do}", "now {do}", "[next|first|then|after that], {do}", "you [can|should|may] {do}",
    "<who> [wants|asked|told] [you|us|me] to {do}", "[do me a favor|be so kind|do not wait]: {do}", "time for you to {do}", "just {do}",
    "my [wish|plan|request|next step|task for you] is to {do}", "somebody has to {do}", "[I|we] wish to {do}", "what about this: {do}",
    "[today|tomorrow|for <who>|on <day>|before <hour>] [we|I] {do}", "the <paper> says to {do}", "I [hope|expect|trust] you can {do}",
    "[there is|we have|I have] one [job|thing|task|item] left: {do}", "the [moment|hour|day] has come to {do}", "it is [on|up to] you to {do}",
    "it is [good|best|necessary|important|wise|high time] to {do}[| now| today]", "[your|the|our] [task|job|order|assignment] is [to {do}|this: {do}]",
    "[help|assist|support] [us|<who>] [to {do}|and {do}]", "[get on|continue|carry on|proceed|start] and {do}", "would [somebody|anyone|<who>] {do}",
    "I [would love|want you|intend|plan|decided] to {do}", "[nothing is left but|it remains|all that is left is] to {do}", "{do}, [will|would|can] you",
    "how about you {do}", "[move|get|come|keep] [on|going|along] and {do}", "[fine|good|sure|alright], {do}", "[off|on] you go: {do}",
    "[it seems|I think|I guess|I see] it is up to us to {do}", "[nothing else|what is next|what I want|what matters] is to {do}", "[all set|ready] to {do}", "[we are|I am] [ready|about] to {do}", "[try|begin|remember] to {do}", "you [have|are] to {do}",
)  # fmt: skip
_WITH = (
    " with {with}.", " with {with}.", " with {with}[|, please| for me| now| for <who>].", " using {with}.", ": {with}.", ", {with}.", " ({with}).",
    ". [Use|Take|Set|Choose] {with}.", ". [It should have|It needs|It gets|I want it with|The values are|The facts are] {with}.",
    ". [These are|Here are|You need] the [values|arguments|settings|inputs]: {with}.", ", [where|given|namely|and use|that is] {with}.",
    "; [take|use|note] {with}.", " and [use|take|pass|give it] {with}.", " - {with}.", ".\n{with}", " on the basis of {with}.",
    ". The [inputs|numbers|fields|parameters|arguments|particulars] [are|would be|come to|read] {with}.", ". As [input|arguments|values], [we have|there is|take] {with}.",
    ". [We know|You get|I give you|On file:|Known:] {with}.", "[, please,| now|, then,] with {with}.", ". {with}.", "? [It is|We have|Take] {with}.",
)  # fmt: skip
_QUESTIONS = around(
    (
        *(asked + given for asked in _ASKED for given in _WITH),
        *("[with|using|given] {with}, " + asked + "." for asked in _ASKED),
        *(
            "[use|take|note|here is|I have] {with}[. Now| and then|, then|. With this,] " + asked + "."
            for asked in _ASKED
        ),
    )
)
_VERBS = (
    "add archive assign book cancel check clear close copy count create delete describe download duplicate edit export fetch find get "
    "hide import inspect list load lock log make merge move open order pause pin plan prepare print publish read rename repeat reset "
    "restore review save schedule search send set share show sort start stop submit sync tag track update upload validate verify"
).split()
_INVENTED_SHARE, _LOOSE_SHARE = 0.4, 0.4
_LOOSE_WORDS = (
    "again ago ahead all along also always and any around as ask at away back be because before begin best better bring but by call can "
    "care come could day deal do done down early else enough even ever every far feel few find first follow for from full give glad go "
    "good great had half hand hard have help here high how idea if in it job just keep kind know last late lead leave let like line "
    "little long look lot make many matter maybe me mean might mind more most move much must near need never new next nice no not now of "
    "off often on once one only or other our out over own part place plan point quick quite rather ready really right round same see "
    "should show side since so some soon sort start step still such sure take talk tell than that then there thing think this though "
    "time to today together too try turn under until up us use very wait want way we week well what when where which while who why will "
    "wish with work world would year yes yet you your"
).split()
_RESULTS = ("done", "ok", "queued", "accepted", "finished", "not found")


def _loose(rng: random.Random) -> str:
    """A request in words that mean little: what is to be done, and with what, has to be enough."""
    before, between = (" ".join(rng.choices(_LOOSE_WORDS, k=rng.randrange(least, 5))) for least in (1, 0))
    joint = rng.choice((" ", ". ", ", ", ": ", "; "))
    return capital(
        f"{before} {{do}}{joint}{between + ' ' if between else ''}{{with}}{rng.choice(('.', '.', '?', '!'))}"
    )


def _framed(rng: random.Random, forms: Forms) -> str:
    """A question as training dialogues ask it, with what may stand around it."""
    if rng.random() < _LOOSE_SHARE:
        return _loose(rng)
    start = rng.choice(OPENINGS) if rng.random() < 0.15 else ""
    return start + remarked(rng, capital(forms.draw(rng)), CLOSINGS, 0.08)


_QUESTION: Mapping[Split, Callable[[random.Random], str]] = {
    "train": lambda rng: _framed(rng, _QUESTIONS),
    "probe": lambda rng: rng.choice(_PROBE_QUESTIONS),
}


def _fixed(name: str, about: str, argument: str, values: Draw, result: Draw, question: str, answer: str) -> Tool:
    taken = Field(argument, {"type": "string"}, values)
    declared = _declared(name, about, object_schema({argument: taken.schema}, [argument]))
    asked = around(
        (question, *(f"{lead} {question}" for lead in ("[quick|small|one] question:", "[please|now|okay|so]:", "hey,")))
    )
    return Tool(name, declared, (taken,), 1, "", lambda rng: _framed(rng, asked), answer, result)


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
    verbs: list[str] = []
    while len(found) < count:
        if split == "train" and rng.random() < 0.2:
            tool = rng.choice(_FIXED)
        else:
            # Two tools about the same thing must be told apart by their verbs, and two that do the same by their things.
            noun = rng.choice(nouns) if nouns and rng.random() < 0.3 else _noun(rng, split)
            verb = rng.choice(verbs) if verbs and rng.random() < 0.3 else rng.choice(_VERBS)
            nouns.append(noun)
            verbs.append(verb)
            tool = _generated(rng, split, verb, noun)
        found.setdefault(tool.name, tool)
    return list(found.values())


def _noun(rng: random.Random, split: Split) -> str:
    """What a tool is about. Often a word that means nothing in training, so that names are read and not known."""
    if split == "train" and rng.random() < _INVENTED_SHARE:
        return invented_word(rng)
    return rng.choice(NOUNS[split])


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
        "with": worded(rng, values),
    }
    result = str(tool.result(rng))
    arguments = {f.name: value for f, value in values}
    return ToolUse(
        name=tool.name,
        question=capital(tool.question(rng).replace("{do}", tool.does)).format_map(words),
        arguments=arguments,
        call=f'{{"name":{compact(tool.name)},"args":{compact(arguments)}}}',
        result=result,
        answer=tool.answer.format(a=words["a"], r=result),
    )


def _generated(rng: random.Random, split: Split, verb: str, noun: str) -> Tool:
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
        question=_QUESTION[split],
        answer="The result is {r}.",
        result=_result,
    )


def _result(rng: random.Random) -> Scalar:
    return rng.choice(_RESULTS) if rng.random() < 0.5 else rng.choice((rng.randrange(1, 5000), invented_word(rng)))
