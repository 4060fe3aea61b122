"""The drafter that settings name, made for a target. Knows methods and files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from samebit.core.config import SpeculativeConfig
from samebit.core.errors import CheckpointError, ConfigError
from samebit.kernels.sets import KernelSet
from samebit.models.base import CausalLM
from samebit.models.checkpoint import Checkpoint, read_json
from samebit.models.hash import HashModel
from samebit.models.inkling import InklingModel
from samebit.models.inkling_config import parse_depths
from samebit.models.inkling_weights import WeightBuilder, stored_depths
from samebit.speculative.block_weights import load_block, read_block_config
from samebit.speculative.drafter import Drafter
from samebit.speculative.hash import HashDrafter
from samebit.speculative.host import HostDrafter
from samebit.speculative.mtp import MtpDepth, MtpDrafter
from samebit.speculative.ngram import ngram_drafter

_NGRAM_DRAFTS = 8
_HASH_DRAFTS = 3
BLOCK_METHODS = ("dflash", "dspark")
"""Methods whose drafters have a folder of their own."""


def num_host_drafts(wanted: SpeculativeConfig) -> int:
    """Most guesses a step of a drafter on the host."""
    return wanted.num_speculative_tokens or _NGRAM_DRAFTS


def host_drafter(wanted: SpeculativeConfig) -> HostDrafter | None:
    """The drafter on the host, if it is one."""
    if wanted.method == "ngram":
        return ngram_drafter(wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    return None


def device_drafter_taps(wanted: SpeculativeConfig, folder: Path) -> tuple[int, ...]:
    """Layers of the target whose residual streams the drafter in `folder` reads. Raises CheckpointError for a wrong config."""
    if wanted.method not in BLOCK_METHODS:
        return ()
    with _named(folder):
        return read_block_config(folder).target_layer_ids


def load_drafter(
    wanted: SpeculativeConfig, folder: Path, target: CausalLM, kernels: KernelSet, device: torch.device
) -> Drafter | None:
    """The drafter on the device, if it is one; `folder` holds its weights, and is the target's for its own draft heads.

    Raises CheckpointError for a drafter that cannot be used as stored, ConfigError for one that does not fit the target.
    """
    if wanted.method in BLOCK_METHODS:
        if not isinstance(target, InklingModel):
            raise ConfigError(f"speculative_config.method={wanted.method!r}: needs an Inkling model as the target")
        with _named(folder):
            return load_block(wanted, folder, target, kernels, device)
    if wanted.method != "mtp":
        return None
    if isinstance(target, HashModel):
        return HashDrafter(target, kernels, wanted.num_speculative_tokens or _HASH_DRAFTS, device)
    if not isinstance(target, InklingModel):
        raise ConfigError(f"speculative_config.method='mtp': {folder} has no draft heads")
    return _load_mtp(wanted, folder, target, kernels, device)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """What is wrong with a drafter names its folder: two checkpoints are loaded."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"drafter {folder}: {error}") from error


def _load_mtp(
    wanted: SpeculativeConfig, folder: Path, target: InklingModel, kernels: KernelSet, device: torch.device
) -> MtpDrafter:
    """The draft heads beside a published checkpoint, the first `num_speculative_tokens` of them."""
    raw = read_json(folder / "config.json")
    available = parse_depths(raw)
    if available is None:
        raise ConfigError(f"speculative_config.method='mtp': {folder} has no draft heads (mtp_config)")
    count = wanted.num_speculative_tokens or available.num_hidden_layers
    if count > available.num_hidden_layers:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens={count}: the model has {available.num_hidden_layers} draft heads, "
            "one a token"
        )
    config = msgspec.structs.replace(
        available, num_hidden_layers=count, is_window=available.is_window[:count], is_dense=available.is_dense[:count]
    )
    has_chain_norm = bool(raw["mtp_config"].get("chain_hidden_post_norm"))
    with Checkpoint(folder) as checkpoint:
        stored = stored_depths(config, has_chain_norm=has_chain_norm)
        builder = WeightBuilder(config, checkpoint, stored, kernels, device)
        depths = [
            MtpDepth(
                hidden_norm=builder.norm(f"{i}.hidden_norm"),
                embed_norm=builder.norm(f"{i}.embed_norm"),
                input_proj=builder.linear(builder.take(f"{i}.input_proj")),
                block=builder.layer(i),
            )
            for i in range(count)
        ]
        chain_norm = builder.norm("chain_norm") if has_chain_norm else None
    return MtpDrafter(config, depths, chain_norm, target, kernels, builder, device)
