"""Training batches: windows of the code stream and dialogues that worker processes write while the model trains.

Knows token streams and dialogues; knows no model.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebit.core.errors import ConfigError
from samebit.train.dialogues import DialogueWriter
from samebit.train.repeats import line_tokens, repeat_lines
from samebit.train.tokens import TrainingData, load_data
from samebit.train.transcript import ANSWER, COPIED, LEAVING, PLAIN, STATED, WORDING

# How much a token of each class counts.
_WEIGHTS = {PLAIN: 1.0, ANSWER: 4.0, STATED: 0.1, WORDING: 2.0, COPIED: 0.0, LEAVING: 3.0}
_QUEUED = 32
_PATIENCE = 2.0  # seconds between looks at the processes

Written = tuple[np.ndarray[Any, np.dtype[np.int16]], np.ndarray[Any, np.dtype[np.uint8]]]  # ids and classes [N, T + 1]


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and targets [B, T] int64, weights [B, T] fp32; the first `num_code` rows are windows of code."""

    token_ids: Tensor
    targets: Tensor
    weights: Tensor
    num_code: int


class Feed:
    """Batches of `rows` sequences of `length` tokens, a `dialogue_share` of them dialogues.

    Dialogues lie in a ring of `ring_rows`, written by `workers` processes, or by this one where there are none; then the
    batches are a function of the seed. In a `repeat_share` of the rows of code lines are repeated. A context manager: leaving it ends the processes.
    """

    def __init__(
        self,
        data: TrainingData,
        folder: Path,
        *,
        length: int,
        rows: int,
        dialogue_share: float,
        workers: int,
        seed: int,
        device: torch.device,
        ring_rows: int,
        repeat_share: float = 0.07,
    ) -> None:
        self._rows, self._length = rows, length
        self._num_dialogues = round(rows * dialogue_share)
        self._device = device
        self._repeat_share = repeat_share
        self._opens_line = line_tokens(data.tokenizer).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._code = torch.from_numpy(data.train.astype(np.int16)).to(device)
        self._ids = torch.zeros(ring_rows, length + 1, dtype=torch.int16, device=device)
        self._classes = torch.zeros(ring_rows, length + 1, dtype=torch.uint8, device=device)
        self._weights = torch.tensor([_WEIGHTS[c] for c in sorted(_WEIGHTS)], device=device)
        self._num_written = 0
        self._chunk = max(1, min(64, 32768 // length))
        self._writer = None if workers else _writer(data, seed)
        # A started process is spawned: a GPU that is in use does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(_QUEUED) if workers else None  # Any: its class has no public type
        arguments = [(self._queue, folder, length, self._chunk, seed * 100_003 + w) for w in range(workers)]
        self._processes = [context.Process(target=_write, args=a, daemon=True) for a in arguments]
        for process in self._processes:
            process.start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        if self._queue is not None:
            self._queue.cancel_join_thread()
            self._queue.close()

    @property
    def num_written(self) -> int:
        """Dialogues so far."""
        return self._num_written

    def refill(self, at_least: int = 0) -> None:
        """Wait until there are `at_least` dialogues, then take what else lies ready."""
        while self._num_written < at_least:
            self._store(self._next())
        for _ in range(_QUEUED if self._queue is not None else 0):
            try:
                self._store(self._queue.get_nowait())
            except queue.Empty:
                return

    def _next(self) -> Written:
        """Dialogues that are there or will soon be. Raises ConfigError if nobody writes them."""
        if self._writer is not None:
            return written(self._writer, self._length + 1, self._chunk)
        while True:
            try:
                found: Written = self._queue.get(timeout=_PATIENCE)
            except queue.Empty:
                if not any(process.is_alive() for process in self._processes):
                    raise ConfigError(
                        f"workers={len(self._processes)}: the processes that write dialogues have died"
                    ) from None
            else:
                return found

    def batch(self) -> Batch:
        """The next batch."""
        if self._num_dialogues:
            self.refill(at_least=self._num_dialogues)
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


def written(writer: DialogueWriter, length: int, count: int) -> Written:
    """So many dialogues of `length` tokens."""
    rows = [writer.dialogue(length) for _ in range(count)]
    return np.array([ids for ids, _ in rows], dtype=np.int16), np.array([c for _, c in rows], dtype=np.uint8)


def _writer(data: TrainingData, seed: int) -> DialogueWriter:
    return DialogueWriter(data.tokenizer, data.train, data.sentences, seed, "train")


def _write(out: Any, folder: Path, length: int, chunk: int, seed: int) -> None:  # Any: a queue has no public type
    """What a worker process does: write dialogues until it is ended."""
    os.nice(5)
    writer = _writer(load_data(folder), seed)
    while True:
        out.put(written(writer, length + 1, chunk))
