"""Messages of the model whose sampled token ids are kept: where in a rendered conversation they stand. Knows no tokenizer.

A model's text can often be encoded in more than one way, and a template need not show a reply as the model wrote it. So that
the next turn of a chat is, token for token, what the model has state for, such a message is rendered as one stand-in
character, and what the template writes around it tells where the reply begins (behind what opens a turn) and ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samebit.core.errors import InvalidRequestError

Message = Mapping[str, Any]  # Any: a JSON value, whose shape is the template's business

KEPT = "\udffe"
"""Stands for a reply; no valid text holds it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template writes around the text of a reply: `opening` is what also opens a turn that has yet to be sampled."""

    opening: str
    head: str
    tail: str


def kept_ids(messages: Sequence[Message]) -> dict[int, list[int]]:
    """Token ids by the index of the message. Raises InvalidRequestError where there can be none."""
    kept = {}
    for index, message in enumerate(messages):
        ids = message.get("token_ids")
        if ids is None:
            continue
        if message.get("role") != "assistant":
            raise InvalidRequestError(
                f"messages.{index}.token_ids: only a message of the assistant has them",
                param=f"messages.{index}.token_ids",
            )
        if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
            raise InvalidRequestError(
                f"messages.{index}.token_ids: must be a list of token ids", param=f"messages.{index}.token_ids"
            )
        kept[index] = ids
    return kept


def with_stand_ins(messages: Sequence[Message], kept: Mapping[int, Sequence[int]]) -> list[Message]:
    """The messages, each kept one as a stand-in; results of tools are named, because the calls are not shown."""
    names: dict[str, str] = {}
    result: list[Message] = []
    for index, message in enumerate(messages):
        names |= _names_of_calls(message)
        if index in kept:
            result.append({"role": message["role"], "content": KEPT})
        elif message.get("role") == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            result.append({**message, "name": names[message["tool_call_id"]]})
        else:
            result.append(message)
    return result


def _names_of_calls(message: Message) -> dict[str, str]:
    try:
        return {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or () if call.get("id")}
    except (AttributeError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"messages: a call of a tool has no {error}", param="messages") from error


def frame_of(before: str, opened: str, closed: str) -> Frame:
    """The frame that shows in three renderings up to a stand-in: without it, with the next turn opened, and with it."""
    shown, found, tail = closed.rpartition(KEPT)
    head, opening = shown[len(before) :], opened[len(before) :]
    if not (found and shown.startswith(before) and opened.startswith(before) and head.startswith(opening)):
        raise _unsuitable()
    return Frame(opening, head, tail)


def around(text: str, frame: Frame, count: int) -> list[str]:
    """The text before, between and behind `count` replies. The last reply may be unfinished: then nothing is behind it."""
    parts = text.split(KEPT)
    if len(parts) != count + 1:
        raise _unsuitable()
    result = []
    for index, part in enumerate(parts):
        rest = part
        if index and not (index == count and not rest):
            if not rest.startswith(frame.tail):
                raise _unsuitable()
            rest = rest[len(frame.tail) :]
        if index < count:
            if not rest.endswith(frame.head):
                raise _unsuitable()
            rest = rest[: len(rest) - len(frame.head)] + frame.opening
        result.append(rest)
    return result


def completed(reply: Sequence[int], tail: Sequence[int]) -> list[int]:
    """A reply with as much of the tail as it lacks: one that was cut off was not ended by the model."""
    size = next(n for n in range(len(tail), -1, -1) if [*reply[len(reply) - n :]] == [*tail[:n]] and n <= len(reply))
    return [*reply, *tail[size:]]


def _unsuitable() -> InvalidRequestError:
    return InvalidRequestError(
        "messages: token_ids cannot be kept, because the chat template does not show an earlier message as the model wrote it; "
        "leave them out",
        param="messages",
    )
