"""Rotary position embedding (Su et al., 2021) in the half-split order that Qwen and Llama checkpoints use. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from samebit.kernels.values import Turn


class Rotary:
    """Turns the pairs (i, i + head_dim / 2) of each head by position * theta^(-2 i / head_dim).

    A table of `num_positions`, because a vectorised cosine may round differently depending on where in a tensor its operand
    lies. Angles are products in fp32, as in the code that checkpoints are trained with.
    """

    def __init__(self, head_dim: int, theta: float, num_positions: int, device: torch.device) -> None:
        steps = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = (torch.arange(num_positions, dtype=torch.float32)[:, None] * steps).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        self._cos = torch.cat([cos, cos], dim=1).to(device)
        self._sin = torch.cat([-sin, sin], dim=1).to(device)

    def at(self, positions: Tensor) -> Turn:
        """What turns heads at `positions` [T]."""
        return Turn(positions, self._cos, self._sin)
