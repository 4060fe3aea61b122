"""What an engine computes with: kernels that have proved row-pure on this host, the model, and who guesses. Knows files."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from samebit.core.config import EngineConfig, SpeculativeConfig
from samebit.core.errors import ConfigError, ModelError
from samebit.engine.model_source import bundled_drafter, resolve_model
from samebit.engine.weights import Exchange
from samebit.kernels.certify import certify
from samebit.kernels.native.build import NativeUnavailableError
from samebit.kernels.selection import TORCH_SET, select_kernels, triton_kernels
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import UnsupportedSizeError
from samebit.models.base import CausalLM, load_model
from samebit.speculative.drafter import Drafter
from samebit.speculative.load import BLOCK_METHODS, device_drafter_taps, load_drafter
from samebit.state.layout import LayoutPart, StateLayout, join_layouts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its kernels, and the drafter on the device if the settings name one."""

    kernels: KernelSet
    model: CausalLM
    drafter: Drafter | None

    def layout(self) -> tuple[StateLayout, LayoutPart | None]:
        """All state of a request, and the drafter's part of it."""
        target = self.model.state_layout()
        return (target, None) if self.drafter is None else join_layouts(target, self.drafter.state_layout())

    def parts(self) -> dict[str, CausalLM | Drafter | None]:
        """All that has weights."""
        return {"model": self.model, "drafter": self.drafter}


@dataclass(frozen=True, slots=True)
class NextWeights:
    """What an engine can serve instead of what it serves."""

    model: str
    exchange: Exchange
    fingerprint: str
    profile: dict[str, str | int]


def load(config: EngineConfig, folder: Path, device: torch.device) -> Loaded:
    """The model in `folder` and its drafter, with kernels that are row-pure for each of their shapes.

    Raises ConfigError or ModelError for what cannot be served.
    """
    kernels = _select_kernels(config, device)
    try:
        loaded = _load_with(config, folder, kernels, device)
        groups = loaded.layout()[0].groups
        kernels.check_size("page groups", len(groups))
        kernels.check_size("columns of a head", max(layer.head_dim for group in groups for layer in group.layers))
        kernels.check_size("tokens of a vocabulary", loaded.model.vocab_size)
    except UnsupportedSizeError as error:
        raise ModelError(f"{folder}: {error}") from error
    shapes = loaded.model.linear_shapes() | (loaded.drafter.linear_shapes() if loaded.drafter else set())
    failures = (
        []
        if kernels.name == TORCH_SET
        else certify(kernels, shapes, device=device, budget_seconds=0.5 if device.type == "cpu" else 5.0)
    )
    if not failures:
        return loaded
    if device.type != "cpu":
        raise ConfigError(f"{kernels.name} is not row-pure on this device: {failures}")
    for failure in failures:
        _log.warning("%s is not row-pure on this host for %s; using the torch kernels there", kernels.name, failure)
    return _load_with(config, folder, kernels.without((f.num_out, f.num_in) for f in failures), device)


def check_room(folder: Path, free: int) -> None:
    """Raise ConfigError unless a copy of the weights in `folder` fits into `free` bytes: who runs out of memory is killed."""
    needed = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if needed > free:
        raise ConfigError(
            f"{folder}: its weights take {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB of memory are free"
        )


def with_draft_cost(config: EngineConfig, loaded: Loaded) -> EngineConfig:
    """`config` with a cost of guessing: the weights that a request's guesses pass, beside those that a token of the model does."""
    wanted, drafter = config.speculative_config, loaded.drafter
    if wanted is None or drafter is None or wanted.draft_cost is not None:
        return config
    num_passes = 1 + drafter.max_drafts if wanted.method in BLOCK_METHODS else 1
    cost = wanted.settled_token_cost * num_passes * drafter.num_parameters / max(1, loaded.model.num_parameters)
    return msgspec.structs.replace(config, speculative_config=msgspec.structs.replace(wanted, draft_cost=cost))


def load_again(config: EngineConfig, folder: Path, old: Loaded) -> Exchange:
    """What makes `old` the checkpoint in `folder`, in host memory, for the same kernels. Raises ModelError if that is not enough."""
    loaded = _load_with(config, folder, old.kernels, torch.device("cpu"))
    for what, before, after in (
        ("state layout", old.layout(), loaded.layout()),
        ("vocabulary size", old.model.vocab_size, loaded.model.vocab_size),
        ("most positions", old.model.max_length, loaded.model.max_length),
    ):
        if before != after:
            raise ModelError(f"{folder}: its {what} differs from that of the model that is served")
    try:
        return Exchange.between(old.parts(), loaded.parts())
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def _select_kernels(config: EngineConfig, device: torch.device) -> KernelSet:
    if device.type == "cuda" or config.kernels == "triton":
        assert config.dtype != "auto", "settings are settled first"
        try:
            return triton_kernels(config.dtype, device, config.max_num_batched_tokens)
        except (ImportError, RuntimeError) as error:
            raise ConfigError(f"device={device.type!r}, kernels='triton': {error}") from error
    try:
        return select_kernels(config.kernels, config.num_threads or len(os.sched_getaffinity(0)))
    except NativeUnavailableError as error:
        raise ConfigError(f"kernels={config.kernels!r}: {error}") from error


def _load_with(config: EngineConfig, folder: Path, kernels: KernelSet, device: torch.device) -> Loaded:
    wanted = config.speculative_config
    if wanted is None:
        return Loaded(kernels, load_model(folder, kernels, device), None)
    drafter_folder = _drafter_folder(config.model, wanted, folder)
    model = load_model(folder, kernels, device, device_drafter_taps(wanted, drafter_folder))
    return Loaded(kernels, model, load_drafter(wanted, drafter_folder, model, kernels, device))


def _drafter_folder(model: str, wanted: SpeculativeConfig, folder: Path) -> Path:
    """Where the drafter's weights are; `folder` is the target's, which may hold draft heads."""
    if wanted.method not in BLOCK_METHODS:
        return folder
    if wanted.model is not None:
        return resolve_model(wanted.model)
    bundled = bundled_drafter(model, wanted.method)
    if bundled is None:
        raise ConfigError(
            f"speculative_config.model: must name a drafter's folder, as none for method {wanted.method!r} is bundled "
            f"with model {model!r}"
        )
    return bundled
