"""What was measured of one request. Times are seconds since the run began; nothing here reads a clock."""

from __future__ import annotations

import itertools

import msgspec


class Row(msgspec.Struct, kw_only=True):
    """One request: when it was to arrive, when it was sent, and when tokens came (several may come at once).

    Owned by whoever measures it until it has ended. `num_input_tokens` is None, and `num_output_tokens` counts pieces of text,
    where the server told no usage. `error` says why it failed. A row that neither ended nor failed was broken off.
    """

    conversation: int
    turn: int = 0
    max_tokens: int
    planned_s: float
    sent_s: float
    token_s: list[float] = []
    num_input_tokens: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    has_usage: bool = False
    is_complete: bool = False
    error: str | None = None

    def ttft_s(self, *, since_sent: bool = False) -> float:
        """From the planned arrival (or the sending) to the first token."""
        return self.token_s[0] - (self.sent_s if since_sent else self.planned_s)

    def e2el_s(self, *, since_sent: bool = False) -> float:
        """From the planned arrival (or the sending) to the last token."""
        return self.token_s[-1] - (self.sent_s if since_sent else self.planned_s)

    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where there is no second."""
        if self.num_output_tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_output_tokens - 1)

    def itl_s(self) -> list[float]:
        """Times between arrivals of tokens; several in one event are one arrival."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_s)]
