"""The body of POST /v1/responses, and the conversation that it is. Answers are not kept, so what refers to one is refused.

Knows types, as `request_models`, whose chat body it is turned into.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from samebit.core.structured import MAX_TOOLS
from samebit.server.body import Body, Whole, described
from samebit.server.request_models import ChatBody, ChatMessage, SharedBody
from samebit.server.responses_input import InputItem, InputMessage, messages_of
from samebit.server.structured_models import FlatFormat, in_chat_form
from samebit.server.tool_models import (
    FunctionDefinition,
    KnownType,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    check_names,
)

_LOGPROBS = "message.output_text.logprobs"


class ResponseTool(FunctionDefinition):
    """A tool that may be called: a chat's, but flat."""

    type: Literal["function"]

    def as_chat(self) -> Tool:
        """The same in a chat body's form."""
        fields = {name: getattr(self, name) for name in FunctionDefinition.model_fields}
        return Tool.model_construct(type=self.type, function=FunctionDefinition.model_construct(**fields))


class ResponseNamedTool(NamedFunction):
    """The tool that is to be called."""

    type: Literal["function"]


def _with_names_of_their_own(tools: list[ResponseTool] | None) -> list[ResponseTool] | None:
    check_names([tool.name for tool in tools or ()])
    return tools


class Reasoning(Body):
    """`effort` is handed to the chat template."""

    effort: Annotated[str | Whole | float | None, described("a name from 'none' to 'max', or a number from 0 to 1")] = (
        None
    )
    summary: Any = None
    generate_summary: Any = None


class TextSettings(Body):
    """How the text is to be."""

    format: FlatFormat | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Body):
    """Accepted without effect."""

    include_obfuscation: bool | None = None


class ResponsesBody(SharedBody):
    """POST /v1/responses. Without `max_output_tokens` an answer may fill the model's context."""

    input: Annotated[
        str | Annotated[list[InputItem], Field(min_length=1)],
        described(
            "a string or a list of items of type 'message', 'reasoning', 'function_call' or 'function_call_output'; "
            "other items, and other content, are not supported",
            names_items=True,
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Whole | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: whatever the template knows
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[
        list[Annotated[ResponseTool, KnownType]] | None,
        Field(max_length=MAX_TOOLS, fail_fast=True),
        AfterValidator(_with_names_of_their_own),
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponseNamedTool | None,
        described("'none', 'auto', 'required' or {'type': 'function', 'name': ...}"),
    ] = None
    parallel_tool_calls: bool | None = None

    # Any: JSON that is refused unless it asks for nothing.
    background: bool | None = None
    conversation: Any = None
    max_tool_calls: Whole | None = None
    previous_response_id: str | None = None
    prompt: None = None
    service_tier: str | None = None
    store: bool | None = None
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
        choice: ToolChoice = None
        if isinstance(self.tool_choice, ResponseNamedTool):
            choice = NamedTool(type="function", function=NamedFunction(name=self.tool_choice.name))
        else:
            choice = self.tool_choice
        return ChatBody.model_construct(
            **shared,
            messages=[*first, *messages_of(items)],
            tools=None if self.tools is None else [tool.as_chat() for tool in self.tools],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
            response_format=in_chat_form(self.text.format) if self.text else None,
        )
