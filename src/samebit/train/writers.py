"""Who writes dialogues for training: other processes while the model trains, or this one when asked.

Knows the writer and processes; knows no tensors.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from samebit.core.errors import ConfigError
from samebit.train.dialogues import DialogueWriter
from samebit.train.tokens import TrainingData, load_data

_QUEUED = 32
_PATIENCE = 2.0  # seconds between looks at the processes
_PORTION_TOKENS = 32768

Written = tuple[np.ndarray[Any, np.dtype[np.int16]], np.ndarray[Any, np.dtype[np.uint8]]]  # ids and classes [N, T + 1]


class Source(Protocol):
    """Gives dialogues of one length, a portion at a time."""

    def take(self) -> Written:
        """The next portion, as soon as there is one."""

    def ready(self) -> Written | None:
        """A portion that lies ready; None if there is none."""


class OwnWriter:
    """Writes in this process, when asked: what it gives is a function of the seed."""

    def __init__(self, data: TrainingData, *, length: int, seed: int) -> None:
        self._writer = DialogueWriter(data.tokenizer, data.train, data.sentences, seed, "train")
        self._length = length

    def take(self) -> Written:
        """The next portion."""
        count = max(1, min(64, _PORTION_TOKENS // self._length))
        rows = [self._writer.dialogue(self._length + 1) for _ in range(count)]
        return np.array([ids for ids, _ in rows], dtype=np.int16), np.array([c for _, c in rows], dtype=np.uint8)

    def ready(self) -> Written | None:
        """Nothing is written before it is asked for."""
        return None


class WriterProcesses:
    """So many processes that write from the corpus in `folder`. A context manager: leaving it ends them."""

    def __init__(self, folder: Path, *, length: int, seed: int, count: int) -> None:
        # A started process is spawned: a GPU that is in use does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(_QUEUED)  # Any: its class has no public type
        arguments = [(self._queue, folder, length, seed * 100_003 + number) for number in range(count)]
        self._processes = [context.Process(target=_write, args=a, daemon=True) for a in arguments]
        for process in self._processes:
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._queue.cancel_join_thread()
        self._queue.close()

    def take(self) -> Written:
        """A portion that is there or will soon be. Raises ConfigError if nobody writes it."""
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

    def ready(self) -> Written | None:
        """A portion that lies in the queue."""
        try:
            found: Written = self._queue.get_nowait()
        except queue.Empty:
            return None
        return found


def _write(out: Any, folder: Path, length: int, seed: int) -> None:  # Any: a queue has no public type
    """What a process does: write until it is ended."""
    os.nice(5)
    writer = OwnWriter(load_data(folder), length=length, seed=seed)
    while True:
        out.put(writer.take())
