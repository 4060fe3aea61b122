"""Muon for matrices and AdamW for everything else, behind one step. Knows parameters by their names in models and drafters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Keys of parameters that map hidden vectors; tables, the router and vectors are AdamW's.
_MATRICES = ("q", "k", "v", "r", "o", "gate_up", "down", "input_proj")
_DRAFTER_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")
_DECAYED_TABLES = ("embed", "unembed", "router")
_ADAM_BETAS = (0.9, 0.95)
_ADAM_EPS = 1e-10
_ADAM_DECAY = 0.01


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates, Muon's weight decay (per step and unit of rate) and its momentum."""

    muon: float = 0.02
    adam: float = 3e-3
    decay: float = 0.05
    momentum: float = 0.95


class Optimiser:
    """All of `parameters`, by name. `step` takes the gradients as they are; `state_dict` holds all it needs to go on."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rates: Rates) -> None:
        self._rates = rates
        groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._matrices: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        tables: list[Tensor] = []
        vectors: list[Tensor] = []
        for name, parameter in parameters.items():
            key = _key(name)
            if is_matrix(key):
                shape = _as_matrices(key, parameter).shape[-2:]
                self._matrices[shape[0], shape[1]].append(parameter)
                groups[shape[0], shape[1]].append(_as_matrices(key, torch.zeros_like(parameter)).flatten(0, -3))
            else:
                (tables if key in _DECAYED_TABLES else vectors).append(parameter)
        self._momentum = {shape: torch.cat(parts) for shape, parts in groups.items()}
        self._adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": _ADAM_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=rates.adam,
            betas=_ADAM_BETAS,
            eps=_ADAM_EPS,
            fused=next(iter(parameters.values())).is_cuda,
        )

    @torch.no_grad()
    def step(self, multiplier: float) -> None:
        """Move all parameters at `multiplier` times the rates, and drop the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = self._rates.adam * multiplier
        self._adam.step()
        rate = self._rates.muon * multiplier
        for shape, parameters in self._matrices.items():
            gradients = torch.cat([p.grad.reshape(-1, *shape) for p in parameters if p.grad is not None])
            assert len(gradients) == len(self._momentum[shape]), "every parameter has a gradient"
            momentum = self._momentum[shape].lerp_(gradients, 1 - self._rates.momentum)
            moves = orthogonalised(gradients.lerp(momentum, self._rates.momentum))
            # A tall matrix's columns are longer for the same effect on what comes out.
            moves *= max(1.0, shape[0] / shape[1]) ** 0.5
            counts = [p.numel() // (shape[0] * shape[1]) for p in parameters]
            parts = [m.view_as(p) for m, p in zip(torch.split(moves, counts), parameters, strict=True)]
            torch._foreach_mul_(parameters, 1 - rate * self._rates.decay)
            torch._foreach_add_(parameters, parts, alpha=-rate)
        for parameter in (p for ps in self._matrices.values() for p in ps):
            parameter.grad = None
        self._adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:  # Any: torch's optimiser state
        """Momenta and AdamW's state."""
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # Any: torch's optimiser state
        """Go on from what `state_dict` gave."""
        for shape, momentum in self._momentum.items():
            momentum.copy_(state["momentum"][shape])
        self._adam.load_state_dict(state["adam"])


def is_matrix(key: str) -> bool:
    """Whether Muon moves the parameter with this key."""
    return key in (*_MATRICES, *_DRAFTER_MATRICES) or key.endswith(("_gate_up", "_down"))


def _key(name: str) -> str:
    """What a parameter is called in its layer."""
    return name.removesuffix(".weight").rpartition(".")[2]


def orthogonalised(matrices: Tensor) -> Tensor:
    """Nearly orthogonal matrices [N, R, C] fp32 with the singular vectors of `matrices`.

    Five Newton-Schulz iterations with the quintic coefficients of Muon (Jordan et al., 2024), which bring singular values
    to about 1 ± 0.3; bf16 on a GPU.
    """
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result.float()


def _as_matrices(key: str, parameter: Tensor) -> Tensor:
    """[..., R, C] with a leading dimension; gate and up are maps of their own."""
    if key.endswith("gate_up"):
        return parameter.reshape(-1, 2, parameter.shape[-2] // 2, parameter.shape[-1])
    return parameter[None]
