"""How far a drafter's guesses go: in continuations that the target itself draws, greedily and at temperature 1, of held-out code
and of dialogues that end with a question for a fact.

The target draws a token as the likeliest after noise is added that belongs to row and place; a guess is drawn with the same noise,
and accepted if it is the same token. That is the engine's rule, though not its noise. Knows the trainable target and drafters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.train.dialogues import DialogueWriter
from samebit.train.drafters.decode import continued, gumbel
from samebit.train.drafters.recipe import Measures
from samebit.train.drafters.students import Student, l1_distance, target_logits
from samebit.train.drafters.view import taken, view_of
from samebit.train.model import Inkling
from samebit.train.recipe import END_OF_TURN
from samebit.train.tokens import TrainingData

_ROWS_AT_ONCE = 8
CODE, DIALOGUES = "held-out code", "dialogues"


@dataclass(frozen=True, slots=True)
class Continuations:
    """Texts `token_ids` [B, T] of which the target drew the tokens from place `first` [B] to `last` [B], both included.

    `noise` [B, new, V] is what was added to the logits of the tokens from `first` on; None: nothing.
    """

    name: str
    temperature: float
    token_ids: Tensor
    first: Tensor
    last: Tensor
    noise: Tensor | None
    new: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`accepted`: the share of blocks whose guesses up to each position were all accepted; `overlap`: at each position, what the
    two distributions have in common (the chance of acceptance by the ratio test), given the true tokens before it.

    `length` is 1 + the mean number of accepted guesses, and `length_by_ratio` what the overlaps let expect.
    """

    name: str
    temperature: float
    num_blocks: int
    accepted: list[float]
    overlap: list[float]
    length: float
    length_by_ratio: float


@dataclass(frozen=True, slots=True)
class Samples:
    """For blocks in the order of decoding, confidence logits [n, num_drafts] and how many guesses were accepted, [n]."""

    logits: Tensor
    accepted: Tensor


