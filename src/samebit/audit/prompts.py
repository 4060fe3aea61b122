"""The requests that a white-box audit runs: built-in ones, whose lengths fall on the edges of state, and the user's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from samebit.audit.recording import AuditPrompt
from samebit.core.errors import InvalidRequestError
from samebit.core.request import SamplingParams
from samebit.engine.batch_file import BatchLine
from samebit.engine.chat_template import load_chat_template
from samebit.engine.engine import Engine
from samebit.engine.model_source import read_generation_defaults
from samebit.workloads import document, edge_lengths, spread

NUM_TOP = 5
_LONGEST = 1024
_SCORED = 8
_SPARE = 8
_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.02, top_k=30),
)


def builtin_prompts(engine: Engine, *, count: int, max_tokens: int, seed: int) -> list[AuditPrompt]:
    """`count` requests; every other prompt begins the same document, the others have one of their own.

    Raises InvalidRequestError when not even one token and its answer fit the engine.
    """
    limit = min(_LONGEST, engine.info.max_length - max_tokens)
    if limit < 1:
        raise InvalidRequestError(
            f"max_tokens={max_tokens}: a prompt must fit too, and at most {engine.info.max_length} tokens do",
            param="max_tokens",
        )
    geometry = engine.manager.geometry
    windows = [group.window for group in geometry.layout.groups if group.window is not None]
    lengths = spread(edge_lengths([geometry.page_size, *windows], limit), count)
    prompts = []
    for number, length in enumerate(lengths):
        params = msgspec.structs.replace(
            _SAMPLING[number % len(_SAMPLING)],
            max_tokens=max_tokens,
            logprobs=NUM_TOP,
            prompt_logprobs=NUM_TOP if number % 3 == 2 else None,
            ignore_eos=True,
        )
        source = seed if number % 2 else seed + 1 + number
        prompts.append(
            AuditPrompt(
                name=f"builtin {number}: {length} tokens",
                token_ids=_tokens(engine, source, length),
                params=params,
                seed=(seed << 20) + number,
                prompt_logprobs_start=max(1, length - _SCORED),
            )
        )
    return prompts


def user_prompts(engine: Engine, folder: Path, lines: list[BatchLine], *, seed: int) -> list[AuditPrompt]:
    """The requests of a batch file; those that ask for fewer logprobs get NUM_TOP. Raises InvalidRequestError."""
    eos_token_ids = read_generation_defaults(folder).eos_token_ids
    template = load_chat_template(folder, engine.tokenizer)
    prompts = []
    for number, line in enumerate(lines, start=1):
        params = msgspec.convert({"seed": seed, **line.sampling}, SamplingParams, str_keys=True)
        params = msgspec.structs.replace(params, logprobs=max(NUM_TOP, params.logprobs or 0))
        if line.messages is not None and template is None:
            raise InvalidRequestError("this checkpoint has no chat template", param="messages")
        if line.messages is not None:
            assert template is not None, "checked above"
            token_ids = template.render(line.messages)
        elif isinstance(line.prompt, str):
            token_ids = engine.tokenizer.encode_prompt(line.prompt)
        else:
            token_ids = list(line.prompt or [])
        prompts += [
            AuditPrompt(
                name=f"line {number}" + (f", sample {index}" if index else ""),
                token_ids=token_ids,
                params=params,
                seed=seed if params.seed is None else params.seed,
                sample_index=index,
                eos_token_ids=eos_token_ids,
            )
            for index in range(params.n)
        ]
    return prompts


def sibling(prompt: AuditPrompt, page_size: int) -> AuditPrompt:
    """A prompt that leaves the given one after two thirds of it, inside a page where there is a choice."""
    cut = len(prompt.token_ids) * 2 // 3
    if cut % page_size == 0 and cut > page_size:
        cut -= page_size // 2
    tail = [token_id - 1 if token_id else 1 for token_id in prompt.token_ids[cut : cut + page_size]]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    return prompt._replace(token_ids=prompt.token_ids[:cut] + tail, params=params, prompt_logprobs_start=1)


def _tokens(engine: Engine, seed: int, length: int) -> list[int]:
    """The first tokens of a document. Those at its end may be cut from longer ones, so a few more are made than taken."""
    num_chars = 64
    while len(tokens := engine.tokenizer.encode(document(seed, num_chars), allow_special=False)) < length + _SPARE:
        num_chars *= 2
    return list(tokens[:length])
