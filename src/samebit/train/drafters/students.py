"""Drafters in training: what each of them guesses, and the loss that it learns by.

Block drafters learn by the losses of DFlash (arXiv 2602.06036) and of DSpark; draft depths, as in the model's own training, by
cross-entropy. Knows the frozen target and views; knows no data and no optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from samebit.speculative.block_config import BlockConfig
from samebit.train.drafters.block import BlockDrafter
from samebit.train.drafters.view import View, raw_embedding, taken
from samebit.train.model import Inkling


@dataclass(frozen=True, slots=True)
class LossWeights:
    """How much counts: the cross-entropy of `labels`, the L1 `distance` to the target's distribution, and the cross-entropy of the
    `confidence` with the share that both have in common. Guess k weighs exp(-k / `decay`) in all three, k from 0.
    """

    labels: float
    distance: float = 0.0
    confidence: float = 0.0
    decay: float = 4.0


class Student(Protocol):
    """A drafter of `num_drafts` tokens in training. `parameters`: what moves, by the names under which it is stored."""

    num_drafts: int

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """All that is trained."""

    def losses(self, view: View) -> dict[str, Tensor]:
        """Scalars: `loss`, which is to fall, and its parts."""

    def logits(self, view: View) -> Tensor:
        """[B, N, num_drafts, V] fp32: of each guess, given that all before it are the tokens that stand there."""

    def drawn(self, view: View, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses from left to right, right up to the first that differs from the text, and their confidence logits (0 where there
        are none); both [B, N, num_drafts]. noise [B, N, num_drafts, V] is added to the logits.
        """


class BlockStudent:
    """DFlash or DSpark, by what `drafter` has and `weights` say."""

    def __init__(self, target: Inkling, drafter: BlockDrafter, weights: LossWeights) -> None:
        self._target, self.drafter, self._weights = target, drafter, weights
        self._config: BlockConfig = drafter.config
        self.num_drafts = self._config.num_drafts

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """All of the drafter's."""
        return dict(self.drafter.named_parameters())

    def hidden(self, view: View) -> Tensor:
        """Rows [B, N, num_drafts, H] that guess."""
        anchors, mask = view.anchors, self._config.mask_token_id
        ids = torch.full((*anchors.shape, self._config.num_rows), mask, device=anchors.device)
        ids[..., 0] = view.first_tokens()
        hidden: Tensor = self.drafter(view.taps, raw_embedding(self._target, ids), view.anchors)
        return hidden[:, :, self._config.first_draft_row :]

    def logits(self, view: View) -> Tensor:
        """[B, N, num_drafts, V] fp32."""
        return self.drafter.corrected(self._target.logits(self.hidden(view)), self._before(view))

    def losses(self, view: View) -> dict[str, Tensor]:
        """`loss`, `labels` and, where they count, `distance` and `confidence`."""
        hidden, labels, given = self.hidden(view), view.labels(self.num_drafts), self._weights
        logits = self.drafter.corrected(self._target.logits(hidden), self._before(view))
        logprobs = logits.log_softmax(-1)
        places = torch.arange(self.num_drafts, device=labels.device)
        decay = torch.exp(-places / given.decay)
        decay = decay / decay.sum()
        found = {"labels": (-logprobs.gather(-1, labels[..., None])[..., 0] * decay).sum(-1).mean()}
        loss = given.labels * found["labels"]
        if given.distance or given.confidence:
            distance = l1_distance(logprobs, target_logits(self._target, view, self.num_drafts))
            found["distance"] = (distance * decay).sum(-1).mean()
            loss = loss + given.distance * found["distance"]
        if given.confidence:
            sure = self.drafter.confidence_logits(hidden, self._before(view))
            misses = functional.binary_cross_entropy_with_logits(sure, 1 - distance.detach() / 2, reduction="none")
            found["confidence"] = (misses * decay).sum(-1).mean()
            loss = loss + given.confidence * found["confidence"]
        return {"loss": loss, **found}

    def drawn(self, view: View, noise: Tensor) -> tuple[Tensor, Tensor]:
        """As the engine draws them."""
        hidden = self.hidden(view)
        base, before = self._target.logits(hidden), view.first_tokens()
        tokens, sure = [], []
        for k in range(self.num_drafts):
            if self.drafter.confidence_head is not None:
                sure.append(self.drafter.confidence_logits(hidden[:, :, k], before))
            before = (self.drafter.corrected(base[:, :, k], before) + noise[:, :, k]).argmax(-1)
            tokens.append(before)
        found = torch.stack(tokens, dim=-1)
        return found, torch.stack(sure, dim=-1) if sure else torch.zeros_like(found, dtype=torch.float32)

    def _before(self, view: View) -> Tensor:
        """The tokens before those that are guessed, [B, N, num_drafts]."""
        return torch.cat([view.first_tokens()[..., None], view.labels(self.num_drafts - 1)], dim=-1)


class DepthStudent:
    """The target's own draft depths; its trunk, embedding and head stay as they are."""

    def __init__(self, target: Inkling) -> None:
        self._target = target
        self.num_drafts = len(target.depths)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those of the depths."""
        return dict(self._target.depths.named_parameters())

    def logits(self, view: View) -> Tensor:
        """[B, N, num_drafts, V] fp32: depth k's row k places behind the anchor."""
        drafted = self._target.draft(view.final, view.token_ids)
        rows = [taken(hidden, view.anchors + k) for k, hidden in enumerate(drafted)]
        return self._target.logits(torch.stack(rows, dim=2))

    def drawn(self, view: View, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Behind true tokens, whatever was guessed before."""
        tokens = (self.logits(view) + noise).argmax(-1)
        return tokens, torch.zeros_like(tokens, dtype=torch.float32)

    def losses(self, view: View) -> dict[str, Tensor]:
        """`loss`: the mean over depths, each of which guesses at every token."""
        labels = view.token_ids[:, 1:].flatten()
        drafted = self._target.draft(view.final, view.token_ids)
        found = [functional.cross_entropy(self._target.logits(h[:, :-1]).flatten(0, 1), labels) for h in drafted]
        return {"loss": torch.stack(found).mean(), **{f"depth {k}": loss for k, loss in enumerate(found)}}


@torch.no_grad()
def target_logits(target: Inkling, view: View, num_drafts: int) -> Tensor:
    """What the target says to the tokens behind the anchors, [B, N, num_drafts, V] fp32."""
    return target.logits(view.behind(num_drafts))


def l1_distance(logprobs: Tensor, wanted: Tensor) -> Tensor:
    """[...] between distributions, given as logprobs [..., V] and as logits [..., V] to which no gradient goes."""
    return (logprobs.exp() - wanted.softmax(-1)).abs().sum(-1)
