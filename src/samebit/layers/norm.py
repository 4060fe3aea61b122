"""Root-mean-square normalisation (Zhang and Sennrich, 2019). Knows a kernel set and no model."""

from __future__ import annotations

from torch import Tensor

from samebit.kernels.sets import KernelSet


class RmsNorm:
    """`x / sqrt(mean(x^2) + eps) * gain` over each C columns of `x` [T, n C] fp32, with a gain [C]. Raises UnsupportedSizeError."""

    def __init__(self, kernels: KernelSet, gain: Tensor, eps: float) -> None:
        kernels.check_size("columns of a norm", gain.shape[0])
        self._kernels = kernels
        self.gain = gain.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.gain, self.eps)

    def after_adding(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """`x + y` [T, C] fp32, and the norm of it."""
        return self._kernels.add_norm(x, y, self.gain, self.eps)
