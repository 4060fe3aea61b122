"""What every language model offers the runner, and how a folder of weights becomes one.

A model never asks which mode, drafter, batch or kernels it runs under. Knows architectures by name only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from samebit.core.errors import CheckpointError
from samebit.indexing import StepIndex
from samebit.kernels.sets import KernelSet
from samebit.models.checkpoint import read_json
from samebit.models.hash import load_hash
from samebit.models.hidden import Hidden
from samebit.models.inkling_weights import load_inkling
from samebit.state.layout import StateLayout
from samebit.state.pools import PoolPart


class CausalLM(Protocol):
    """A target model. `vocab_size` is the true one (no padding rows), `max_length` the most positions it can tell apart.

    `num_parameters` counts the elements of all weights that are used.
    """

    vocab_size: int
    max_length: int
    num_parameters: int

    def state_layout(self) -> StateLayout:
        """What the model keeps for each request."""
        ...

    def forward(self, index: StepIndex, pools: PoolPart) -> Hidden:
        """Run the step's tokens through all layers, up to the final norm. Writes the pools."""
        ...

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """[L, V] fp32 for `rows` [L] int64 of final hidden states [T, H] as `forward` gives them, or for all of them."""
        ...

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(N, K) of every linear map, for certification of the kernels."""
        ...


_LOADERS: Mapping[str, Callable[[Path, KernelSet, torch.device, Sequence[int]], CausalLM]] = {
    "inkling_mm_model": load_inkling,
    "inkling_text": load_inkling,
    "samebit_hash": lambda path, _kernels, device, _taps: load_hash(path, device),
}


def load_model(path: Path, kernels: KernelSet, device: torch.device, taps: Sequence[int] = ()) -> CausalLM:
    """The model in folder `path`, chosen by `model_type` of its config.json; `taps`: layers whose residual streams it also gives.

    Raises CheckpointError, naming what is wrong, for anything that cannot be served exactly as stored.
    """
    model_type = read_json(path / "config.json").get("model_type")
    if not isinstance(model_type, str) or model_type not in _LOADERS:
        known = ", ".join(sorted(_LOADERS))
        raise CheckpointError(f"{path / 'config.json'}: model_type={model_type!r} is not one of {known}")
    return _LOADERS[model_type](path, kernels, device, taps)
