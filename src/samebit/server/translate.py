"""Turns a checked body into engine requests: token ids, sampling parameters, a definite seed.

Knows the model's tokenizer, chat template and recommended settings. Does not know HTTP or the engine process.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from samebit.core.errors import InvalidRequestError
from samebit.core.reply import MessageFormat
from samebit.core.request import MAX_LOGPROBS, EngineInfo, Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.chat_template import load_chat_template
from samebit.engine.model_source import GenerationDefaults, read_generation_defaults
from samebit.engine.tokenizer import Tokenizer
from samebit.server.efforts import EffortMemory, check_effort
from samebit.server.errors import HttpError
from samebit.server.request_models import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
)
from samebit.server.responses_body import ResponsesBody
from samebit.server.structured import structured_outputs
from samebit.server.tool_choice import banned_ids, check_choice, is_one_call

_COMPLETION_MAX_TOKENS = 16
# Seeds that are drawn here must survive clients whose numbers are doubles.
_SEED_BITS = 53
_LARGE_CHARS = 4096
_MANY_MESSAGES = 64
_RENDERED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")

Result = TypeVar("Result")
Body = ChatBody | CompletionBody


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as the engine's requests, prompt by prompt, the samples of a prompt together.

    A choice's index is its request's place in `requests`. `num_top` is how many alternatives the client wants to see
    (None: no logprobs). `echo` puts the prompt before the answer. `is_scoring`: only the prompt is wanted, and the one
    token that the engine has to draw is left out. `wants_prompt_logprobs`: in vLLM's shape, beside those of `echo`.
    `wants_cache_details`, `wants_speculation`: what the prefix cache and guesses did for the answer. `separates_reasoning`:
    thinking is told apart from the content; `streams_reasoning`: as it comes, and not at its end.
    """

    id: str
    created: int
    seed: int
    requests: tuple[Request, ...]
    num_top: int | None
    wants_token_ids: bool
    wants_prompt_logprobs: bool
    wants_cache_details: bool
    wants_speculation: bool
    is_stream: bool
    stream_options: StreamOptions
    separates_reasoning: bool = True
    streams_reasoning: bool = True
    echo: bool = False
    is_scoring: bool = False

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return self.requests[0].params.n


@dataclass(frozen=True, slots=True)
class ReplyWishes:
    """Fields of a Request that only conversations have."""

    wants_pieces: bool = False
    ends_after_call: bool = False
    banned_token_ids: tuple[int, ...] = ()
    effort_changed: bool = False


