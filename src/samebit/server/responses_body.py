"""The body of POST /v1/responses, and the conversation that it is. Answers are not kept, so what refers to one is refused.

Knows types, as `request_models`, whose chat body it is turned into.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from samebit.server.request_models import Body, ChatBody, ChatMessage, SharedBody, Whole, described

_LOGPROBS = "message.output_text.logprobs"


class InputPart(Body):
    """A piece of text of either side; what else an earlier answer said of it is passed over."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # Any: remarks of an earlier answer, which no template reads
    logprobs: list[Any] | None = None  # Any: as above


class InputMessage(Body):
    """A message of the conversation so far: the client's, or one of an earlier answer as it was."""

    type: Literal["message"] | None = None
    role: str
    content: Annotated[
        str | list[InputPart],
        described("a string or a list of parts of type 'input_text' or 'output_text'; no other content is supported"),
    ]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class Reasoning(Body):
    """`effort` is handed to the chat template."""

    effort: Annotated[str | float | None, described("a name or a number")] = None
    summary: Any = None
    generate_summary: Any = None


class TextFormat(Body):
    """Text, and nothing else."""

    type: Literal["text"]


class TextSettings(Body):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Body):
    """Accepted without effect."""

    include_obfuscation: bool | None = None


class ResponsesBody(SharedBody):
    """POST /v1/responses. Without `max_output_tokens` an answer may fill the model's context."""

    input: Annotated[
        str | Annotated[list[InputMessage], Field(min_length=1)],
        described("a string or a list of messages; other items are not supported"),
    ]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Whole | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: whatever the template knows
    stream_options: ResponseStreamOptions | None = None
    parallel_tool_calls: bool | None = None

    # Any: JSON that is refused unless it asks for nothing.
    background: bool | None = None
    conversation: Any = None
    max_tool_calls: Whole | None = None
    previous_response_id: str | None = None
    prompt: None = None
    service_tier: str | None = None
    store: bool | None = None
    tool_choice: Any = None
    tools: list[Any] | None = None
    truncation: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to come with logprobs."""
        return _LOGPROBS in (self.include or ())

    def as_chat(self) -> ChatBody:
        """The same request as a chat body."""
        shared = {name: getattr(self, name) for name in SharedBody.model_fields}
        first = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return ChatBody.model_construct(
            **shared,
            messages=[*first, *map(_as_message, items)],
            max_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _as_message(item: InputMessage) -> ChatMessage:
    content = item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)
    return ChatMessage(role=item.role, content=content)
