"""What a caller asks and what it gets back: plain frozen values. Knows no text processing, tensors or scheduling."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import msgspec

from samebit.core.errors import InvalidRequestError, StepError
from samebit.core.reply import ReplyPiece, TokenKind
from samebit.core.structured import StructuredOutputsParams

FinishReason = Literal["stop", "length", "abort", "error"]
MissReason = Literal[
    "cold",
    "salt",
    "no_checkpoint",
    "window_evicted",
    "evicted",
    "shorter_than_page",
    "prompt_logprobs",
    "effort_changed",
]

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 16_384
MAX_STOP_CHARS = 65_536
MIN_TEMPERATURE = 1e-30
SEED_LIMIT = 2**63
ID_LIMIT = 2**31
MAX_PRIORITY = 1000


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to draw and when to stop. Field names and defaults follow vLLM's offline API.

    `seed` None means: draw one at the edge (it is reported back); the engine itself always gets a seed.
    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch a filter off. `max_tokens` None means
    up to the model's limit. `logprobs` N reports the chosen token and the N most likely ones.
    `logit_bias`, `presence_penalty`, `frequency_penalty` and `repetition_penalty` change the logits that a draw sees, by
    the request's own tokens (docs/sampling.md); 0, and 1 for the last, switch a penalty off.
    `structured_outputs`: what the answer's text must be.
    `speculation` False: no tokens are guessed for this request, which changes its speed and nothing else.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculation: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def validate(self) -> None:
        """Raise InvalidRequestError naming the first field of a wrong type or out of range."""
        try:
            msgspec.convert(msgspec.structs.asdict(self), SamplingParams)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`")
            raise InvalidRequestError(f"{name}: {text}", param=name.partition("[")[0]) from None
        self._check_numbers()
        if not -1 <= self.top_k < ID_LIMIT:
            _refuse("top_k", self.top_k, f"must be -1 or 0 (off) or a whole number below {ID_LIMIT}")
        if self.max_tokens is not None and self.max_tokens < 1:
            _refuse("max_tokens", self.max_tokens, "must be at least 1")
        if self.min_tokens < 0:
            _refuse("min_tokens", self.min_tokens, "must not be negative")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})")
        if self.seed is not None and not -SEED_LIMIT <= self.seed < SEED_LIMIT:
            _refuse("seed", self.seed, "must fit in a signed 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                _refuse(name, count, f"must be between 0 and {MAX_LOGPROBS}")
        self._check_stops()
        self._check_bias()
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise InvalidRequestError(
                    f"structured_outputs={self.structured_outputs!r}: must be StructuredOutputsParams",
                    param="structured_outputs",
                )
            self.structured_outputs.validate()

    def _check_numbers(self) -> None:
        limits = {
            "n": (self.n, 1, 128),
            "temperature": (self.temperature, 0.0, 100.0),
            "top_p": (self.top_p, 0.0, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "presence_penalty": (self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": (self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": (self.repetition_penalty, 0.01, 100.0),
        }
        for name, (value, low, high) in limits.items():
            if not math.isfinite(value) or not low <= value <= high:
                _refuse(name, value, f"must be between {low} and {high}")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            # Logits divided by it would overflow, and infinite ones cannot be told apart.
            _refuse("temperature", self.temperature, f"must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        if self.top_p == 0.0:
            _refuse("top_p", self.top_p, "must be greater than 0")

    def _check_stops(self) -> None:
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(stops)} strings", f"at most {MAX_STOP_STRINGS} are allowed")
        if sum(map(len, stops)) > MAX_STOP_CHARS:
            _refuse("stop", f"{sum(map(len, stops))} characters", f"at most {MAX_STOP_CHARS} are allowed in all")
        if any(not text for text in stops):
            _refuse("stop", "", "stop strings must not be empty")
        for token_id in self.stop_token_ids or ():
            if not 0 <= token_id < ID_LIMIT:
                _refuse("stop_token_ids", token_id, "must be token ids")

    def _check_bias(self) -> None:
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"{len(bias)} tokens", f"at most {MAX_LOGIT_BIAS} are allowed")
        for token_id, value in bias.items():
            if not 0 <= token_id < ID_LIMIT:
                _refuse("logit_bias", token_id, "the keys must be token ids")
            if not -100.0 <= value <= 100.0:
                _refuse("logit_bias", value, "must be between -100 and 100")


def _refuse(param: str, value: object, limit: str) -> None:
    raise InvalidRequestError(f"{param}={value!r}: {limit}", param=param)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one prompt, as the engine takes it: token ids, a definite seed, everything validated.

    Where requests wait, those of a higher `priority` go first (EngineConfig.priority_aging_steps). `wants_progress` asks for
    an output after each step that takes on a part of the prompt. `effort_changed`: the conversation was had before with
    another reasoning effort, which stands at its beginning.
    `cache_salt` separates tenants in the prefix cache. `sample_index` tells apart the n samples of a request, which
    share a seed. `prompt_logprobs_start` is the first prompt token whose logprob is wanted (1 is the first that has one).
    `is_shadow`: it repeats another request to check it (engine/shadow.py): nothing of it comes from the prefix cache or goes into
    it, all others go first, and it is not counted.
    `wants_pieces`: the answer is a reply in the model's message format, and is to be taken apart; it then ends with the
    first call of a tool if `ends_after_call`. `banned_token_ids` are never drawn.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    prompt_logprobs_start: int = 1
    wants_progress: bool = False
    effort_changed: bool = False
    wants_pieces: bool = False
    ends_after_call: bool = False
    banned_token_ids: tuple[int, ...] = ()
    is_shadow: bool = False

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end the answer."""
        ends = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset((*(self.params.stop_token_ids or ()), *ends))


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (nats) of a token under the raw model distribution, its rank (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The chosen token with its logprob and rank, and the most likely tokens in descending order, ties by lower id."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SpeculationCounts(msgspec.Struct, frozen=True, gc=False):
    """How a request's guesses fared. `num_drafts`: rows of guesses that were verified; `num_draft_tokens`: guesses in them.

    `accepted_per_position[i]`: how often the i-th guess of a row was accepted and became part of the answer; positions
    behind the last that ever was are left out.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        """Guesses that became part of the answer."""
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a row of guesses gave on average, its own next token among them; 0 where there was none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    def within(self, num_tokens: int) -> SpeculationCounts:
        """The counts of one row of which only the first `num_tokens` tokens are part of the answer."""
        if len(self.accepted_per_position) <= num_tokens:
            return self
        return SpeculationCounts(self.num_drafts, self.num_draft_tokens, self.accepted_per_position[:num_tokens])

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        pairs = itertools.zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpeculationCounts(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            tuple(map(sum, pairs)),
        )


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request gained in one step. Text, token ids and logprobs always describe the same tokens, up to the stop.

    `text` may lag behind `token_ids` while bytes of a character or the start of a stop string are held back; with
    `finish_reason` everything that belongs to the answer has been delivered. `stop_reason` is the stop string or token id.
    `num_processed_tokens`: prompt tokens that have state, cached ones among them. `cache_miss_reason`: why none came from the
    prefix cache, when the request was first admitted (None: some did, or there is no cache).
    `pieces` and `token_kinds` are those of a reply that was to be taken apart, whose `text` is its content; the kinds of all
    tokens (but of a stop token that is no part of the text) come in order, some of them later than their tokens.
    `error` is why it ended with an error, and `error_param` the field of the request that is at fault (None: it is none of them).
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    pieces: list[ReplyPiece] = []
    token_kinds: list[TokenKind] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_param: str | None = None
    speculation: SpeculationCounts = SpeculationCounts()
    num_cached_tokens: int = 0
    num_processed_tokens: int = 0
    cache_miss_reason: MissReason | None = None
    num_preemptions: int = 0

    def check(self) -> None:
        """Raise what the request ended with, if that was an error: InvalidRequestError where a field of its own is at fault, or StepError."""
        if self.finish_reason != "error":
            return
        if self.error_param is not None:
            raise InvalidRequestError(f"{self.error_param}: {self.error}", param=self.error_param)
        raise StepError(self.error or "the request failed")


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample. `logprobs[j][token_id].logprob` holds the j-th token's and its alternatives' logprobs."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt's samples came about, all together: what they took from the prefix cache, and how guesses fared."""

    num_cached_tokens: int
    speculation: SpeculationCounts


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one prompt. `num_cached_tokens` counts prompt tokens taken from the prefix cache at first admission."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    finished: bool = True


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves and under which numerics.

    `system_fingerprint` is a hash of the weights and `profile`: two engines with the same fingerprint give the same
    bits. `num_speculative_tokens`: most guesses that a step verifies for a request. `memory` holds pool sizes (ids) and bytes.
    """

    model: str
    max_length: int
    vocab_size: int
    system_fingerprint: str
    num_speculative_tokens: int = 0
    profile: dict[str, str | int]
    memory: dict[str, int]