class Translator:
    """The text side of one model. Its tokenizer and template do not change, so threads may share them."""

    def __init__(self, folder: Path, info: EngineInfo, served_name: str, *, seed: int | None = None) -> None:
        """Read the tokenizer, template and generation settings of the checkpoint in `folder`.

        Requests without a seed get one from a stream that begins with `seed`; None: from the system's randomness.
        """
        self.tokenizer = Tokenizer(folder)
        self.defaults: GenerationDefaults = read_generation_defaults(folder)
        self.served_name = served_name
        self._template = load_chat_template(folder, self.tokenizer)
        self._format = MessageFormat.of(self.tokenizer.special_tokens())
        self._info = info
        self._efforts = EffortMemory()
        self._seeds = secrets.SystemRandom() if seed is None else random.Random(seed)

    async def chat(self, body: ChatBody, prefix: str = "chatcmpl", format_field: str = "response_format") -> Job:
        """The job of a chat body. Raises InvalidRequestError, or HttpError for an unknown model."""
        self.check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs: needs logprobs=true", param="top_logprobs")
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        _check_range("top_logprobs", num_top)
        if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
            raise InvalidRequestError("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        check_choice(body, self._format)
        params = self._params(body, limit, num_top, None, structured_outputs(body, format_field))
        for index, message in enumerate(body.messages):
            self._check_ids(message.token_ids or [], f"messages.{index}.token_ids")
        prompt = await self._rendered(body)
        reply = ReplyWishes(
            wants_pieces=self._format is not None and params.skip_special_tokens,
            ends_after_call=is_one_call(body),
            banned_token_ids=banned_ids(body, self._format),
            effort_changed=self._efforts.is_changed(body),
        )
        job = self._job(prefix, body, [prompt], params, num_top, reply)
        return replace(
            job,
            separates_reasoning=body.separate_reasoning is not False,
            streams_reasoning=body.stream_reasoning is not False,
        )

    async def respond(self, body: ResponsesBody) -> Job:
        """The job of a responses body, which has one request. Raises as `chat`."""
        if body.top_logprobs is not None and not body.wants_logprobs:
            raise InvalidRequestError("top_logprobs: needs the logprobs in include", param="top_logprobs")
        return await self.chat(body.as_chat(), prefix="resp", format_field="text.format")

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Token ids of a prompt or a conversation. Raises as `chat`."""
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt: send either prompt or messages", param="prompt")
        if body.messages is not None:
            if body.add_special_tokens:
                raise InvalidRequestError("add_special_tokens: is up to the chat template", param="add_special_tokens")
            given = {name: getattr(body, name) for name in _RENDERED}
            return await self._rendered(ChatBody.model_construct(**given))
        prompt = body.prompt or ""
        is_bare = body.add_special_tokens is False
        encode = partial(self.tokenizer.encode, allow_special=False) if is_bare else self.tokenizer.encode_prompt
        return await _in_thread_if(len(prompt) > _LARGE_CHARS, lambda: encode(prompt))

    async def detokenize(self, body: DetokenizeBody) -> str:
        """The text of token ids. Raises InvalidRequestError for one that the model does not have."""
        self.check_model(body.model)
        self._check_ids(body.tokens, "tokens")
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        return await _in_thread_if(len(body.tokens) > _LARGE_CHARS, lambda: decode(body.tokens))

    async def complete(self, body: CompletionBody) -> Job:
        """The job of a completion body. Raises as `chat`."""
        self.check_model(body.model)
        _check_range("logprobs", body.logprobs)
        limit = _COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        is_scoring = bool(body.echo) and limit == 0
        prompt_logprobs = body.logprobs if body.echo else None
        wanted = None if is_scoring else structured_outputs(body)
        params = self._params(body, 1 if is_scoring else limit, body.logprobs, prompt_logprobs, wanted)
        size = len(body.prompt) if isinstance(body.prompt, str) else sum(map(_num_chars, body.prompt))
        prompts = await _in_thread_if(size > _LARGE_CHARS, lambda: self._encode_all(body))
        wishes = ReplyWishes()
        return self._job(
            "cmpl", body, prompts, params, body.logprobs, wishes, echo=bool(body.echo), is_scoring=is_scoring
        )

    def check_model(self, name: str | None) -> None:
        """Raise HttpError unless `name` is what the model is served as, or None."""
        if name is not None and name != self.served_name:
            raise HttpError(
                404,
                f"model {name!r} does not exist; this server has {self.served_name!r}",
                param="model",
                code="model_not_found",
            )

    def _params(
        self,
        body: Body,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structured: StructuredOutputsParams | None,
    ) -> SamplingParams:
        """Sampling parameters: what the body says, else what the checkpoint recommends, else the general default."""
        if body.best_of not in (None, body.n or 1):
            raise InvalidRequestError("best_of: not supported; leave it out or send the value of n", param="best_of")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequestError("prompt_logprobs: not available with stream=true", param="prompt_logprobs")
        given = {name: getattr(body, name) for name in SamplingParams.__struct_fields__ if hasattr(body, name)}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": _by_id(body.logit_bias)}
        given["structured_outputs"] = structured
        if prompt_logprobs is not None:
            given["prompt_logprobs"] = max(prompt_logprobs, body.prompt_logprobs or 0)
        fields = self.defaults.sampling | {name: value for name, value in given.items() if value is not None}
        fields["max_tokens"] = max_tokens  # None has a meaning here
        if "top_k" in fields:
            # The same choice, in a number that every kernel can hold.
            fields["top_k"] = min(fields["top_k"], self._info.vocab_size)
        params = SamplingParams(**fields)
        params.validate()
        return params

    def _job(
        self,
        prefix: str,
        body: Body,
        prompts: list[list[int]],
        params: SamplingParams,
        num_top: int | None,
        reply: ReplyWishes,
        *,
        echo: bool = False,
        is_scoring: bool = False,
    ) -> Job:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options: needs stream=true", param="stream_options")
        if body.rid is not None and body.request_id not in (None, body.rid):
            raise InvalidRequestError("rid and request_id differ: send one", param="rid")
        # The engine's names are never used twice, whatever clients call their answers.
        own_id = f"{prefix}-{secrets.token_hex(12)}"
        prompts = [prompt[-self._kept(body, params) :] for prompt in prompts]
        seed = self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        requests = [
            Request(
                request_id=f"{own_id}-{prompt_index * params.n + sample_index}",
                prompt_token_ids=prompt,
                params=params,
                seed=seed,
                sample_index=sample_index,
                eos_token_ids=self.defaults.eos_token_ids,
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
                wants_progress=bool(body.return_progress and body.stream),
                **asdict(reply),
            )
            for prompt_index, prompt in enumerate(prompts)
            for sample_index in range(params.n)
        ]
        return Job(
            id=body.rid or body.request_id or own_id,
            created=int(time.time()),
            seed=seed,
            requests=tuple(requests),
            num_top=num_top,
            wants_token_ids=bool(body.return_token_ids),
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            wants_cache_details=bool(body.return_cached_tokens_details),
            wants_speculation=bool(body.return_spec_tokens_details),
            is_stream=bool(body.stream),
            stream_options=body.stream_options or StreamOptions(),
            echo=echo,
            is_scoring=is_scoring,
        )

    def _kept(self, body: Body, params: SamplingParams) -> int:
        """How many of a prompt's last tokens are taken; 0: all."""
        wanted = body.truncate_prompt_tokens
        if wanted is None:
            return 0
        if wanted == -1:
            return max(1, self._info.max_length - (params.max_tokens or 1))
        if wanted < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens={wanted}: must be at least 1, or -1 for as many as fit",
                param="truncate_prompt_tokens",
            )
        return wanted

    def _encode_all(self, body: CompletionBody) -> list[list[int]]:
        prompt = body.prompt
        texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
        if texts:
            return [self.tokenizer.encode_prompt(text) for text in texts]
        ids = [item for item in prompt if isinstance(item, int)]
        prompts = [ids] if ids else [item for item in prompt if isinstance(item, list)]
        if not prompts:
            raise InvalidRequestError("prompt: is empty; send text or at least one token id", param="prompt")
        for ids in prompts:
            self._check_ids(ids, "prompt")
        return prompts

    def _check_ids(self, ids: list[int], param: str) -> None:
        for token_id in ids:
            if token_id >= self._info.vocab_size:
                raise InvalidRequestError(
                    f"{param}: token id {token_id} must be below {self._info.vocab_size}", param=param
                )

    async def _rendered(self, body: ChatBody) -> list[int]:
        is_large = len(body.messages) > _MANY_MESSAGES or (
            sum(len(str(part)) for part in (body.messages, body.chat_template_kwargs, body.tools)) > _LARGE_CHARS
        )
        return await _in_thread_if(is_large, lambda: self._render(body))

    def _render(self, body: ChatBody) -> list[int]:
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use the completions endpoint", param="messages")
        continued = bool(body.continue_final_message)
        opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
        variables = dict(body.chat_template_kwargs or {})
        effort = variables.get("reasoning_effort")
        if body.reasoning_effort is not None:
            if effort not in (None, body.reasoning_effort):
                raise InvalidRequestError(
                    "reasoning_effort: differs from that in chat_template_kwargs: send one", param="reasoning_effort"
                )
            variables["reasoning_effort"] = body.reasoning_effort
        check_effort(variables.get("reasoning_effort"))
        return self._template.render(
            [_plain(message) for message in body.messages],
            tools=[tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()],
            add_generation_prompt=opened,
            continue_final_message=continued,
            variables=variables,
        )


