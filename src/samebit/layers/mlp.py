"""Feed-forward layers: one gated MLP, or a router over gated experts. Knows a kernel set and no model."""

from __future__ import annotations

from torch import Tensor

from samebit.kernels.sets import KernelSet
from samebit.layers.linear import Linear


class DenseMlp:
    """`scale * (silu(gate) * up) w2^T` for `x` [T, H] fp32; `gate_up` gives [T, 2I], gate half first."""

    def __init__(self, kernels: KernelSet, gate_up: Linear, down: Linear, scale: float) -> None:
        self._kernels = kernels
        self._gate_up, self._down = gate_up, down
        self._scale = scale

    def __call__(self, x: Tensor, num_tokens: Tensor) -> Tensor:
        return self._down(self._kernels.swiglu(self._gate_up(x))) * self._scale


class MoeMlp:
    """Routed and always-on shared experts: `x` [T, H] fp32 in and out; rows from `num_tokens` [1] on are zeros.

    `router` gives [T, E + S] logits, the S shared experts last. The `top_k` experts of largest sigmoid(logit) + bias
    are chosen; the weights of the chosen and the shared are their sigmoids over the sum of these, times `scale`.
    `w13` [E+S, 2I, H] has gate rows before up rows, `w2` is [E+S, H, I].
    """

    def __init__(
        self,
        kernels: KernelSet,
        router: Linear,
        bias: Tensor,
        w13: Tensor,
        w2: Tensor,
        top_k: int,
        scale: float,
    ) -> None:
        self._kernels = kernels
        self._router = router
        self._bias = bias.float()
        self._experts = kernels.pack_experts(w13, w2)
        self._top_k = top_k
        self._num_shared = w13.shape[0] - bias.shape[0]
        self._scale = scale

    def __call__(self, x: Tensor, num_tokens: Tensor) -> Tensor:
        return self._kernels.mixture(
            x, self._router.addends(x), self._bias, self._top_k, self._num_shared, self._scale, num_tokens,
            self._experts,
        )  # fmt: skip
