"""What POST /v1/responses answers: the response, and the events of one that is streamed. Knows shapes only."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from samebit.server.response_models import (
    AnswerMetrics,
    ChatTokenLogprob,
    CompletionTokensDetails,
    ErrorDetail,
    PromptTokensDetails,
)

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """The answer's text. There are never annotations."""

    text: str
    logprobs: list[ChatTokenLogprob] = []
    annotations: list[str] = []
    type: Literal["output_text"] = "output_text"


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The answer as an item of the conversation."""

    id: str
    status: ResponseStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    """Thinking, as the model thought it."""

    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought. There is never a summary."""

    id: str
    status: ResponseStatus
    content: list[ReasoningText]
    summary: list[str] = []


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a tool; its result is sent back under `call_id`."""

    id: str
    status: ResponseStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseText(msgspec.Struct, frozen=True):
    """The format of the text."""

    format: dict[str, Any]  # Any: JSON, as the client sent it


class ResponseReasoning(msgspec.Struct, frozen=True):
    """The effort that was asked for."""

    effort: str | float | None
    summary: None = None


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of /v1/responses. `store` is false: it cannot be asked for again."""

    id: str
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    reasoning: ResponseReasoning
    metadata: dict[str, str]
    user: str | None
    seed: int
    system_fingerprint: str
    usage: ResponseUsage | None = None
    metrics: AnswerMetrics | UnsetType = UNSET
    incomplete_details: IncompleteDetails | None = None
    error: ErrorDetail | None = None
    text: ResponseText = ResponseText({"type": "text"})
    object: Literal["response"] = "response"
    background: bool = False
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    tool_choice: str | dict[str, str] = "auto"
    tools: list[dict[str, Any]] = []  # Any: as they were sent
    truncation: Literal["disabled"] = "disabled"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a streamed answer; which fields it has is told by its type."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    error: ErrorDetail | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
