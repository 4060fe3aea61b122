"""`LLM`: the engine in this process, with the names of vLLM's offline API. Imports no server package."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samebit.core.config import parse_settings
from samebit.core.errors import InvalidRequestError
from samebit.core.request import (
    CompletionOutput,
    EngineInfo,
    EngineOutput,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    SpeculationCounts,
    TokenLogprobs,
)
from samebit.engine.chat_template import load_chat_template
from samebit.engine.engine import Engine
from samebit.engine.model_source import read_generation_defaults, resolve_model
from samebit.engine.progress import TokenProgress
from samebit.engine.tokenizer import Tokenizer

Prompt = str | list[int]
Message = dict[str, Any]  # Any: the JSON of a chat message


class LLM:
    """A model, ready to generate.

    `model` is "nano" (bundled), a folder, or a hub id; every other setting is a field of `EngineConfig` by name.
    Requests without a seed get one from a stream that begins with `seed`, so a program run twice gives the same output.

    Example:
        >>> from samebit import LLM, SamplingParams
        >>> llm = LLM("nano")
        >>> outputs = llm.generate(["def add(a, b):"], SamplingParams(max_tokens=8, temperature=0))
        >>> len(outputs[0].outputs[0].token_ids)
        8
    """

    def __init__(self, model: str | Path = "nano", **settings: Any) -> None:  # Any: checked field by field below
        config = parse_settings({"model": str(model), **settings})
        folder = resolve_model(config.model)
        self._engine = Engine(config)
        self._tokenizer = self._engine.tokenizer
        self._template = load_chat_template(folder, self._tokenizer)
        self._defaults = read_generation_defaults(folder)
        self._seeds = random.Random(config.seed)
        self._num_requests = 0
        # An engine is for one loop; calls from several threads take turns.
        self._turn = threading.Lock()

    @property
    def info(self) -> EngineInfo:
        """Model, limits, fingerprint and numerics profile."""
        return self._engine.info

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._tokenizer

    def stats(self) -> dict[str, float]:
        """Requests, use of every pool from 0 to 1, and totals of tokens, preemptions and checkpoints."""
        return self._engine.stats()

    def finish_audits(self) -> None:
        """Compute again what the setting `audit_rate` has chosen so far; `stats` tells what came of it."""
        with self._turn:
            while self._engine.has_audits:
                self._engine.step()

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation config recommends."""
        return SamplingParams(**self._defaults.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids), all in one batch; outputs are in the order of the prompts.

        `sampling_params` is one for all or one each. `use_tqdm` shows a progress bar. Raises InvalidRequestError for a
        bad prompt or parameter before anything runs.
        """
        items = _as_prompts(prompts)
        ids = [list(p) if isinstance(p, list) else self._tokenizer.encode_prompt(p) for p in items]
        texts = [None if isinstance(p, list) else p for p in items]
        return self._run(texts, ids, self._params(sampling_params, len(items)), use_tqdm, cache_salt)

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        cache_salt: str = "",
        chat_template_kwargs: dict[str, Any] | None = None,  # Any: whatever the template knows
        tools: list[dict[str, Any]] | None = None,  # Any: JSON, as in a chat request
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, with the checkpoint's chat template, in which `tools` are declared.

        The outputs' text is that of the whole reply. A message of the assistant with `token_ids` is these tokens.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
            kind = type(messages).__name__
            raise InvalidRequestError(f"messages of type {kind}: must be a list of messages", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        ids = [self.render_chat(one, tools=tools, **(chat_template_kwargs or {})) for one in conversations]  # type: ignore[arg-type]  # narrowed by the first item
        return self._run([None] * len(ids), ids, self._params(sampling_params, len(ids)), use_tqdm, cache_salt)

    def render_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,  # Any: as for `chat`
        **variables: Any,  # Any: whatever the template knows
    ) -> list[int]:
        """The prompt's token ids for a conversation. Message text never becomes a control token."""
        if self._template is None:
            raise InvalidRequestError("this checkpoint has no chat template", param="messages")
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            params = [given or self.get_default_sampling_params()] * count
        else:
            params = list(given)
        if len(params) != count:
            raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts", param="sampling_params")
        for one in params:
            one.validate()
        return params

    def _run(
        self,
        texts: list[str | None],
        ids: list[list[int]],
        params: list[SamplingParams],
        use_progress: bool,
        cache_salt: str,
    ) -> list[RequestOutput]:
        with self._turn:
            groups = [self._requests(prompt, one, cache_salt) for prompt, one in zip(ids, params, strict=True)]
            collected = self._collect([request for group in groups for request in group], use_progress)
        return [
            _request_output(text, group, [collected[request.request_id] for request in group], self._tokenizer)
            for text, group in zip(texts, groups, strict=True)
        ]

    def _collect(self, requests: list[Request], use_progress: bool) -> dict[str, _Collected]:
        """Run `requests` to their ends. Whatever goes wrong, none of them stays behind."""
        collected: dict[str, _Collected] = {}
        try:
            for request in requests:
                collected[request.request_id] = _Collected()
                self._engine.add(request)
            with TokenProgress(len(collected), enabled=use_progress) as progress:
                while any(not item.is_done for item in collected.values()):
                    outputs = self._engine.step()
                    for output in outputs:
                        collected[output.request_id].add(output)
                    progress.update(outputs)
        except BaseException:  # an interrupt or a bad prompt must leave no request behind
            for request_id in collected:
                self._engine.abort(request_id)
            raise
        return collected

    def _requests(self, prompt: list[int], params: SamplingParams, cache_salt: str) -> list[Request]:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return [
            Request(
                request_id=f"{number}-{index}",
                prompt_token_ids=prompt,
                params=params,
                seed=seed,
                sample_index=index,
                eos_token_ids=self._defaults.eos_token_ids,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]


class _Collected:
    """The outputs of one request, put together."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.speculation = SpeculationCounts()
        self.last: EngineOutput | None = None

    @property
    def is_done(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None

    def add(self, output: EngineOutput) -> None:
        output.check()
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.speculation += output.speculation
        self.last = output


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise InvalidRequestError(f"prompts of type {kind}: must be texts or lists of token ids", param="prompt")
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]  # checked on the line above
    for item in items:
        if not isinstance(item, str | list):
            kind = type(item).__name__
            raise InvalidRequestError(f"prompt of type {kind}: must be text or token ids", param="prompt")
        wrong = next((part for part in item if type(part) is not int), None) if isinstance(item, list) else None
        if wrong is not None:
            raise InvalidRequestError(f"token id {wrong!r}: must be a whole number", param="prompt")
    return items  # type: ignore[return-value]  # checked in the loop


def _request_output(
    text: str | None, group: list[Request], parts: list[_Collected], tokenizer: Tokenizer
) -> RequestOutput:
    request, first = group[0], parts[0]
    assert first.last is not None, "every request has finished"
    return RequestOutput(
        request_id=request.request_id.split("-")[0],
        prompt=text,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(index, part, request.params, tokenizer) for index, part in enumerate(parts)],
        prompt_logprobs=_prompt_logprobs(request.params, first, tokenizer),
        num_cached_tokens=first.last.num_cached_tokens,
        metrics=RequestMetrics(
            num_cached_tokens=sum(part.last.num_cached_tokens for part in parts if part.last),
            speculation=sum((part.speculation for part in parts), SpeculationCounts()),
        ),
    )


def _completion(index: int, part: _Collected, params: SamplingParams, tokenizer: Tokenizer) -> CompletionOutput:
    assert part.last is not None, "every request has finished"
    assert part.last.finish_reason is not None, "every request has finished"
    has_logprobs = params.logprobs is not None
    return CompletionOutput(
        index=index,
        text=part.text,
        token_ids=part.token_ids,
        cumulative_logprob=sum(item.logprob for item in part.logprobs) if has_logprobs else None,
        logprobs=[_as_dict(item, tokenizer) for item in part.logprobs] if has_logprobs else None,
        finish_reason=part.last.finish_reason,
        stop_reason=part.last.stop_reason,
    )


def _prompt_logprobs(
    params: SamplingParams, part: _Collected, tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None] | None:
    if params.prompt_logprobs is None:
        return None
    return [None, *(_as_dict(item, tokenizer) for item in part.prompt_logprobs)]


def _as_dict(item: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    tops = zip(item.top_ids, item.top_logprobs, strict=True)
    values = {token: (logprob, rank) for rank, (token, logprob) in enumerate(tops, start=1)}
    values.setdefault(item.token_id, (item.logprob, item.rank))
    return {token: Logprob(*value, tokenizer.token_text(token)) for token, value in values.items()}
