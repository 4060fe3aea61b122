"""The items of a response, and what a stream says of them as they come. Knows shapes; no bytes and no sockets."""

from collections.abc import Iterator, Sequence
from typing import Any

from samebit.core.reply import ReplyPiece
from samebit.server.reply_view import ReplyView
from samebit.server.response_models import ChatTokenLogprob
from samebit.server.responses_models import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseStatus,
)

Event = tuple[str, dict[str, Any]]  # Any: fields of an event


class ResponseItems:
    """Owner of the items of one response, of which the last may be open. `done`: those that are complete."""

    def __init__(self, view: ReplyView, request_id: str) -> None:
        self._view = view
        self._request_id = request_id
        self._open: ReplyPiece | None = None
        self._text = ""
        self._logprobs: list[ChatTokenLogprob] = []
        self._waiting: list[ChatTokenLogprob] = []
        self.done: list[OutputItem] = []

    def take(self, pieces: Sequence[ReplyPiece], logprobs: Sequence[ChatTokenLogprob]) -> Iterator[Event]:
        """Events of more of a reply. Logprobs go with the next text, or with the open one if there is none."""
        self._waiting += logprobs
        for piece in pieces:
            is_same = self._open is not None and (self._open.kind, self._open.call_index) == (
                piece.kind,
                piece.call_index,
            )
            if not is_same:
                yield from self._close("completed")
                yield from self._begin(piece)
            yield from self._delta(piece.text)
        if self._waiting and self._open is not None and self._open.kind == "content":
            yield from self._delta("")

    def end(self, status: ResponseStatus) -> Iterator[Event]:
        """Events of the end. A response without anything is an empty text."""
        if self._open is None:
            yield from self.take([ReplyPiece("content", "")], [])
        yield from self._close(status)

    def _begin(self, piece: ReplyPiece) -> Iterator[Event]:
        self._open, self._text, self._logprobs = piece, "", []
        yield "response.output_item.added", {"output_index": len(self.done), "item": self._item("in_progress")}
        if piece.kind != "call":
            yield "response.content_part.added", {**self._where(), "part": self._part()}

    def _delta(self, text: str) -> Iterator[Event]:
        assert self._open is not None, "a piece has begun an item"
        self._text += text
        fields: dict[str, Any] = {**self._where(), "delta": text}  # Any: fields of an event
        kind = {"content": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
        if self._open.kind == "content":
            fields["logprobs"], self._waiting = self._waiting, []
            self._logprobs += fields["logprobs"]
        if text or fields.get("logprobs"):
            yield f"response.{kind[self._open.kind]}.delta", fields

    def _close(self, status: ResponseStatus) -> Iterator[Event]:
        if self._open is None:
            return
        where = self._where()
        if self._open.kind == "call":
            yield "response.function_call_arguments.done", {**where, "name": self._open.name, "arguments": self._text}
        elif self._open.kind == "reasoning":
            yield "response.reasoning_text.done", {**where, "text": self._text}
            yield "response.content_part.done", {**where, "part": self._part()}
        else:
            yield "response.output_text.done", {**where, "text": self._text, "logprobs": self._logprobs}
            yield "response.content_part.done", {**where, "part": self._part()}
        item = self._item(status)
        yield "response.output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open = None

    def _where(self) -> dict[str, Any]:  # Any: fields of an event
        assert self._open is not None, "something is open"
        place = {"item_id": self._item_id(), "output_index": len(self.done)}
        return place if self._open.kind == "call" else {**place, "content_index": 0}

    def _item_id(self) -> str:
        assert self._open is not None, "something is open"
        kind = {"content": "msg", "reasoning": "rs", "call": "fc"}[self._open.kind]
        return f"{kind}-{self._request_id}" + (f"-{len(self.done)}" if self.done else "")

    def _part(self) -> OutputText | ReasoningText:
        assert self._open is not None, "something is open"
        if self._open.kind == "reasoning":
            return ReasoningText(text=self._text)
        return OutputText(text=self._text, logprobs=self._logprobs)

    def _item(self, status: ResponseStatus) -> OutputItem:
        assert self._open is not None, "something is open"
        name, is_begun = self._item_id(), status != "in_progress"
        if self._open.kind == "call":
            call_id = self._view.call_id(self._open.call_index)
            return OutputCall(id=name, status=status, call_id=call_id, name=self._open.name, arguments=self._text)
        if self._open.kind == "reasoning":
            thought = [ReasoningText(text=self._text)] if is_begun else []
            return OutputReasoning(id=name, status=status, content=thought)
        said = [OutputText(text=self._text, logprobs=self._logprobs)] if is_begun else []
        return OutputMessage(id=name, status=status, content=said)
