"""A terminal progress bar over requests, with tokens per second. Drawn by rich, which is imported only if it is shown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from samebit.core.request import EngineOutput

if TYPE_CHECKING:
    from rich.progress import Progress


class TokenProgress:
    """A context in which `update` advances the bar by each finished request. Does nothing unless enabled."""

    def __init__(self, num_requests: int, *, enabled: bool) -> None:
        self._num_requests = num_requests
        self._enabled = enabled
        self._num_tokens = 0
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._enabled:
            from rich.progress import Progress  # noqa: PLC0415 - a batch without a bar should not pay for it

            self._bar = Progress(*Progress.get_default_columns(), "{task.fields[rate]}")
            self._bar.start()
            self._task = self._bar.add_task("requests", total=self._num_requests, rate="")
            self._start_s = time.monotonic()
        return self

    def update(self, outputs: Sequence[EngineOutput]) -> None:
        """Count the outputs of one step."""
        if self._bar is None:
            return
        self._num_tokens += sum(len(output.token_ids) for output in outputs)
        rate = self._num_tokens / max(time.monotonic() - self._start_s, 1e-9)
        finished = sum(output.finish_reason is not None for output in outputs)
        self._bar.update(self._task, advance=finished, rate=f"{rate:.0f} tokens/s")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
