"""What an answer must be, as a grammar in llguidance's language, over the whole reply from behind the prompt on.

A reply in Inkling's message format is thinking, which is free, and then the text or the calls that are asked for; messages and
turns end where the grammar allows it. So the grammar knows by itself which part of a reply a token belongs to. Where a
prompt is no conversation, the text is all there is. Knows token ids and text; compiles nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from samebit.core.errors import InvalidRequestError
from samebit.core.reply import MessageFormat
from samebit.core.structured import StructuredOutputsParams

# Between the parts of a JSON text: a space, or the end of a line and what the next is indented by. Without such a bound a model
# can go on with white space for ever.
_JSON_OPTIONS = {"whitespace_pattern": r" |\r?\n[ \t]{0,64}", "lenient": False}

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

Part = dict[str, Any]  # Any: JSON of llguidance's


@dataclass(frozen=True, slots=True)
class Definition:
    """A grammar: how a reply goes on behind the prompt, and named parts of it which the caller has written."""

    reply: str
    parts: tuple[Part, ...]

    def text(self) -> str:
        """The grammar as llguidance takes it."""
        return json.dumps({"grammars": [{"lark_grammar": self.reply}, *self.parts]})


def define(
    wanted: StructuredOutputsParams,
    prompt: Sequence[int],
    end_ids: Iterable[int],
    message_format: MessageFormat | None,
    free: str,
) -> Definition:
    """The grammar of the reply to `prompt` that ends with one of `end_ids`; `free` is a rule's body that allows one token of any text.

    Raises InvalidRequestError for what is no schema, grammar or choice on its face.
    """
    answer = None if wanted.kind is None else {"name": "answer", **_answer_part(wanted)}
    ends = ",".join(map(str, sorted(set(end_ids))))
    finish = f"<[{ends}]>" if ends else '""'
    place = None if message_format is None else _place(prompt, message_format)
    if message_format is None or place is None:
        if answer is None:
            raise InvalidRequestError(
                f"{wanted.field}: tools need a conversation, with a model that has the message format of Inkling's",
                param=wanted.field,
            )
        return Definition(f"start: @answer {finish}\n", (answer,))
    tools = wanted.tools if message_format.call is not None else []
    if wanted.must_call and not tools:
        raise InvalidRequestError(f"{wanted.field}: this model has no token that begins a call", param=wanted.field)
    rules = _rules(message_format, place, [tool.name for tool in tools], wanted, finish)
    rules["free"] = f"({free})*"
    parts = [] if answer is None else [answer]
    parts += [
        {"name": f"args_{number}", **_schema_part({"type": "object"} | tool.parameters)}
        for number, tool in enumerate(tools)
    ]
    return Definition("".join(f"{name}: {body}\n" for name, body in rules.items()), tuple(parts))


def _place(prompt: Sequence[int], message_format: MessageFormat) -> str | None:
    """Where in a message the prompt ends, by the name of a rule below; None if it is in none of the model's."""
    match list(message_format.open_message(prompt)):
        case [message_format.model]:
            return "reply"
        case [token] if token in (message_format.end_message, message_format.end_of_turn):
            return "message"
        case [message_format.model, message_format.thinking, *_]:
            return "thought_on"
        case [message_format.model, message_format.text, *_]:
            return "text_on"
    return None


def _rules(
    message_format: MessageFormat, place: str, tools: Sequence[str], wanted: StructuredOutputsParams, finish: str
) -> dict[str, str]:
    """Rules of a reply, by name; what cannot be reached is left out by the library."""
    end, model = f"<[{message_format.end_message}]>", f"<[{message_format.model}]>"
    body = "free" if wanted.kind is None else "@answer"
    rules = {
        "start": place,
        "message": f"{model} reply",
        "reply": "turn" if message_format.thinking is None else f"<[{message_format.thinking}]> thought_on | turn",
        "thought_on": f"free {end} message",
        "text_on": f"{body} {end} finish",
        "finish": finish,
        "turn": f"<[{message_format.text}]> text_on",
    }
    if tools:
        again = "calls" if wanted.may_call_again else "finish"
        rules["calls"] = f"finish | {model} call {end} {again}"
        rules["text_on"] = f"{body} {end} " + ("calls" if not wanted.must_call else f"{model} called")
        rules["called"] = f"call {end} {again}"
        rules["turn"] = "called" if wanted.must_call else f"<[{message_format.text}]> text_on | called"
        rules["call"] = " | ".join(f"call_{number}" for number in range(len(tools)))
        for number, name in enumerate(tools):
            begin = f'{{"name":{json.dumps(name)},"args":'
            rules[f"call_{number}"] = f'{_quoted(name)} <[{message_format.call}]> {_quoted(begin)} @args_{number} "}}"'
    return rules


def _answer_part(wanted: StructuredOutputsParams) -> Part:
    """The answer's text as a grammar of its own."""
    if wanted.json_object:
        return _schema_part({"type": "object"})
    schema = wanted.schema()
    if schema is not None:
        return _schema_part(schema)
    if wanted.choice is not None:
        # One word of the lexer: as rules, each text would be an item of the parser.
        return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(_quoted, wanted.choice))}
    if wanted.regex is not None:
        found: Part = json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]
        return {"lark_grammar": found["lark_grammar"]}
    assert wanted.grammar is not None, "one field says what the text is"
    if not _GBNF_RULE.search(wanted.grammar):
        return {"lark_grammar": wanted.grammar}
    try:
        return {"lark_grammar": gbnf_to_lark(wanted.grammar)}
    except Exception as error:  # a converter that is not ours, on text that is not ours
        raise InvalidRequestError(
            f"{wanted.field}: grammar: not to be read as GBNF: {str(error)[:300]}", param=wanted.field
        ) from error


def _schema_part(schema: dict[str, Any]) -> Part:  # Any: a JSON schema
    return {"json_schema": schema | {"x-guidance": _JSON_OPTIONS}}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def part_name(wanted: StructuredOutputsParams, part: Part) -> str:
    """What a message calls a part of a definition."""
    number = str(part["name"]).removeprefix("args_")
    return f"parameters of tool {wanted.tools[int(number)].name!r}" if number.isdecimal() else str(wanted.kind)
