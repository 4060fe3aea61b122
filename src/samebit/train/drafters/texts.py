"""Sequences to learn from: the corpus and dialogues as the model's own training takes them, cut to length, and text that the target
writes itself.

Knows the feed and the target; knows no drafter.
"""

from __future__ import annotations

import logging
import random
import time

import torch
from torch import Tensor

from samebit.train.drafters.decode import continued, gumbel
from samebit.train.drafters.recipe import DrafterRecipe
from samebit.train.feed import Feed
from samebit.train.model import Inkling

# Of a given token, where one that the target has written weighs 1: places to guess from are drawn by it.
_PROMPT_WEIGHT = 0.1

_log = logging.getLogger(__name__)

Sequences = tuple[Tensor, Tensor]  # token ids [B, T] int64, weights [B, T] fp32: weights[:, t] is that of token t + 1


class Texts:
    """Sequences of a step's size; an `own_share` of the steps is the target's own text.

    `num_own_tokens`, `own_seconds`: what the target has written, prompts not counted, and the time it took.
    """

    def __init__(self, recipe: DrafterRecipe, target: Inkling, feed: Feed, *, own_share: float, seed: int) -> None:
        self._recipe, self._target, self._feed, self._own_share = recipe, target, feed, own_share
        self._rng = random.Random(seed)
        self._generator = torch.Generator(target.weights["embed"].device).manual_seed(seed)
        self._own: list[Sequences] = []
        self.num_own_tokens = 0
        self.own_seconds = 0.0

    def next(self) -> Sequences:
        """The next step's."""
        if self._rng.random() < self._own_share:
            return self._next_own()
        batch, length = self._feed.batch(), self._rng.choice(self._recipe.lengths)
        return batch.token_ids.view(-1, length), batch.weights.view(-1, length)

    def _next_own(self) -> Sequences:
        own = self._recipe.own
        if not self._own:
            rows, weights = self._written()
            per_step = max(1, self._recipe.rows * self._recipe.row_length // own.length)
            for _ in range(own.uses):
                order = torch.randperm(len(rows), device=rows.device, generator=self._generator)
                self._own += zip(*(torch.split(part[order], per_step) for part in (rows, weights)), strict=True)
        return self._own.pop()

    def _written(self) -> Sequences:
        """New text: rows that begin as the feed's do, most of them greedy. What begins them weighs little."""
        own, began = self._recipe.own, time.monotonic()
        parts: list[Tensor] = []
        least, most = own.prompt
        while sum(map(len, parts)) < own.rows:
            parts.append(self._feed.batch().token_ids.view(-1, own.length)[:, :most])
        prompts = torch.cat(parts)[: own.rows]
        drawn = torch.arange(own.rows, device=prompts.device) % own.drawn_every == 0
        temperature = drawn.float()[:, None]

        def draw(logits: Tensor, _place: int) -> Tensor:
            noise = gumbel((logits.shape[0], logits.shape[1]), self._generator)
            return (logits + temperature * noise).argmax(-1)

        lengths = torch.randint(least, most + 1, (own.rows,), generator=self._generator, device=prompts.device)
        found = continued(self._target, prompts, lengths, own.length, draw)
        seconds = time.monotonic() - began
        written = torch.arange(1, own.length + 1, device=prompts.device) >= lengths[:, None]
        self.num_own_tokens += int(written[:, :-1].sum())
        self.own_seconds += seconds
        _log.info("%d rows of %d tokens written by the target in %.1f s", own.rows, own.length, seconds)
        return found, torch.where(written, 1.0, _PROMPT_WEIGHT)