# Of an earlier answer, for its client only; `reasoning` is another name of `reasoning_content`.
_UNSHOWN: dict[str, Any] = {  # Any: names at any depth
    **dict.fromkeys(("annotations", "parsed", "reasoning"), True),
    "tool_calls": {"__all__": {"function": {"parsed_arguments"}}},
}


def _plain(message: ChatMessage) -> dict[str, Any]:  # Any: JSON, whose shape is the template's business
    plain = message.model_dump(exclude_none=True, exclude=_UNSHOWN)
    return plain if message.reasoning is None else {"reasoning_content": message.reasoning, **plain}


_MAX_DIGITS = 18
"""Of a token id; nothing has as many tokens, and Python reads no number of thousands of digits."""


def _by_id(bias: dict[str, float] | None) -> dict[int, float] | None:
    """A bias by token id: JSON has only text for keys."""
    for key in bias or {}:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS) or str(int(key)) != key:
            raise InvalidRequestError(f"logit_bias: {key[:20]!r} is not a token id", param="logit_bias")
    return None if bias is None else {int(key): value for key, value in bias.items()}


def _check_range(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name}={count}: must be between 0 and {MAX_LOGPROBS}", param=name)


def _num_chars(item: str | int | list[int]) -> int:
    return len(item) if isinstance(item, str) else 0


async def _in_thread_if(is_large: bool, work: Callable[[], Result]) -> Result:
    """Other requests go on while a large text is worked on; a small one is not worth the switch."""
    return await asyncio.to_thread(work) if is_large else work()
