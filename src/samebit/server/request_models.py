"""The bodies that clients may send, under OpenAI's field names and a few that sglang and vLLM share.

Knows types and which values are supported at all: what is not is refused by name, never ignored. Does not know the
model, its limits or its tokenizer.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from samebit.core.structured import MAX_TOOLS
from samebit.server.body import Body, Whole, described
from samebit.server.structured_models import ResponseFormat, StructuredOutputs
from samebit.server.tool_models import KnownType, SentToolCall, Tool, ToolChoice, check_names

# A body may hold millions of items; the first wrong one is enough.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
AnswerId = Annotated[str, Field(min_length=1, max_length=128)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class StreamOptions(Body):
    """`include_usage`: a last chunk tells the usage. `continuous_usage_stats`: every chunk does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SharedBody(Body):
    """What all endpoints with answers take. A field that is left out, or null, has the default that its endpoint documents."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Whole | None = None
    min_tokens: Whole | None = None
    stop: Annotated[str | Texts | None, described("a string or a list of strings")] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    speculation: bool | None = None
    stream: bool | None = None
    rid: AnswerId | None = None
    request_id: AnswerId | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    priority: Whole | None = None
    return_cached_tokens_details: bool | None = None
    return_spec_tokens_details: bool | None = None

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    lora_path: str | None = None


class _ChoicesBody(SharedBody):
    """What the two endpoints whose answers are choices take besides."""

    n: Whole | None = None
    max_tokens: Whole | None = None
    prompt_logprobs: Whole | None = None
    truncate_prompt_tokens: Whole | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_progress: bool | None = None
    best_of: Whole | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None


class CompletionBody(_ChoicesBody):
    """POST /v1/completions. `max_tokens` is 16 unless given; 0 is allowed with `echo`."""

    prompt: Annotated[
        str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)],
        Field(union_mode="left_to_right"),
        described("a string, a list of token ids, a list of strings or a list of lists of token ids"),
    ]
    echo: bool | None = None
    logprobs: Whole | None = None
    suffix: str | None = None

    @property
    def num_prompts(self) -> int:
        """Prompts in `prompt`, which may be a single one of either kind."""
        prompt = self.prompt
        return 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message; which roles there are is up to the model's chat template."""

    role: str
    content: Annotated[
        str | list[TextPart] | None,
        described(
            "a string or a list of parts of type 'text'; other kinds of content are not supported", names_items=True
        ),
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[SentToolCall] | None = None
    token_ids: TokenIds | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None  # Any: JSON that is refused unless null
    function_call: dict[str, Any] | None = None  # Any: as above
    annotations: list[dict[str, Any]] | None = None  # Any: remarks of an earlier answer, which no template reads
    parsed: Any = None  # Any: what a client made of the content


def _with_names_of_their_own(tools: list[Tool] | None) -> list[Tool] | None:
    check_names([tool.function.name for tool in tools or ()])
    return tools


Tools = Annotated[
    list[Annotated[Tool, KnownType]] | None,
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(_with_names_of_their_own),
]


class ChatBody(_ChoicesBody):
    """POST /v1/chat/completions. Without a limit on tokens an answer may fill the model's context."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: whatever the template knows
    reasoning_effort: Annotated[
        str | Whole | float | None, described("a name from 'none' to 'max', or a number from 0 to 1")
    ] = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    # Any: JSON that is refused unless it asks for nothing.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation. `add_special_tokens`: with what the checkpoint puts before a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # Any: whatever the template knows
    tools: Tools = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
