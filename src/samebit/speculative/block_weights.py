"""Block drafters from a folder: names that code bases give their tensors, what must fit the target, and the calibration.

Knows files through `Checkpoint`. A tensor that is missing, unknown, misshapen or of a wrong dtype is a CheckpointError that names
it; a drafter for another target is a ConfigError that names both values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from samebit.core.config import SpeculativeConfig
from samebit.core.errors import CheckpointError, ConfigError
from samebit.kernels.sets import KernelSet
from samebit.layers.linear import Embedding, Linear
from samebit.layers.norm import RmsNorm
from samebit.models.checkpoint import Checkpoint, read_json
from samebit.models.inkling import InklingModel
from samebit.speculative.block import BlockDrafter, BlockLayer, BlockParts
from samebit.speculative.block_config import BlockConfig, Shape, block_tensors, parse_block_config
from samebit.speculative.block_heads import ConfidenceHead, Gated, MarkovHead, MarkovMix, Recurrent, vanilla

CALIBRATION_FILE = "calibration.json"
MASK_FILE = "mask_embedding.pt"

# Parts of names: what other code bases say, and the published name.
_ALIASES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "logit_head.": "markov_head.",
}
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# The target's, or tables that are computed.
_DROPPED = ("embed_tokens.", "lm_head.", "rotary_emb.")


def read_block_config(folder: Path) -> BlockConfig:
    """The configuration of the drafter in `folder`."""
    return parse_block_config(read_json(folder / "config.json"))


def load_block(
    wanted: SpeculativeConfig, folder: Path, target: InklingModel, kernels: KernelSet, device: torch.device
) -> BlockDrafter:
    """The drafter in `folder`. Everything is checked, against the target too, before the first weight is read."""
    config = read_block_config(folder)
    for name in (MASK_FILE, "hf_quant_config.json"):
        if (folder / name).exists():
            raise CheckpointError(f"{folder / name}: a mask row of its own, or quantised weights, are not supported")
    _check_fits(wanted, config, target)
    temperatures = _temperatures(folder / CALIBRATION_FILE, config)
    with Checkpoint(folder) as checkpoint:
        builder = _Builder(config, checkpoint, kernels, device)
        parts = builder.parts(target.vocab_size, temperatures)
    count = wanted.num_speculative_tokens or config.num_drafts
    return BlockDrafter(config, parts, count, target, kernels, device)


def _check_fits(wanted: SpeculativeConfig, config: BlockConfig, target: InklingModel) -> None:
    """Raise ConfigError unless the settings and the target are those that the drafter is for."""
    name, its = f"speculative_config.model={wanted.model!r}", target.config
    if config.method != wanted.method:
        raise ConfigError(f"speculative_config.method={wanted.method!r}: the drafter is one of {config.method!r}")
    if (wanted.num_speculative_tokens or 1) > config.num_drafts:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens={wanted.num_speculative_tokens}: the drafter gives at most "
            f"{config.num_drafts}"
        )
    if config.hidden_size != its.hidden_size:
        raise ConfigError(f"{name}: its hidden_size is {config.hidden_size}, the target's {its.hidden_size}")
    if config.vocab_size not in {its.vocab_size, its.unpadded_vocab_size}:
        raise ConfigError(
            f"{name}: its vocab_size is {config.vocab_size}, the target's {its.unpadded_vocab_size}, or {its.vocab_size} with padding"
        )
    if config.mask_token_id >= its.vocab_size:
        raise ConfigError(
            f"{name}: its mask_token_id is {config.mask_token_id}, the target's embedding has {its.vocab_size} rows"
        )
    if config.num_target_layers not in {None, its.num_hidden_layers}:
        raise ConfigError(
            f"{name}: its num_target_layers is {config.num_target_layers}, the target has {its.num_hidden_layers}"
        )
    if config.target_layer_ids[-1] >= its.num_hidden_layers:
        raise ConfigError(
            f"{name}: its target_layer_ids are {list(config.target_layer_ids)}, the target has layers 0 to "
            f"{its.num_hidden_layers - 1}"
        )


def _temperatures(path: Path, config: BlockConfig) -> list[float]:
    """What divides the confidence logit of each guess: `temperatures` of the calibration, if there is one."""
    if not path.is_file():
        return [1.0] * config.num_drafts
    found = read_json(path).get("temperatures")
    if (
        not isinstance(found, list)
        or len(found) != config.num_drafts
        or not all(type(value) in {int, float} and 0 < value < math.inf for value in found)
    ):
        raise CheckpointError(f"{path}: temperatures={found!r}: must be {config.num_drafts} numbers above 0")
    return [float(value) for value in found]


def _published(name: str) -> str:
    """The published name of a tensor that may have another."""
    plain = name.removeprefix("model.")
    for alias, published in _ALIASES.items():
        if plain.startswith(alias):
            return published + plain.removeprefix(alias)
    return plain


class _Builder:
    """Reads tensors by their published names and puts them into layers. Checks all of them when it is made."""

    def __init__(self, config: BlockConfig, checkpoint: Checkpoint, kernels: KernelSet, device: torch.device) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._kernels, self._device = kernels, device
        self._shapes = block_tensors(config)
        self._stored = self._find(self._shapes)
        self._linear_shapes: set[tuple[int, int]] = set()
        self._num_parameters = 0

    def _find(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[str, slice]]:
        """The stored tensor of each published name, and its rows there."""
        held: dict[str, str] = {}
        for name in sorted(self._checkpoint.names):
            published = _published(name)
            if any(part in published for part in _DROPPED):
                continue
            if published in held:
                raise CheckpointError(f"tensor {name!r} is the same as {held[published]!r}")
            held[published] = name
        found: dict[str, tuple[str, slice]] = {}
        for published, stored in held.items():
            parts = [published]
            for fused, names in _FUSED.items():
                if f".{fused}." in published:
                    parts = [published.replace(fused, name) for name in names]
            if any(part not in shapes for part in parts):
                raise CheckpointError(f"tensor {stored!r} is unknown: it belongs to no part of this drafter")
            first = 0
            for part in parts:
                if part in found:
                    raise CheckpointError(f"tensor {stored!r} holds {part!r}, which {found[part][0]!r} holds too")
                found[part] = (stored, slice(first, first + shapes[part][0]))
                first += shapes[part][0]
            self._checkpoint.check(stored, ((first, *shapes[parts[0]][1:]),))
        for name in shapes:
            if name not in found:
                raise CheckpointError(f"tensor {name!r} is missing")
        return found

    def parts(self, vocab_size: int, temperatures: list[float]) -> BlockParts:
        """The whole drafter. `vocab_size`: the tokens that exist."""
        fc, hidden_norm, norm = self._linear("fc"), self._norm("hidden_norm"), self._norm("norm")
        layers, projections = zip(*map(self._layer, range(self._config.num_hidden_layers)), strict=True)
        kv = self._packed(torch.cat(projections))
        markov = self._markov(vocab_size) if self._config.markov_rank else None
        confidence = self._confidence(markov, temperatures) if self._config.enable_confidence_head else None
        shapes, count = frozenset(self._linear_shapes), self._num_parameters
        return BlockParts(fc, hidden_norm, kv, layers, norm, markov, confidence, shapes, count)

    def _layer(self, i: int) -> tuple[BlockLayer, Tensor]:
        """A layer, and its projection to keys, then values."""
        prefix, config = f"layers.{i}.", self._config
        q, k, v = (self._take(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv")
        q_norm, k_norm = (self._norm(f"{prefix}self_attn.{name}_norm") for name in "qk")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        layer = BlockLayer(
            kernels=self._kernels,
            attn_norm=self._norm(f"{prefix}input_layernorm"),
            qkv=self._packed(torch.cat([q, k, v])),
            out=self._linear(f"{prefix}self_attn.o_proj"),
            head_gains=torch.cat([q_norm.gain.expand(heads, -1), k_norm.gain.expand(kv_heads, -1)]),
            k_norm=k_norm,
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm"),
            gate_up=self._linear(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"),
            down=self._linear(f"{prefix}mlp.down_proj"),
            num_heads=heads,
            window=config.windows[i],
            is_causal=config.is_causal[i],
        )
        return layer, torch.cat([k, v])

    def _markov(self, vocab_size: int) -> MarkovHead:
        rows = Embedding(self._kernels, self._take("markov_head.markov_w1.weight"))
        out = self._packed(self._take("markov_head.markov_w2.weight")[:vocab_size], wide=True)
        mix: MarkovMix = vanilla
        if self._config.markov_head_type == "gated":
            mix = Gated(self._linear("markov_head.gate_proj"), self._bias("markov_head.gate_proj"))
        elif self._config.markov_head_type == "rnn":
            mix = Recurrent(self._linear("markov_head.joint_proj"), self._bias("markov_head.joint_proj"))
        return MarkovHead(rows, mix, out, torch.zeros(self._config.markov_rank, device=self._device))

    def _confidence(self, markov: MarkovHead | None, temperatures: list[float]) -> ConfidenceHead:
        name = "confidence_head.proj"
        rows = markov.rows if markov is not None and self._config.confidence_head_with_markov else None
        proj = self._packed(self._take(f"{name}.weight").float(), wide=True)
        scale = 1 / torch.tensor(temperatures, dtype=torch.float64)[:, None]
        return ConfidenceHead(proj, rows, scale.to(self._device), scale.to(self._device) * self._bias(name))

    def _take(self, name: str) -> Tensor:
        stored, rows = self._stored[name]
        tensor = self._checkpoint.take(stored, self._device)[rows]
        self._num_parameters += tensor.numel()
        return tensor.contiguous()

    def _linear(self, *names: str) -> Linear:
        return self._packed(torch.cat([self._take(f"{name}.weight") for name in names]))

    def _packed(self, weight: Tensor, *, wide: bool = False) -> Linear:
        linear = Linear(self._kernels, weight, wide=wide)
        self._linear_shapes.add(linear.shape)
        return linear

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._kernels, self._take(f"{name}.weight"), self._config.rms_norm_eps)

    def _bias(self, name: str) -> Tensor:
        return self._take(f"{name}.bias").double()
