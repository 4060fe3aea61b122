"""What a model's forward pass gives. Knows tensors only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """`final` [T, H] is what `logits` takes; `taps` are the residual streams of the layers that were asked for, each as two terms [T, H].

    The first term is fp32, the second an activation; nobody has added them up, as that is the work of who reads them.
    """

    final: Tensor
    taps: tuple[tuple[Tensor, Tensor], ...] = ()
