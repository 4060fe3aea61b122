"""The bodies that the server sends: OpenAI's, with a few fields more. Knows shapes only."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from samebit.core.config import EngineConfig
from samebit.core.request import EngineInfo, FinishReason, MissReason
from samebit.engine.model_source import GenerationDefaults

# A turn that ends with calls ends for another reason than one that is complete.
ChatFinishReason = FinishReason | Literal["tool_calls"]
# The legacy shape of an alternative list: token text to logprob.
TopLogprobs = dict[str, float]


class CachedTokens(msgspec.Struct, frozen=True):
    """What one prompt took from the prefix cache, and why that was nothing."""

    cached_tokens: int
    miss_reason: MissReason | None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` were taken from the prefix cache; `cached_tokens_details`: the same for each prompt."""

    cached_tokens: int = 0
    cached_tokens_details: list[CachedTokens] | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens`: of the answer's tokens those of thinking, without what marks it as such."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; a prompt counts once, however many samples are drawn."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How guesses fared, under vLLM's names. `acceptance_histogram[k]`: rows of guesses of which the first k were accepted."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class AnswerMetrics(msgspec.Struct, frozen=True):
    """How an answer came about; null where nobody guesses tokens."""

    speculative_decoding: SpeculationFigures | None


class PromptLogprob(msgspec.Struct, frozen=True):
    """A prompt token's logprob in vLLM's shape."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Legacy shape. `text_offset`: where in `text` each token begins. A prompt's first token has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[TopLogprobs | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one prompt, or what it gained."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TokenLogprob(msgspec.Struct, frozen=True):
    """`bytes` are the token's; `token` shows a part of a character as U+FFFD."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob, frozen=True):
    """A token of the answer and the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of the content's tokens."""

    content: list[ChatTokenLogprob]


class CalledFunction(msgspec.Struct, frozen=True):
    """What is called; `arguments` are JSON as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool; its result is sent back under `id`."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, frozen=True):
    """What a call gained: first its name, then its arguments piece by piece."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What call number `index` of a message gained."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message; `content` is null where there are only calls. `reasoning` is another name of `reasoning_content`."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What the message gained; the first delta has the role."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample gained."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


Choice = CompletionChoice | ChatChoice | ChatChunkChoice


class PromptProgress(msgspec.Struct, frozen=True):
    """How far the prompt of a choice has come, in llama.cpp's fields; `processed` tokens include those of the cache."""

    index: int
    total: int
    cache: int
    processed: int
    time_ms: int


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers share. `seed` repeats the answer together with `system_fingerprint`."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    seed: int | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(_Answer, frozen=True, kw_only=True):
    """An answer, or a chunk of it, of /v1/completions."""

    choices: list[CompletionChoice]


class ChatCompletion(_Answer, frozen=True, kw_only=True):
    """An answer of /v1/chat/completions."""

    choices: list[ChatChoice]


class ChatCompletionChunk(_Answer, frozen=True, kw_only=True):
    """A chunk of a streamed answer of /v1/chat/completions."""

    choices: list[ChatChunkChoice]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids; `token_strs`, if wanted, are the tokens as text, a part of a character as U+FFFD."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of token ids, control tokens by their spelling."""

    prompt: str


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `param` names the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error has this body."""

    error: ErrorDetail


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "samebit"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The models that are served."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Version(msgspec.Struct, frozen=True):
    """The installed version."""

    version: str


class Status(msgspec.Struct, frozen=True):
    """`ok`, or why not."""

    status: str


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, under which numerics, with which settings; and the engine's latest gauges and totals."""

    version: str
    model: str
    served_model_name: str
    engine: EngineInfo
    config: EngineConfig
    generation_defaults: GenerationDefaults
    stats: dict[str, float]
