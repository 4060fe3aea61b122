"""What a model's forward pass gives. Knows tensors only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """`final` [T, H] is what `logits` takes; `taps` are residual streams [T, H] fp32 of the layers that were asked for."""

    final: Tensor
    taps: tuple[Tensor, ...] = ()
