"""What a drafter of an engine guessed, and what its state was, recorded while requests run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samebit.core.plan import BatchPlan, StepOutput
from samebit.engine.engine import Engine
from tests.driving import watch_steps

Guess = tuple[list[int], list[float]]
"""Tokens, and how likely each is right."""


class Guesses:
    """By request: what was guessed behind so many tokens."""

    def __init__(self) -> None:
        self.of: defaultdict[str, dict[int, Guess]] = defaultdict(dict)

    def add(self, plan: BatchPlan, output: StepOutput) -> None:
        for draft, tokens, confidence in zip(plan.drafts, output.drafts, output.confidence, strict=True):
            row = plan.rows[draft.row]
            count = row.start + row.num_tokens - row.num_drafts + output.accepted[draft.row] + 1
            self.of[row.request_id][count] = (tokens, confidence)


@contextmanager
def recorded(engine: Engine, *others: Any) -> Iterator[Guesses]:
    """The guesses of all steps; `others` are called with each plan and its output, before any page is freed."""
    guesses = Guesses()

    def watched(plan: BatchPlan, output: StepOutput) -> None:
        guesses.add(plan, output)
        for other in others:
            other(plan, output)

    watch_steps(engine, watched)
    try:
        yield guesses
    finally:
        del engine._runner.launch


class Keys:
    """The drafter's keys and values of a request that runs alone, as they lie in pages: `of[layer]` [2, n, heads, width]."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.of: list[Tensor] = []
        self.length = 0

    def __call__(self, plan: BatchPlan, output: StepOutput) -> None:
        if not plan.rows or not plan.rows[0].num_tokens:
            return
        pools, slot = self._engine.pools, plan.rows[0].slot
        self.length = int(pools.tables.length[slot])
        self.of = []
        part = pools.part(self._engine.drafter_part)
        for layers, group in zip(part.kv, part.groups, strict=True):
            size = pools.geometry.page_size
            first = pools.geometry.layout.groups[group].first_position(self.length)
            at = torch.arange(first, self.length)
            pages = pools.tables.page_table[group][slot].long()[at // size]
            for pool in layers:
                self.of.append(torch.stack([x[pages, :, at % size] for x in (pool.k, pool.v)]))
