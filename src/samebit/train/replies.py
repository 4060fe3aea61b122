"""What a generated reply is: whether it loops, is one message, and holds JSON that satisfies a schema.

Pure functions of tokens and JSON values; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samebit.core.errors import ConfigError
from samebit.engine.tokenizer import Tokenizer
from samebit.train.tokens import SPECIAL_TOKENS

LOOP_TOKENS = 96
LOOP_BLOCK = 48
LOOP_REPEATS = 3

_END_MESSAGE = SPECIAL_TOKENS.index("<|end_message|>")
_END_TURN = SPECIAL_TOKENS.index("<|content_model_end_sampling|>")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip
_KEYWORDS = {"type", "enum", "properties", "required", "items", "additionalProperties", "description", "title"}


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the model. `author`: what stands before the kind (a tool's name); `kind`: its content token's spelling."""

    author: str
    kind: str
    body: str


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether the end is a block of at most 48 tokens again and again: at least 3 times, and for at least 96 tokens."""
    return any(
        _has_period(token_ids[-max(LOOP_TOKENS, LOOP_REPEATS * period) :], period)
        for period in range(1, LOOP_BLOCK + 1)
        if len(token_ids) >= max(LOOP_TOKENS, LOOP_REPEATS * period)
    )


def only_message(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Message | None:
    """The message that a finished turn, from behind `<|message_model|>` on, consists of; None if it is anything else."""
    if list(token_ids[-2:]) != [_END_MESSAGE, _END_TURN]:
        return None
    inner = list(token_ids[:-2])
    marks = [i for i, token in enumerate(inner) if token in tokenizer.special_ids]
    if len(marks) != 1:
        return None
    at = marks[0]
    return Message(tokenizer.decode(inner[:at]), tokenizer.token_text(inner[at]), tokenizer.decode(inner[at + 1 :]))


def parse_json(text: str) -> Any:  # Any: a JSON value
    """The value of a JSON text, strictly; raises ValueError for anything else, NaN and repeated names included."""
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repetition)


def same_json(a: object, b: object) -> bool:
    """Whether two JSON values are equal; the order of names does not count, and 1, 1.0 and true are three values."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def satisfies(value: object, schema: Mapping[str, Any]) -> bool:  # Any: JSON
    """Whether a JSON value satisfies a JSON schema of types, enumerations, objects and lists; undeclared names do not pass.

    Raises ConfigError for a keyword it does not know: what cannot be checked must not pass.
    """
    unknown = schema.keys() - _KEYWORDS
    if unknown or schema.get("additionalProperties") not in (None, False):
        raise ConfigError(f"schema keyword {', '.join(sorted(unknown)) or 'additionalProperties'}: is not checked here")
    if "enum" in schema and not any(same_json(value, choice) for choice in schema["enum"]):
        return False
    kind = schema.get("type")
    # In Python a truth value is an integer; in JSON it is not.
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if set(schema.get("required", ())) - value.keys() or value.keys() - properties.keys():
            return False
        return all(satisfies(item, properties[name]) for name, item in value.items())
    return not isinstance(value, list) or all(satisfies(item, schema.get("items", {})) for item in value)


def is_valid_call(message: Message | None, declared: Sequence[Mapping[str, Any]]) -> bool:  # Any: JSON
    """Whether a message calls one of the `declared` tools in the chat format, with arguments that satisfy its parameters."""
    call = called(message)
    tool = next((t for t in declared if call is not None and t["name"] == call["name"]), None)
    return call is not None and tool is not None and satisfies(call["args"], tool["parameters"])


def called(message: Message | None) -> dict[str, Any] | None:  # Any: JSON
    """The call that a message holds, an object with `name` and `args`; None if it is no call."""
    if message is None or message.kind != "<|content_invoke_tool_json|>":
        return None
    call = parsed(message)
    is_call = isinstance(call, dict) and call.keys() == {"name", "args"} and call["name"] == message.author
    return call if is_call else None


def parsed(message: Message | None) -> Any:  # Any: a JSON value
    """The JSON value that a message consists of; None if there is none (no schema of ours asks for null)."""
    try:
        return None if message is None else parse_json(message.body)
    except ValueError:
        return None


def _has_period(token_ids: Sequence[int], period: int) -> bool:
    return list(token_ids[period:]) == list(token_ids[:-period])


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found
