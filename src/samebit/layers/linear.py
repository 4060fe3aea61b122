"""Linear maps and the embedding table over packed weights. Knows a kernel set and no model."""

from __future__ import annotations

from torch import Tensor

from samebit.kernels.sets import KernelSet
from samebit.layers.norm import RmsNorm


class Linear:
    """`x` [T, K] times a transposed weight [N, K] (fp32 or bf16, packed once): [T, N]. No bias.

    The result is an activation, or fp32 if `wide`.
    """

    def __init__(self, kernels: KernelSet, weight: Tensor, *, wide: bool = False) -> None:
        self._kernels = kernels
        self._packed = kernels.pack_linear(weight, wide=wide)
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._packed)

    def of_norm(self, norm: RmsNorm, x: Tensor, y: Tensor, *, is_gated: bool = False) -> tuple[Tensor, Tensor]:
        """`x + y` [T, K] fp32, and the result for the norm of it; if `is_gated`, silu(gate) * up [T, N / 2] of a result gate | up."""
        return self._kernels.normed_linear(x, y, norm.gain, norm.eps, self._packed, is_gated=is_gated)

    def addends(self, x: Tensor) -> Tensor:
        """[S, T, N] fp32: the result, if `wide`, is their sum over S, in order."""
        return self._kernels.addends(x, self._packed)


class Embedding:
    """Rows of a table [V, H] (fp32 or bf16) by token ids [T] int32: [T, H] fp32."""

    def __init__(self, kernels: KernelSet, table: Tensor) -> None:
        self._kernels = kernels
        self._table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._kernels.embedding(token_ids, self._table)
