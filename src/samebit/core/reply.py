"""The grammar of a model's reply in Inkling's message format, over token ids alone, and what a reply's pieces are.

A message is `<|message_ROLE|>`, perhaps a name, `<|content_KIND|>`, a body and `<|end_message|>`; a turn of the model is one
or more of them and `<|content_model_end_sampling|>`. Knows ids and where a token leaves off; no text and no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Self

import msgspec

# What a token is for: a body of a kind, or none of the client's business.
TokenKind = Literal["reasoning", "content", "call", "control"]
PieceKind = Literal["reasoning", "content", "call"]

_ROLE, _CONTENT = "<|message_", "<|content_"
_MODEL, _TEXT = "<|message_model|>", "<|content_text|>"
_THINKING, _CALL = "<|content_thinking|>", "<|content_invoke_tool_json|>"
_END, _END_OF_TURN = "<|end_message|>", "<|content_model_end_sampling|>"


class Place(Enum):
    """Where in a reply a token has led: between messages, in a message's header, or in a body of a kind."""

    BETWEEN = "between"
    HEADER = "header"
    THINKING = "thinking"
    TEXT = "text"
    CALL = "call"


_PLACES = {_THINKING: Place.THINKING, _CALL: Place.CALL}


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The control tokens of one vocabulary. `leads_to`: the place behind a token, wherever it stands; `others` lead nowhere.

    A content token of a kind that is not known begins a text. `model` begins a message of the model's; `text`, `thinking` and
    `call` begin a body of that kind.
    """

    leads_to: Mapping[int, Place]
    others: frozenset[int]
    model: int
    text: int
    thinking: int | None
    call: int | None
    end_message: int
    end_of_turn: int | None

    @classmethod
    def of(cls, special_tokens: Mapping[str, int]) -> Self | None:
        """The format that control tokens (by their spelling) make up; None if a model with them speaks another."""
        if not all(name in special_tokens for name in (_MODEL, _TEXT, _END)):
            return None
        leads_to = {}
        for name, token_id in special_tokens.items():
            if name in (_END, _END_OF_TURN):
                leads_to[token_id] = Place.BETWEEN
            elif name.startswith(_ROLE):
                leads_to[token_id] = Place.HEADER
            elif name.startswith(_CONTENT):
                leads_to[token_id] = _PLACES.get(name, Place.TEXT)
        others = frozenset(special_tokens.values()) - leads_to.keys()
        return cls(
            leads_to,
            others,
            model=special_tokens[_MODEL],
            text=special_tokens[_TEXT],
            thinking=special_tokens.get(_THINKING),
            call=special_tokens.get(_CALL),
            end_message=special_tokens[_END],
            end_of_turn=special_tokens.get(_END_OF_TURN),
        )

    def is_control(self, token_id: int) -> bool:
        """Whether the token is no part of any text."""
        return token_id in self.leads_to or token_id in self.others

    def after(self, place: Place, token_id: int) -> Place:
        """The place behind `token_id`. Every token is taken: text between messages begins one without a header."""
        led = self.leads_to.get(token_id)
        if led is not None:
            return led
        return Place.TEXT if place is Place.BETWEEN and token_id not in self.others else place

    def after_all(self, token_ids: Iterable[int], place: Place = Place.BETWEEN) -> Place:
        """The place behind many tokens, such as a prompt's."""
        for token_id in token_ids:
            place = self.after(place, token_id)
        return place

    def open_message(self, prompt: Sequence[int]) -> Sequence[int]:
        """The end of a prompt from where its last message begins or ends: what a reply to it goes on with."""
        for index in range(len(prompt) - 1, -1, -1):
            if self.leads_to.get(prompt[index]) in (Place.HEADER, Place.BETWEEN):
                return prompt[index:]
        return prompt[:0]


class ReplyPiece(msgspec.Struct, frozen=True, array_like=True):
    """What a reply gained: reasoning, content, or a call's arguments. The first piece of a call has its name and no arguments.

    `call_index` numbers the calls of a reply from 0; it is -1 for other kinds.
    """

    kind: PieceKind
    text: str
    call_index: int = -1
    name: str = ""


def joined(pieces: Iterable[ReplyPiece]) -> list[ReplyPiece]:
    """The same in as few pieces as say it: neighbours of one kind and call become one, but names stand alone."""
    result: list[ReplyPiece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if last is None or piece.name or last.name or (last.kind, last.call_index) != (piece.kind, piece.call_index):
            result.append(piece)
        else:
            result[-1] = ReplyPiece(piece.kind, last.text + piece.text, piece.call_index)
    return result
