"""Where the time of a run went. Knows a clock and names."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger(__name__)


class Phases:
    """Seconds by phase, in order; its owner is the run that it measures."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Everything since the phase before belongs to `name`."""
        now = time.monotonic()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._since, 3)
        self._since = now
        _log.info("%s: %.1f s", name, self.seconds[name])

    def line(self) -> str:
        """All of them in one line."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
