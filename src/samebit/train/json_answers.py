"""Questions that want JSON for a schema; a sentence beside it or what was told earlier gives the values. Knows no dialogue."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from samebit.train.fields import NOUNS, Scalar, compact, fields, object_schema, worded
from samebit.train.forms import capital
from samebit.train.noise import REMARKS, around, remarked
from samebit.train.transcript import ANSWER, WORDING, Pieces
from samebit.train.words import Split


@dataclass(frozen=True, slots=True)
class JsonTask:
    """A question and the object that answers it; `schema` describes the object and stands in the question."""

    question: str
    schema: Mapping[str, object]
    expected: Mapping[str, Scalar]


# {s}: the schema; {x}: the sentence that has the values.
_PROBE_QUESTIONS = (
    "Represent this as JSON. {x} The schema: {s}", "I need a JSON object that follows {s} for this text: {x}",
    "Please convert the text to JSON.\nSchema: {s}\nText: {x}", "{x} Return JSON according to {s}",
)  # fmt: skip
_LISTS = {
    "do": ("[write|put|pack|bring|turn|cast|render] [it|this|that] [as|into|in] JSON", "[make|build|give me|show me|send me] [JSON|an object|the JSON]",
           "answer [in|with] JSON", "[extract|read off|collect|pick out] the values as JSON", "[fill in|fill|complete] the schema", "reply in JSON only"),
    "under": ("the schema is {s}", "schema: {s}", "the schema [to use|for it|that counts] is {s}", "[it|the object|the result] must fit {s}", "{s}",
              "[stick|keep] to the schema {s}", "[take|use|mind|obey] the schema {s}", "JSON schema: {s}", "allowed is {s}", "[this is|here is] the schema: {s}"),
    "text": ("{x}", "text: {x}", "sentence: {x}", "[here is|this is|read] [a|the] text: {x}", "[a|my|the] note says: {x}", "<who> wrote: {x}", "input: {x}",
             "[I have|we got|I found] this: {x}", "message from <who>: {x}", "<when>: {x}"),
    "so": (":", ".", ", please.", " [now|for me|for <who>]."),
    "gap": (" ", " ", "\n"),
}  # fmt: skip
_QUESTIONS = around((
    "<do> [for|under|that fits|with] the schema {s}<so><gap><text>", "<text><gap><do> [for|under|that fits|with] the schema {s}",
    "<under><gap><text>", "<text><gap><under>", "<do><so><gap><text><gap><under>", "<do><so><gap><under><gap><text>", "<under><gap><do><so><gap><text>",
    "<text><gap><do><so><gap><under>", "<under><gap><text><gap><do><so>", "[using|with|given|for] the schema {s}, <do><so><gap><text>",
    "[can|could] you <do> [for|with|under] {s}? <text>", "<text><gap>[can|could] you <do> [for|with|under] {s}?", "what is this in JSON for {s}? <text>",
), _LISTS)  # fmt: skip
_PROBE_TOLD = ("This {n} comes with {w}.", "I received the {n} with {w}.", "Our {n} has {w}.")
_TOLD = around((
    "[the|a|my|your|one|every|this|that] [|new |old |last |next ]{n} [has|had|got|shows|carries|gets|needs|is given|will have] {w}.", "{n}: {w}.",
    "[a|the|my|one] {n} with {w}.", "there is a {n}: {w}.", "{w}; that is the {n}.", "[we|they|<who>] [got|bought|made|sold|sent] a {n} with {w}.",
    "<who> has [a|the] {n} with {w}.", "[about|as for|on] the {n}: {w}.", "{w}.", "the {n} ({w}) is [ready|new|fine|here|in <city>].", "with {w}: the {n}.",
    "the {n} from [<who>|<city>] has {w}.", "[for|on] the {n} [we|I|they] [noted|read|put down|wrote] {w}.", "I see a {n} with {w} in <city>.",
    "<when> <who> [asked for|ordered|mentioned] a {n} with {w}.", "what I know about the {n} is {w}.", "the {n} [is described by|goes by] {w}.",
))  # fmt: skip
_PROBE_ABOUT = ("Summarise the {t} in JSON that follows {s}", "I need the {t} as JSON. The schema is {s}")
_ABOUT = around((
    "[describe|show me|give me|write|list|print|state] [|all about ]the {t} [as JSON|in JSON|as a JSON object]<so><gap><under>",
    "what [do you know|did I say|have I told you] about the {t}? Answer in JSON<so><gap><under>", "JSON for the {t}, please<so><gap><under>",
    "[fill in|complete] [this|the] schema for the {t}: {s}", "[using|with|given|for] the schema {s}, [tell me|say what you know] about the {t}.",
    "<under><gap>[now the {t}|make it about the {t}|fill it in for the {t}|the {t} in JSON], please.", "the {t} as JSON[|, please]<so><gap><under>",
    "[can|could] you [describe|show|list] the {t} [in|as] JSON? <under>", "<who> asks about the {t}. Answer in JSON<so><gap><under>",
), _LISTS)  # fmt: skip


def json_task(rng: random.Random, split: Split) -> JsonTask:
    """An object of one to four fields, whose values a sentence tells."""
    values = [(f, f.draw(rng)) for f in fields(rng, split, rng.choice((1, 2, 2, 3, 3, 4)))]
    schema = object_schema({f.name: f.schema for f, _ in values}, [f.name for f, _ in values])
    told = rng.choice(_PROBE_TOLD) if split == "probe" else _TOLD.draw(rng)
    if split == "train":
        told = remarked(rng, capital(told), REMARKS, 0.08)
    told = told.format(n=rng.choice(NOUNS[split]), w=worded(rng, values))
    expected = {f.name: value for f, value in sorted(values, key=lambda pair: pair[0].name)}
    asked = rng.choice(_PROBE_QUESTIONS) if split == "probe" else capital(_QUESTIONS.draw(rng))
    return JsonTask(asked.format(s=compact(schema), x=told), schema, expected)


def task_about(rng: random.Random, split: Split, thing: str, known: Mapping[str, str]) -> JsonTask:
    """An object of what was told about a thing earlier, by attribute; values of digits alone are integers."""
    attributes = sorted(rng.sample(sorted(known), min(len(known), 4)))
    told = {name.replace(" ", "_"): known[name] for name in attributes}
    expected = {name: int(value) if value.isdigit() else value for name, value in told.items()}
    kinds = {name: {"type": "integer" if isinstance(value, int) else "string"} for name, value in expected.items()}
    schema = object_schema(kinds, list(kinds))
    asked = rng.choice(_PROBE_ABOUT) if split == "probe" else capital(_ABOUT.draw(rng))
    return JsonTask(asked.format(t=thing, s=compact(schema)), schema, expected)


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
