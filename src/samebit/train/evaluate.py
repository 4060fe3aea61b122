"""How good a model is: loss on held-out code by context, and recall of facts by distance, stated once or corrected.

Knows the trainable model; runs it eagerly, as it stands. Nothing here draws random numbers but the probes' writer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from samebit.train.dialogues import DialogueWriter, Probe
from samebit.train.model import Inkling
from samebit.train.tokens import TokenStream, TrainingData


@dataclass(frozen=True, slots=True)
class Recall:
    """Probes of one distance and number of corrections. `replies`: whole replies that greedy decoding gives; `values`:
    replies in which it gives the value and the full stop, once it is told all before them.
    """

    distance: int
    num_corrections: int
    count: int
    replies: float
    values: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`loss`: nats per token by context length; `bits_per_byte`: of the longest context."""

    loss: dict[int, float]
    bits_per_byte: float
    recall: list[Recall]

    def line(self) -> str:
        """Everything in one line."""
        loss = ", ".join(f"{value:.4f} at {context}" for context, value in self.loss.items())
        recall = ", ".join(
            f"{r.distance}{'+' * r.num_corrections}: {100 * r.replies:.1f}/{100 * r.values:.1f}" for r in self.recall
        )
        return f"nats/token {loss}; {self.bits_per_byte:.4f} bits/byte; replies/values % {recall}"


@torch.no_grad()
def evaluate(
    model: Inkling,
    data: TrainingData,
    *,
    contexts: Sequence[int],
    distances: Sequence[int],
    corrections: Sequence[int] = (0, 1, 3),
    probes: int = 50,
    max_tokens: int | None = None,
) -> Evaluation:
    """Measure on the held-out stream (its first `max_tokens`) and on so many seeded probes a cell."""
    was_training = model.training
    model.eval()
    loss = {context: held_out_loss(model, data.held_out[:max_tokens], context) for context in contexts}
    recalled = []
    for distance in distances:
        for count in corrections:
            seed = 1000 * distance + count
            writer = DialogueWriter(data.tokenizer, data.held_out, data.sentences, seed, "probe")
            recalled.append(recall(model, [writer.probe(distance, count) for _ in range(probes)], distance, count))
    model.train(was_training)
    bits = loss[contexts[-1]] / math.log(2) / data.bytes_per_token
    return Evaluation(loss, bits, recalled)


@torch.no_grad()
def held_out_loss(model: Inkling, stream: TokenStream, context: int) -> float:
    """Mean cross-entropy in nats of each token of whole windows of `context` predictions."""
    device = model.weights["embed"].device
    count = (len(stream) - 1) // context
    assert count > 0, "the held-out stream fills a window"
    windows = torch.from_numpy(stream[: count * context + 1].astype(np.int64))
    inputs, targets = windows[:-1].view(count, context), windows[1:].view(count, context)
    total = 0.0
    rows = max(1, 32768 // context)
    for begin in range(0, count, rows):
        part = slice(begin, begin + rows)
        logits = model.logits(_hidden(model, inputs[part].to(device)))
        total += float(
            functional.cross_entropy(logits.flatten(0, 1), targets[part].to(device).flatten(), reduction="sum")
        )
    return total / (count * context)


def recall(model: Inkling, probes: Sequence[Probe], distance: int, num_corrections: int) -> Recall:
    """Share of probes answered. Greedy decoding gives a reply if and only if each of its tokens is the likeliest one
    after those before it, so one pass over the whole dialogue tells what generation would say.
    """
    replies, values = 0, 0
    device = model.weights["embed"].device
    ordered = sorted(probes, key=lambda p: len(p.token_ids))
    for begin in range(0, len(ordered), 8):
        part = ordered[begin : begin + 8]
        # Padding behind a sequence changes nothing before it.
        longest = len(part[-1].token_ids)
        ids = torch.tensor([p.token_ids + [0] * (longest - len(p.token_ids)) for p in part], device=device)
        hidden = _hidden(model, ids)
        for row, probe in enumerate(part):
            first, last = probe.reply
            likeliest = model.logits(hidden[row, first - 1 : last - 1]).argmax(-1)
            is_right = likeliest == ids[row, first:last]
            replies += bool(is_right.all())
            values += bool(is_right[probe.value[0] - first : probe.value[1] - first].all())
    count = len(probes)
    return Recall(distance, num_corrections, count, replies / count, values / count)


def _hidden(model: Inkling, token_ids: Tensor) -> Tensor:
    with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=token_ids.is_cuda):
        hidden: Tensor = model(token_ids)[0]
    return hidden