def prompts(data: TrainingData, measures: Measures, seed: int = 0) -> dict[str, tuple[list[list[int]], int]]:
    """What is continued, and by how many tokens: windows of held-out code, and dialogues up to a reply that names a fact."""
    last = len(data.held_out) - measures.prompt
    starts = [last * i // measures.rows for i in range(measures.rows)]
    writer = DialogueWriter(data.tokenizer, data.held_out, data.sentences, seed, "probe")
    probes = [writer.probe(d, i % 2) for d in measures.distances for i in range(measures.probes)]
    return {
        CODE: ([data.held_out[at : at + measures.prompt].tolist() for at in starts], measures.new),
        DIALOGUES: ([probe.token_ids[: probe.reply[0]] for probe in probes], measures.reply),
    }


def continuations(target: Inkling, data: TrainingData, measures: Measures, seed: int = 0) -> list[Continuations]:
    """Everything that is measured: code and dialogues, greedy and drawn."""
    generator = torch.Generator(target.weights["embed"].device).manual_seed(seed)
    found = []
    for name, (begun, new) in prompts(data, measures, seed).items():
        lengths = torch.tensor([len(ids) for ids in begun])
        padded = torch.tensor([ids + [0] * (int(lengths.max()) - len(ids)) for ids in begun])
        found += [_continued(target, name, t, padded, lengths, new, generator) for t in (0.0, 1.0)]
    return found


@torch.no_grad()
def acceptance(
    target: Inkling, student: Student, layers: tuple[int, ...], texts: Continuations
) -> tuple[Acceptance, Samples]:
    """Measure one drafter, which reads the target's `layers`, on one kind of text."""
    K = student.num_drafts
    count = texts.new - K
    assert count > 0, "a continuation is longer than a block"
    overlaps, inside, walked = [], [], []
    for rows in torch.split(torch.arange(len(texts.token_ids)), _ROWS_AT_ONCE):
        first, last = texts.first[rows], texts.last[rows]
        anchors = first[:, None] + torch.arange(count, device=first.device)
        ids = texts.token_ids[rows]
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            view = view_of(target, ids, layers, anchors)
            drafted, sure = student.drawn(view, _noise_of_guesses(texts, rows, count, K))
            logprobs = student.logits(view).log_softmax(-1)
            overlaps.append(1 - l1_distance(logprobs, target_logits(target, view, K)) / 2)
        inside.append(anchors[..., None] + 1 + torch.arange(K, device=first.device) <= last[:, None, None])
        accepted = (drafted == view.labels(K)).long().cumprod(-1).sum(-1)
        walked += [(sure[row, at], num) for row, at, num in _walk(accepted, last - first)]
    confidence = torch.stack([z for z, _ in walked]) if walked else torch.zeros(0, K)
    samples = Samples(confidence.float().cpu(), torch.tensor([num for _, num in walked]))
    return _summary(texts, samples, torch.cat(overlaps), torch.cat(inside)), samples


def _continued(
    target: Inkling,
    name: str,
    temperature: float,
    begun: Tensor,
    lengths: Tensor,
    new: int,
    generator: torch.Generator,
) -> Continuations:
    device = target.weights["embed"].device
    B, V = len(begun), target.config.unpadded_vocab_size
    noise = temperature * gumbel((B, new, V), generator) if temperature else None
    first = lengths.to(device)
    row = torch.arange(B, device=device)

    def draw(logits: Tensor, place: int) -> Tensor:
        if noise is not None:
            # Rows that are done go on, and nobody reads what they say.
            logits = logits + noise[row, (place - first).clamp(0, new - 1)]
        return logits.argmax(-1)

    ids = continued(target, begun, lengths, int(lengths.max()) + new, draw)
    own = taken(ids, first[:, None] + torch.arange(new, device=device))
    ends = (own == END_OF_TURN).long().cumsum(1) == 0
    last = first + ends.sum(1).clamp(max=new - 1)
    return Continuations(name, temperature, ids, first, last, noise, new)


def _noise_of_guesses(texts: Continuations, rows: Tensor, count: int, num_drafts: int) -> Tensor:
    """[b, count, num_drafts, V] for blocks behind each of the first `count` own tokens."""
    if texts.noise is None:
        return torch.zeros(len(rows), count, num_drafts, 1, device=texts.token_ids.device)
    device = texts.noise.device
    places = torch.arange(count, device=device)[:, None] + 1 + torch.arange(num_drafts, device=device)
    return texts.noise[rows.to(device)[:, None, None], places]


def _walk(accepted: Tensor, lengths: Tensor) -> Iterator[tuple[int, int, int]]:
    """Blocks as decoding meets them: row, place in `accepted` [b, count], and the guesses that are accepted and not past the end."""
    for row, (of_row, end) in enumerate(zip(accepted.tolist(), lengths.tolist(), strict=True)):
        at = 0
        while at < min(end, len(of_row)):
            num = min(of_row[at], end - at)
            yield row, at, num
            at += num + 1


def _summary(texts: Continuations, samples: Samples, overlaps: Tensor, inside: Tensor) -> Acceptance:
    K = overlaps.shape[-1]
    blocks = max(1, len(samples.accepted))
    accepted = [float((samples.accepted > k).sum()) / blocks for k in range(K)]
    common = torch.where(inside, overlaps, 0.0)
    overlap = common.sum((0, 1)) / inside.sum((0, 1)).clamp(min=1)
    expected = common.cumprod(-1).sum(-1)[inside[..., 0]]
    by_ratio = float(expected.mean()) if len(expected) else 0.0
    return Acceptance(
        name=texts.name,
        temperature=texts.temperature,
        num_blocks=len(samples.accepted),
        accepted=accepted,
        overlap=[float(share) for share in overlap],
        length=1 + sum(accepted),
        length_by_ratio=1 + by_ratio,
    )
