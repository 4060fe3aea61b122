"""What a model's forward pass gives. Knows tensors only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_NO_TAPS = torch.empty(0, 0)


@dataclass(frozen=True, slots=True)
class Hidden:
    """`final` [T, H] is what `logits` takes; `taps` [T, n H] are residual streams of the n layers that were asked for, side by side.

    Taps are activations, and empty where nobody asked.
    """

    final: Tensor
    taps: Tensor = _NO_TAPS
