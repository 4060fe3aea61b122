"""The items that POST /v1/responses takes as its input, and the messages of the conversation that they are. Knows types only."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from samebit.core.errors import InvalidRequestError
from samebit.server.body import Body, described
from samebit.server.request_models import ChatMessage
from samebit.server.tool_models import UNKNOWN_TYPE, SentFunction, SentToolCall


class InputPart(Body):
    """A piece of text of either side; what else an earlier answer said of it is passed over."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # Any: remarks of an earlier answer, which no template reads
    logprobs: list[Any] | None = None  # Any: as above
    parsed: Any = None  # Any: what a client made of the text


class InputMessage(Body):
    """A message of the conversation so far: the client's, or one of an earlier answer as it was."""

    type: Literal["message"] | None = None
    role: str
    content: Annotated[
        str | list[InputPart],
        described(
            "a string or a list of parts of type 'input_text' or 'output_text'; no other content is supported",
            names_items=True,
        ),
    ]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningPart(Body):
    """A piece of thinking."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What an earlier answer thought."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None  # Any: there is never one
    content: list[ReasoningPart] | None = None
    encrypted_content: None = None
    status: str | None = None


class CallItem(Body):
    """What an earlier answer called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None  # Any: what a client made of them
    id: str | None = None
    status: str | None = None


class CallOutput(Body):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str | list[InputPart], described("a string or a list of parts of text", names_items=True)]
    id: str | None = None
    status: str | None = None


_KINDS: dict[str, type[Body]] = {
    "message": InputMessage,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutput,
}


def _by_type(value: object, _: ValidatorFunctionWrapHandler) -> object:
    """What is wrong with an item is told of the kind that it says it is, not of all."""
    if not isinstance(value, dict):
        raise PydanticCustomError("shape", "must be an object")
    kind = value.get("type") or "message"
    if not isinstance(kind, str) or kind not in _KINDS:
        text = "{kind} is not supported; only " + ", ".join(map(repr, _KINDS)) + " are"
        raise PydanticCustomError(UNKNOWN_TYPE, text, {"kind": repr(kind)[:64]})
    return _KINDS[kind].model_validate(value)


InputItem = Annotated[InputMessage | ReasoningItem | CallItem | CallOutput, WrapValidator(_by_type)]


def messages_of(items: Sequence[InputItem]) -> Iterator[ChatMessage]:
    """The conversation. Items of one turn of the model, in the order thinking, text, calls, are one message.

    Raises InvalidRequestError for a result of no call.
    """
    turn: dict[str, Any] = {}  # Any: fields of ChatMessage
    called = set()
    for item in items:
        more = _of_model(item)
        if more is None or not _goes_on(turn, more):
            yield from _message(turn)
            turn = {}
        if isinstance(item, CallItem):
            called.add(item.call_id)
        if more is not None:
            turn = {**turn, **more, "tool_calls": [*turn.get("tool_calls", ()), *more.get("tool_calls", ())]}
        elif isinstance(item, CallOutput):
            if item.call_id not in called:
                raise InvalidRequestError(f"input: no call has the id {item.call_id[:64]!r}", param="input")
            yield ChatMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id)
        elif isinstance(item, InputMessage):
            yield ChatMessage(role=item.role, content=_text(item.content))
    yield from _message(turn)


def _message(turn: dict[str, Any]) -> Iterator[ChatMessage]:  # Any: as above
    fields = {name: value for name, value in turn.items() if value != []}
    if fields:
        yield ChatMessage.model_construct(role="assistant", **fields)


def _of_model(item: InputItem) -> dict[str, Any] | None:  # Any: as above
    """What an item of the model's adds to its message; None for others."""
    match item:
        case ReasoningItem():
            return {"reasoning_content": "".join(part.text for part in item.content or ())}
        case CallItem():
            function = SentFunction(name=item.name, arguments=item.arguments)
            return {"tool_calls": [SentToolCall(id=item.call_id, type="function", function=function)]}
        case InputMessage(role="assistant"):
            return {"content": _text(item.content)}
    return None


def _goes_on(turn: dict[str, Any], more: dict[str, Any]) -> bool:  # Any: as above
    """Whether `more` stands behind all that the message has."""
    order = ("reasoning_content", "content", "tool_calls")
    begun = max((order.index(name) for name in turn if turn[name] != []), default=-1)
    return order.index(next(iter(more))) > begun or ("tool_calls" in more and bool(turn.get("tool_calls")))


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
