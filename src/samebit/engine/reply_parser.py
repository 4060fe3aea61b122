"""Takes a model's reply apart, token by token: reasoning, content, calls of tools. Knows messages, no requests.

Where a token belongs is told by control tokens alone. Nothing that a model can say is an error:

- A header's name is kept back until a content token follows. If none does, or if it is long, it was content.
- A call is taken for one once its body has said `{"name": ..., "args": {`, with the name of the header if there is one; from
  then on its arguments are passed on as they come. A body that never says so, and is no such object in another order
  either, was content. What follows the arguments is passed over.
- A message that is cut off, or broken off by another one, ends there: what has been said of it stands.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from samebit.core.reply import MessageFormat, PieceKind, Place, ReplyPiece, TokenKind, joined
from samebit.engine.detokenizer import IncrementalDetokenizer
from samebit.engine.tokenizer import Tokenizer

_MAX_NAME_BYTES = 128
_MAX_NAME_TOKENS = 64
# Names are short, so a longer beginning of a call is not looked at again before its end.
_MAX_OPENING_CHARS = 1024
_OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"args"\s*:\s*(?=\{)')


class ReplyParser:
    """One reply. Owned by one request; mutable. Small, but for a call's body while it may still turn out to be content.

    Content goes through `detokenizer`, which finds stop strings in it: once it has a match, no token may be pushed.
    """

    def __init__(
        self, message_format: MessageFormat, tokenizer: Tokenizer, detokenizer: IncrementalDetokenizer
    ) -> None:
        self._format = message_format
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._name = b""
        self._call = _Call("")
        self._pieces: list[ReplyPiece] = []
        self._kinds: list[TokenKind] = []
        # Tokens of a header, or of the opening of a call: not known yet to be what they seem.
        self._held: list[int] = []
        self.place = Place.BETWEEN
        """Where the last token has led."""
        self.num_calls = 0
        self.has_ended_call = False
        """Whether the message of a call has ended."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start where the prompt leaves off: in a header, or in a message that is to be continued."""
        before = ReplyParser(self._format, self._tokenizer, IncrementalDetokenizer(self._tokenizer))
        for token_id in self._format.open_message(prompt):
            before.push(token_id)
        self.place, self._call = before.place, before._call
        self._name = before._header() if self.place is Place.HEADER else b""
        if self.place is Place.CALL and self._call.is_open:
            self._call.is_told = False
            self._tell_call("")

    def push(self, token_id: int) -> None:
        """Take the next token."""
        was, self.place = self.place, self._format.after(self.place, token_id)
        if token_id in self._format.leads_to:
            self._turn(was)
            self._count("control")
        elif self.place is Place.HEADER:
            self._held.append(token_id)
            if len(self._held) > _MAX_NAME_TOKENS or len(self._header()) > _MAX_NAME_BYTES:
                self._release()
                self.place = Place.TEXT
        elif self.place is Place.TEXT:
            self._speak(token_id)
        elif token_id in self._format.others:
            self._count("control")
        else:
            text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
            if self.place is Place.CALL:
                self._call_on(token_id, text)
            else:
                self._count("reasoning")
                self._add("reasoning", text)

    def finish(self) -> None:
        """There are no more tokens."""
        if self._detokenizer.match is None:
            self._close(self.place)
            self._add("content", self._detokenizer.finish())

    def take(self) -> tuple[list[ReplyPiece], list[TokenKind]]:
        """What is certain and was not taken before: pieces, and the kinds of the tokens, in order."""
        pieces, kinds = joined(self._pieces), self._kinds
        self._pieces, self._kinds = [], []
        return pieces, kinds

    def _turn(self, was: Place) -> None:
        """A control token has led from one place to another."""
        name = b""
        if was is Place.HEADER and self.place not in (Place.HEADER, Place.BETWEEN):
            name = self._header()
            self._settle("call" if self.place is Place.CALL else "control")
        else:
            self._close(was)
        self._name = b""
        if self.place is Place.CALL:
            self._call = _Call(name.decode("utf-8", "replace"))

    def _close(self, was: Place) -> None:
        """No more of the header or body that was open."""
        if was is Place.BETWEEN:
            return
        rest = "" if was in (Place.HEADER, Place.TEXT) else self._decoder.decode(b"", final=True)
        if was is Place.THINKING:
            self._add("reasoning", rest)
            return
        if was is Place.CALL:
            arguments = self._call.push(rest) + self._call.finish()
            if self._call.is_open:
                self._tell_call(arguments)
                self.has_ended_call = True
                return
        self._release()
        self._add("content", self._detokenizer.cut())

    def _call_on(self, token_id: int, text: str) -> None:
        """A token of a call's body."""
        self._held.append(token_id)
        arguments = self._call.push(text)
        if self._call.is_open:
            self._tell_call(arguments)

    def _tell_call(self, arguments: str) -> None:
        """It is a call."""
        self._settle("call")
        if not self._call.is_told:
            self._pieces.append(ReplyPiece("call", "", self.num_calls, self._call.name))
            self.num_calls += 1
            self._call.is_told = True
        self._add("call", arguments)

    def _header(self) -> bytes:
        return self._name + b"".join(map(self._tokenizer.token_bytes, self._plain(self._held)))

    def _plain(self, token_ids: Iterable[int]) -> Iterator[int]:
        return (token_id for token_id in token_ids if token_id not in self._format.others)

    def _settle(self, kind: TokenKind) -> None:
        """What was held is of this kind, and no content."""
        for token_id in self._held:
            self._count("control" if token_id in self._format.others else kind)
        self._held.clear()

    def _release(self) -> None:
        """What was held is content."""
        held, self._held = self._held, []
        for token_id in held:
            self._speak(token_id)

    def _speak(self, token_id: int) -> None:
        if token_id in self._format.others:
            self._count("control")
            return
        self._kinds.append("content")
        if self._detokenizer.match is None:
            self._add("content", self._detokenizer.push(token_id))

    def _count(self, kind: TokenKind) -> None:
        self._kinds.append(kind)
        self._detokenizer.pass_over()

    def _add(self, kind: PieceKind, text: str) -> None:
        if text:
            self._pieces.append(ReplyPiece(kind, text, self.num_calls - 1 if kind == "call" else -1))


