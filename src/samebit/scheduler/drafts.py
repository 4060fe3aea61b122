"""How many guesses are worth verifying: a schedule, which changes speed and nothing else. Plain numbers.

A step's time is taken to be a + b * tokens, and `token_cost` is b / a. The guesses that raise tokens a second are, of all
requests' together, those most likely to be accepted, as long as one more raises it (the schedule of DSpark, DeepSeek-AI 2026,
with the simplest cost model). A guess counts only if those before it were accepted, so the choice is a prefix for each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

# Before anything is known, and what an estimate goes back to when nothing is verified, so that a request is tried again.
_PRIOR_ACCEPTED, _PRIOR_REJECTED = 2.0, 1.0
_MEMORY = 0.95


@dataclass(slots=True)
class AcceptanceEstimate:
    """How often a request's guesses have been right of late, those before them being right: `rate`, 0 to 1.

    Until it `has_learned` from a step with guesses there is nothing to forget.
    """

    accepted: float = _PRIOR_ACCEPTED
    rejected: float = _PRIOR_REJECTED
    has_learned: bool = False

    @property
    def rate(self) -> float:
        """The chance of one more."""
        return self.accepted / (self.accepted + self.rejected)

    def learn(self, num_guesses: int, num_accepted: int) -> None:
        """Take in a step of the request; without guesses it forgets."""
        is_rejected = num_accepted < num_guesses
        self.has_learned |= num_guesses > 0
        self.accepted += (1 - _MEMORY) * (_PRIOR_ACCEPTED - self.accepted) + num_accepted
        self.rejected += (1 - _MEMORY) * (_PRIOR_REJECTED - self.rejected) + is_rejected

    def survivals(self, confidence: Sequence[float]) -> list[float]:
        """The chance that each guess is accepted, from the drafter's `confidence` in it given those before; 1: no opinion."""
        rate = self.rate
        return list(accumulate([rate if opinion >= 1.0 else opinion for opinion in confidence], mul))


def least_survival(offers: Iterable[Sequence[float]], num_tokens: int, num_rows: int, token_cost: float) -> float:
    """The chance that a guess must have to be worth a place in a step of `num_tokens` other tokens, `num_rows` of them draws."""
    return _best(offers, num_tokens, num_rows, token_cost)[2]


def drafting_pays(rates: Sequence[float], most: int, num_tokens: int, token_cost: float, draft_cost: float) -> bool:
    """Whether requests that draw, in steps of `num_tokens` tokens, get more tokens a second if the device guesses for all of them.

    `rates`: the chance of one more right guess, by request, of at most `most`. Guessing for one costs `draft_cost`, a share as
    `token_cost` is.
    """
    if not rates:
        return False
    offers = (accumulate(repeat(rate, most), mul) for rate in rates)
    gained, cost, _ = _best(offers, num_tokens, len(rates), token_cost)
    return gained * (1 + token_cost * num_tokens) > len(rates) * (cost + draft_cost * len(rates))


def _best(
    offers: Iterable[Iterable[float]], num_tokens: int, num_rows: int, token_cost: float
) -> tuple[float, float, float]:
    """The choice of most tokens a second: expected tokens, the step's cost, and the chance of its least likely guess."""
    gained, cost, least = float(num_rows), 1 + token_cost * num_tokens, float("inf")
    # A guess must be likelier than this to be worth its place now, and with every other that is taken likelier still.
    floor = token_cost * gained / cost
    likely = [chance for offer in offers for chance in offer if chance > floor]
    for chance in sorted(likely, reverse=True):
        if (gained + chance) * cost <= gained * (cost + token_cost):
            break
        gained, cost, least = gained + chance, cost + token_cost, chance
    return gained, cost, least


def worth(guesses: list[int], survivals: Sequence[float], least: float) -> list[int]:
    """The first guesses, whose chances reach `least`; no chance is greater than one before it."""
    return guesses[: sum([chance >= least for chance in survivals])]
