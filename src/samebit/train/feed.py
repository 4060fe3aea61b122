"""Training batches: windows of the code stream, and dialogues as a source gives them.

Knows token streams and dialogues; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from samebit.train.repeats import line_tokens, repeat_lines
from samebit.train.tokens import TrainingData
from samebit.train.transcript import ANSWER, COPIED, LEAVING, LOOPING, PLAIN, STATED, WORDING
from samebit.train.writers import Source, Written

# How much a token of each class counts.
_WEIGHTS = {PLAIN: 1.0, ANSWER: 4.0, STATED: 0.1, WORDING: 2.0, COPIED: 0.0, LEAVING: 3.0, LOOPING: -1.0}
_MOST_AT_ONCE = 32
# At most one repetition a row: in 7 % of rows of 512 tokens, in 56 % of rows of 4,096.
_REPEAT_EVERY = 4100


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets [B, T] int64, weights [B, T] fp32; the first `num_code` rows are windows of code."""

    token_ids: Tensor
    targets: Tensor
    weights: Tensor
    num_code: int


class Feed:
    """Batches of `rows` sequences of `length` tokens, a `dialogue_share` of them dialogues.

    Dialogues lie in a ring of `ring_rows` that `source` fills; once in `repeat_every` tokens of code lines are repeated (None: never).
    """

    def __init__(
        self,
        data: TrainingData,
        source: Source,
        *,
        length: int,
        rows: int,
        dialogue_share: float,
        seed: int,
        device: torch.device,
        ring_rows: int,
        repeat_every: int | None = _REPEAT_EVERY,
    ) -> None:
        self._rows, self._length = rows, length
        self._source = source
        self._num_dialogues = round(rows * dialogue_share)
        self._device = device
        self._repeat_share = length / repeat_every if repeat_every else 0.0
        self._opens_line = line_tokens(data.tokenizer).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._code = torch.from_numpy(data.train.astype(np.int16)).to(device)
        self._ids = torch.zeros(ring_rows, length + 1, dtype=torch.int16, device=device)
        self._classes = torch.zeros(ring_rows, length + 1, dtype=torch.uint8, device=device)
        self._weights = torch.tensor([_WEIGHTS[c] for c in sorted(_WEIGHTS)], device=device)
        self._num_written = self._num_drawn = 0

    @property
    def num_written(self) -> int:
        """Dialogues so far."""
        return self._num_written

    def refill(self, at_least: int = 0) -> None:
        """Wait until there are `at_least` dialogues, then take what else lies ready."""
        while self._num_written < at_least:
            self._store(self._source.take())
        for _ in range(_MOST_AT_ONCE):
            part = self._source.ready()
            if part is None:
                return
            self._store(part)

    def batch(self) -> Batch:
        """The next batch."""
        if self._num_dialogues:
            # As many as are drawn: so that a slow writer is waited for, and no dialogue is learnt by heart.
            self._num_drawn += self._num_dialogues
            self.refill(at_least=self._num_drawn)
        num_code = self._rows - self._num_dialogues
        starts = self._draw(len(self._code) - self._length, num_code)
        windows = self._code[starts[:, None] + torch.arange(self._length + 1, device=self._device)]
        ids, classes = self._repeated(windows.long())
        if self._num_dialogues:
            chosen = self._draw(min(self._num_written, len(self._ids)), self._num_dialogues)
            ids, classes = torch.cat([ids, self._ids[chosen].long()]), torch.cat([classes, self._classes[chosen]])
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), self._weights[classes[:, 1:].long()], num_code)

    def _repeated(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of code and the classes of their tokens; in a share of the rows lines are repeated."""
        draws = torch.rand(len(ids), 4, device=self._device, generator=self._generator)
        repeated, classes = repeat_lines(ids, self._opens_line, draws[:, 1:])
        is_chosen = draws[:, :1] < self._repeat_share
        return torch.where(is_chosen, repeated, ids), torch.where(is_chosen, classes, 0)

    def _draw(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), device=self._device, generator=self._generator)

    def _store(self, part: Written) -> None:
        at = (torch.arange(len(part[0])) + self._num_written) % len(self._ids)
        rows = at.to(self._device)
        self._ids[rows] = torch.from_numpy(part[0]).to(self._device)
        self._classes[rows] = torch.from_numpy(part[1]).to(self._device)
        self._num_written += len(part[0])