class _Call:
    """The body of a call as it comes. Open: it is known to be one; `name` is then the tool's, else what the header says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = False
        self.is_told = False
        self._opening = ""
        self._depth = 0
        self._is_quoted = False
        self._is_escaped = False
        self._is_complete = False

    def push(self, text: str) -> str:
        """Take the next of the body; return what of it belongs to the arguments."""
        if not self.is_open:
            self._opening += text
            found = _OPENING.match(self._opening) if len(self._opening) <= _MAX_OPENING_CHARS else None
            if found is None or not self._accepts(_parsed(found[1])):
                return ""
            text = self._opening[found.end() :]
        return self._arguments(text)

    def finish(self) -> str:
        """The body is complete; the arguments, if it has turned out only now to be a call."""
        if self.is_open:
            return ""
        value = _parsed(self._opening)
        if not (isinstance(value, dict) and value.keys() == {"name", "args"} and isinstance(value["args"], dict)):
            return ""
        return json.dumps(value["args"]) if self._accepts(value["name"]) else ""

    def _accepts(self, name: object) -> bool:
        """Open it, if the name is one and is the header's."""
        is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_NAME_BYTES
        if is_name and name == (self.name or name):
            self.name, self.is_open = str(name), True
        return self.is_open

    def _arguments(self, text: str) -> str:
        for index, character in enumerate(text):
            if self._is_complete:
                return text[:index]
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped = character == "\\"
                self._is_quoted = character != '"'
            elif character == '"':
                self._is_quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                self._is_complete = self._depth == 0
        return text


def _parsed(text: str) -> Any:  # Any: a JSON value
    """None for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
