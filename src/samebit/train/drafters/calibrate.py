"""Sequential temperature scaling: makes the product of a drafter's confidences what it claims, the chance that so many guesses are
accepted. The method is DSpark's. Knows tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NUM_BINS = 15
_TEMPERATURES = torch.logspace(-1, 1, 41)


@dataclass(frozen=True, slots=True)
class Calibration:
    """`temperatures` of the confidence logits by position; the expected calibration error of their products before and after."""

    temperatures: list[float]
    dataset: str
    num_samples: int
    ece_before: list[float]
    ece_after: list[float]


def calibrated(logits: Tensor, accepted: Tensor, dataset: str) -> Calibration:
    """Fit to confidence logits [n, K] and the numbers of accepted guesses, [n]; one position after the other."""
    n, K = logits.shape
    before = after = torch.ones(n)
    temperatures, errors_before, errors_after = [], [], []
    for k in range(K):
        is_accepted = accepted > k
        before = before * logits[:, k].sigmoid()
        errors_before.append(calibration_error(before, is_accepted))
        candidates = [after * (logits[:, k] / t).sigmoid() for t in _TEMPERATURES]
        errors = [calibration_error(chance, is_accepted) for chance in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        temperatures.append(round(float(_TEMPERATURES[best]), 6))
        errors_after.append(errors[best])
        after = candidates[best]
    return Calibration(temperatures, dataset, n, errors_before, errors_after)


def calibration_error(chances: Tensor, happened: Tensor) -> float:
    """Mean distance between chances [n] and what happened [n], over bins of equal width, weighed by what lies in them."""
    if not len(chances):
        return 0.0
    bins = (chances * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    told = torch.zeros(_NUM_BINS).index_add(0, bins, chances)
    found = torch.zeros(_NUM_BINS).index_add(0, bins, happened.float())
    return float((told - found).abs().sum() / len(chances))
