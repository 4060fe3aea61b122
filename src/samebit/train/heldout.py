"""Held-out texts of a corpus, and what the engine makes of them: cross-entropy of each token from prompt logprobs.

A corpus is read as texts, so that a model can be measured on one that was prepared for another tokenizer. Knows `LLM`; knows no
trainable model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from samebit.core.errors import ConfigError
from samebit.core.request import SamplingParams
from samebit.engine.llm import LLM
from samebit.engine.tokenizer import Tokenizer
from samebit.models.checkpoint import read_json
from samebit.train.assessment import Nats
from samebit.train.tokens import DOCUMENT_START, TrainingData


@dataclass(frozen=True, slots=True)
class HeldOutPackage:
    """A package that no training text comes from, and its texts in order."""

    name: str
    texts: tuple[str, ...]


def held_out_packages(folder: Path, data: TrainingData) -> list[HeldOutPackage]:
    """The held-out packages of the corpus in `folder` as texts. Raises ConfigError if the manifest tells of other documents."""
    stream = data.held_out
    starts = [*np.flatnonzero(stream == DOCUMENT_START).tolist(), len(stream)]
    documents = [stream[begin + 1 : end].tolist() for begin, end in pairwise(starts)]
    texts: list[str] = data.tokenizer.decode_batch(documents)
    entries = read_json(folder / "manifest.json")["held_out"]
    if sum(entry["files"] for entry in entries) != len(texts):
        raise ConfigError(f"{folder}: the manifest does not tell of {len(texts)} held-out documents")
    remaining = iter(texts)
    return [HeldOutPackage(e["name"], tuple(next(remaining) for _ in range(e["files"]))) for e in entries]


def documents_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Token ids of all texts, each behind a token that begins a document."""
    stream: list[int] = []
    for text in texts:
        stream += [DOCUMENT_START, *tokenizer.encode(text, allow_special=False)]
    return stream


def windows(stream: Sequence[int], context: int, most: int) -> list[list[int]]:
    """At most `most` windows of `context` tokens without overlap, spread evenly; a shorter stream is one window."""
    available = max(1, len(stream) // context)
    count = min(most, available)
    starts = [available * i // count * context for i in range(count)]
    return [list(stream[start : start + context]) for start in starts]


def token_losses(llm: LLM, contexts: Sequence[list[int]]) -> list[list[float]]:
    """Nats of tokens 1 .. of each context, each predicted from all before it, as the engine reports them for a prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    losses = []
    for tokens, output in zip(contexts, llm.generate(list(contexts), params), strict=True):
        scored = output.prompt_logprobs
        assert scored is not None, "they were asked for"
        losses.append([-item[token].logprob for item, token in zip(scored, tokens, strict=True) if item is not None])
    return losses


def measured(llm: LLM, contexts: Sequence[list[int]]) -> Nats:
    """The losses of all tokens but the first of each context; a control token stands for no byte."""
    tokenizer = llm.get_tokenizer()
    predicted = [token for context in contexts for token in context[1:]]
    num_bytes = sum(len(tokenizer.token_bytes(t)) for t in predicted if t not in tokenizer.special_ids)
    nats = math.fsum(loss for losses in token_losses(llm, contexts) for loss in losses)
    return Nats(nats, len(predicted), num_bytes)
