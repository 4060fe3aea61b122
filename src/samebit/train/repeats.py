"""Rows of code in which some lines are said again and again, and how each of their tokens counts. Knows tensors of token ids.

A small model that decodes greedily falls into repetitions. Here the repetition is given and the true text follows it, so that
the model learns to go on; a first copy is not learnt, and further ones are what not to say.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from samebit.train.transcript import COPIED, LEAVING, LOOPING, PLAIN

_MOST_LINES = 6
_MOST_COPIES = 5
_LEAVING_TOKENS = 12


def line_tokens(tokenizer: Tokenizer) -> Tensor:
    """Which tokens [V] open a line, bool."""
    size = tokenizer.get_vocab_size()
    return torch.tensor(["\n" in tokenizer.decode([i], skip_special_tokens=True) for i in range(size)])


def repeat_lines(token_ids: Tensor, opens_line: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat one to six whole lines in each row, so that they stand there two to six times; ids and classes [B, N].

    `draws` [B, 3] in [0, 1) choose how many lines, which, and how often. What follows moves back, and the row keeps its length.
    Copies fill at most half of a row; a row whose first half has too few lines stays as it is.
    """
    length = token_ids.shape[1]
    lines = opens_line[token_ids].cumsum(1)  # how many lines begin up to each token
    num_lines = 1 + (draws[:, 0] * _MOST_LINES).long()
    choices = lines[:, length // 2] - num_lines
    first = 1 + (draws[:, 1] * choices.clamp(min=1)).long()
    begin = (lines < first[:, None]).sum(1)
    end = (lines < (first + num_lines)[:, None]).sum(1)
    span = (end - begin).clamp(min=1)
    copies = torch.minimum(1 + (draws[:, 2] * _MOST_COPIES).long(), length // 2 // span)
    added = (torch.where(choices > 0, copies, 0) * span)[:, None]
    begin, end, span = begin[:, None], end[:, None], span[:, None]
    at = torch.arange(length, device=token_ids.device)
    is_copied = (at >= end) & (at < end + added)
    source = torch.where(is_copied, begin + (at - begin) % span, torch.where(at < end, at, at - added))
    is_leaving = (added > 0) & (at >= end + added) & (at < end + added + _LEAVING_TOKENS)
    classes = torch.full_like(token_ids, PLAIN, dtype=torch.uint8)
    classes[is_copied] = COPIED
    # What is said twice may be meant; the third time and after is a loop.
    classes[is_copied & (at >= end + span)] = LOOPING
    classes[is_leaving] = LEAVING
    return token_ids.gather(1, source), classes
