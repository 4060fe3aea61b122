"""Root-mean-square normalisation (Zhang and Sennrich, 2019). Knows a kernel set and no model."""

from __future__ import annotations

from torch import Tensor

from samebit.kernels.sets import KernelSet


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * gain` over groups of `gain`'s length C: [T, n * C] in, the same shape out, fp32.

    With n heads of C channels in a row each head is normalised by itself, all with the one gain [C].
    """

    def __init__(self, kernels: KernelSet, gain: Tensor, eps: float) -> None:
        self._kernels = kernels
        self._gain = gain.float()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self._gain.shape[0])
        return self._kernels.rms_norm(groups, self._gain, self._eps).view(x.shape)
