"""What drafters learn from: sequences as the frozen target sees them, and places in them from which to guess.

Knows the trainable target; knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from samebit.train.model import Inkling

# Every place may be drawn, whatever its token weighs.
_LEAST_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True)
class View:
    """Sequences `token_ids` [B, T] and what the target makes of them: `taps` [B, T, len(taps) * H] and `final` [B, T, H].

    `anchors` [B, N]: places of the last token of which a drafter knows; it guesses those behind it, and sees the target's states
    before it only.
    """

    token_ids: Tensor
    taps: Tensor
    final: Tensor
    anchors: Tensor

    def labels(self, num_drafts: int) -> Tensor:
        """The tokens behind each anchor, [B, N, num_drafts]."""
        return taken(self.token_ids, self.anchors[..., None] + 1 + _steps(self.anchors, num_drafts))

    def behind(self, num_drafts: int) -> Tensor:
        """The target's final hidden states from which it predicts `labels`, [B, N, num_drafts, H]."""
        return taken(self.final, self.anchors[..., None] + _steps(self.anchors, num_drafts))

    def first_tokens(self) -> Tensor:
        """The tokens at the anchors, [B, N]."""
        return taken(self.token_ids, self.anchors)


@torch.no_grad()
def view_of(target: Inkling, token_ids: Tensor, layers: Sequence[int], anchors: Tensor) -> View:
    """Run the frozen target, in bf16 on a GPU."""
    with torch.autocast(token_ids.device.type, torch.bfloat16, enabled=token_ids.is_cuda):
        final, taps = target.tapped(token_ids, layers)
    return View(token_ids, taps, final, anchors)


def draw_anchors(weights: Tensor, count: int, num_drafts: int, generator: torch.Generator) -> Tensor:
    """`count` different places a row, ascending, [B, count]: with a token before them and `num_drafts` behind.

    weights [B, T]: a place is drawn the likelier the more the token behind it weighs; weights[:, t] is that of token t + 1.
    """
    odds = weights[:, 1 : weights.shape[1] - num_drafts].float().clamp(min=_LEAST_WEIGHT)
    return torch.multinomial(odds, count, generator=generator).sort(dim=1).values + 1


def taken(rows: Tensor, places: Tensor) -> Tensor:
    """Pick from rows [B, T, ...] those at places [B, ...], which stand in for the dimension T."""
    flat = places.flatten(1)
    picked = rows[torch.arange(len(rows), device=rows.device)[:, None], flat]
    return picked.view(*places.shape, *rows.shape[2:])


def raw_embedding(target: Inkling, token_ids: Tensor) -> Tensor:
    """Rows of the target's table as they are, without its norm: so drafters take them."""
    return functional.embedding(token_ids, target.weights["embed"])


def _steps(like: Tensor, count: int) -> Tensor:
    return torch.arange(count, device=like.device)
