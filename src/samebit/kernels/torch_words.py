"""Rows picked, joined and put in order in plain torch: what is done around products, and for guesses before and after them.

The twin of triton/words.py, and what sets without kernels of their own use. Knows no model and no drafter.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samebit.kernels.values import DraftWords


def draft_words(
    slots: Tensor,
    samples: Tensor,
    length: Tensor,
    next_token: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    words: list[Tensor],
    filler: int,
) -> None:
    to, slot, sample = DraftWords(*words), slots.long(), samples.long()
    lengths = torch.where(slot > 0, length[slot], 0)
    last_tokens = torch.where(slot > 0, next_token[slot], 0)
    to.lengths.copy_(lengths)
    to.last_tokens.copy_(last_tokens)
    columns = (to.temperature, to.top_k, to.top_p, to.min_p, to.seed, to.sample_index)
    for column, setting in zip(columns, (temperature, top_k, top_p, min_p, seed, sample_index), strict=True):
        column.copy_(setting[sample])
    ahead = torch.arange(max(to.position.shape[0] + 1, to.token_ids.shape[1]), device=slots.device)
    to.position.copy_(lengths + ahead[1 : to.position.shape[0] + 1, None])
    place = ahead[: to.token_ids.shape[1]]
    to.token_ids.copy_(torch.where(place == 0, last_tokens[:, None], filler))
    to.positions.copy_(lengths[:, None] + place)


def keep_drafts(tokens: Tensor, slots: Tensor, drafts: Tensor) -> Tensor:
    drafts[slots.long(), : tokens.shape[1]] = tokens
    return tokens.clone(memory_format=torch.contiguous_format)


def take_rows(x: Tensor, rows: Tensor, divisor: float) -> Tensor:
    return x.index_select(0, rows) / divisor


def joined_sums(x: list[Tensor], y: list[Tensor]) -> Tensor:
    return torch.cat([one + other for one, other in zip(x, y, strict=True)], dim=1)


def joined_bytes(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "draft_words": draft_words,
    "keep_drafts": keep_drafts,
    "take_rows": take_rows,
    "joined_sums": joined_sums,
    "joined_bytes": joined_bytes,
}
