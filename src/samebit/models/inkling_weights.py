"""Where each weight of an Inkling checkpoint lies, in all three spellings, and the model made of them.

Spellings: the published names (gate and up rows interleaved), transformers' multimodal names and its text-only names.
Knows files through `Checkpoint` only. A tensor that is missing, unknown, misshapen or of a wrong dtype is a
CheckpointError that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from samebit.core.errors import CheckpointError
from samebit.kernels.sets import KernelSet
from samebit.layers.attention import Attention, HeadShape
from samebit.layers.linear import Embedding, Linear
from samebit.layers.mlp import DenseMlp, MoeMlp
from samebit.layers.norm import RmsNorm
from samebit.layers.short_conv import ShortConv
from samebit.models.checkpoint import Checkpoint, Shape, read_json
from samebit.models.inkling import InklingLayer, InklingModel, InklingParts
from samebit.models.inkling_config import InklingConfig, parse_config

_log = logging.getLogger(__name__)

# Parameter: (published name, transformers name) below the prefix of the trunk or of a layer.
_TRUNK_NAMES = {
    "embed": ("embed.weight", "embed_tokens.weight"),
    "embed_norm": ("embed_norm.weight", "embed_tokens.embed_norm.weight"),
    "norm": ("norm.weight", "norm.weight"),
}
_BLOCK_NAMES = {
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn.wq_du.weight", "self_attn.q_proj.weight"),
    "k": ("attn.wk_dv.weight", "self_attn.k_proj.weight"),
    "v": ("attn.wv_dv.weight", "self_attn.v_proj.weight"),
    "r": ("attn.wr_du.weight", "self_attn.r_proj.weight"),
    "o": ("attn.wo_ud.weight", "self_attn.o_proj.weight"),
    "q_norm": ("attn.q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn.k_norm.weight", "self_attn.k_norm.weight"),
    "k_conv": ("attn.k_sconv.weight", "self_attn.k_sconv.conv1d.weight"),
    "v_conv": ("attn.v_sconv.weight", "self_attn.v_sconv.conv1d.weight"),
    "rel_proj": ("attn.rel_logits_proj.proj", "self_attn.rel_logits_proj.proj"),
    "attn_conv": ("attn_sconv.weight", "attn_sconv.conv1d.weight"),
    "mlp_norm": ("mlp_norm.weight", "post_attention_layernorm.weight"),
    "mlp_conv": ("mlp_sconv.weight", "mlp_sconv.conv1d.weight"),
}
_DENSE_NAMES = {
    "down": ("mlp.w2_md.weight", "mlp.down_proj.weight"),
    "scale": ("mlp.global_scale", "mlp.global_scale"),
}
_SPARSE_NAMES = {
    "router": ("mlp.gate.weight", "mlp.gate.weight"),
    "router_bias": ("mlp.gate.bias", "mlp.gate.e_score_correction_bias"),
    "router_scale": ("mlp.gate.global_scale", "mlp.gate.global_scale"),
    "experts_down": ("mlp.experts.w2_weight", "mlp.experts.down_proj"),
    "shared_down": ("mlp.shared_experts.shared_w2_weight", "mlp.shared_experts.down_proj"),
}
# Published files interleave the two; transformers stores halves of one tensor, or a tensor each.
_GATE_UP_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "gate_up": ("mlp.w13_dn.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "experts_gate_up": ("mlp.experts.w13_weight", ("mlp.experts.gate_up_proj",)),
    "shared_gate_up": (
        "mlp.shared_experts.shared_w13_weight",
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ),
}
# Prefix of the trunk, and whether the names below it are the published ones.
_SPELLINGS = (("model.llm.", True), ("model.language_model.", False), ("model.", False))

_SKIPPED = {
    "draft heads": ("model.mtp.",),
    "vision": ("model.visual.", "model.vision_tower."),
    "audio": ("model.audio.", "model.audio_tower."),
}
_UNEMBED_NAMES = {True: "model.llm.unembed.weight", False: "lm_head.weight"}


@dataclass(frozen=True, slots=True)
class Stored:
    """One parameter as stored: tensors `names`, each of one of `shapes`, that `join` makes into one."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    join: Callable[[Sequence[Tensor]], Tensor]


def load_inkling(folder: Path, kernels: KernelSet, device: torch.device, taps: Sequence[int] = ()) -> InklingModel:
    """The text model in `folder`. Every name, shape and dtype is checked before the first weight is read."""
    if (folder / "hf_quant_config.json").exists():
        raise CheckpointError(f"{folder / 'hf_quant_config.json'}: quantised checkpoints are not supported")
    config = parse_config(read_json(folder / "config.json"))
    with Checkpoint(folder) as checkpoint:
        stored = stored_parameters(config, checkpoint.names)
        builder = WeightBuilder(config, checkpoint, stored, kernels, device)
        _account_for_all(checkpoint.names, stored)
        return InklingModel(config, builder.parts(), kernels, device, taps)


def stored_parameters(config: InklingConfig, names: set[str]) -> dict[str, Stored]:
    """Every parameter of the model, "q" of layer 3 as "3.q", in the spelling that `names` use."""
    prefix, is_published = _spelling(names)
    hidden = config.hidden_size
    stored = {
        key: Stored((prefix + pair[not is_published],), _trunk_shapes(config)[key], _only)
        for key, pair in _TRUNK_NAMES.items()
    }
    unembed = _UNEMBED_NAMES[is_published]
    # Without an output matrix the embedding serves as one.
    stored["unembed"] = stored["embed"]
    if unembed in names:
        rows = dict.fromkeys((config.vocab_size, config.unpadded_vocab_size))
        stored["unembed"] = Stored((unembed,), tuple((n, hidden) for n in rows), _only)
    for i in range(config.num_hidden_layers):
        layer = f"{prefix}layers.{i}."
        shapes = _block_shapes(config, i)
        gate_up = _gate_up_shapes(config, i)
        plain = _BLOCK_NAMES | (_DENSE_NAMES if config.is_dense[i] else _SPARSE_NAMES)
        for key, pair in plain.items():
            stored[f"{i}.{key}"] = Stored((layer + pair[not is_published],), shapes[key], _only)
        for key, shape in gate_up.items():
            published, others = _GATE_UP_NAMES[key]
            if is_published:
                stored[f"{i}.{key}"] = Stored((layer + published,), (shape,), _deinterleaved)
            else:
                part = (*shape[:-2], shape[-2] // len(others), shape[-1])
                stored[f"{i}.{key}"] = Stored(tuple(layer + name for name in others), (part,), _stacked)
    return stored


def stored_depths(config: InklingConfig, *, has_chain_norm: bool = False) -> dict[str, Stored]:
    """Every parameter of the draft heads that `config` describes as layers, "q" of depth 1 as "1.q", in published names."""
    hidden = config.hidden_size
    own = {"hidden_norm": (hidden,), "embed_norm": (hidden,), "input_proj": (hidden, 2 * hidden)}
    found = {}
    for key, stored in stored_parameters(config, {"model.llm.embed.weight"}).items():
        depth, dot, _ = key.partition(".")
        if dot:
            before, after = f"model.llm.layers.{depth}.", f"model.mtp.layers.{depth}.transformer_block."
            names = tuple(name.replace(before, after) for name in stored.names)
            found[key] = Stored(names, stored.shapes, stored.join)
    for i in range(config.num_hidden_layers):
        for key, shape in own.items():
            found[f"{i}.{key}"] = Stored((f"model.mtp.layers.{i}.{key}.weight",), (shape,), _only)
    if has_chain_norm:
        found["chain_norm"] = Stored(("model.mtp.chain_norm.weight",), ((hidden,),), _only)
    return found


def _spelling(names: set[str]) -> tuple[str, bool]:
    probes = [prefix + _TRUNK_NAMES["embed"][not published] for prefix, published in _SPELLINGS]
    for probe, spelling in zip(probes, _SPELLINGS, strict=True):
        if probe in names:
            return spelling
    raise CheckpointError(f"tensor {probes[0]!r} is missing (and so are {probes[1]!r} and {probes[2]!r})")


def _account_for_all(names: set[str], stored: dict[str, Stored]) -> None:
    rest = names - {name for parameter in stored.values() for name in parameter.names}
    for kind, prefixes in _SKIPPED.items():
        skipped = {name for name in rest if name.startswith(prefixes)}
        if skipped:
            _log.info(
                "skipping %d %s tensors (%s*), which are no part of the text model",
                len(skipped),
                kind,
                prefixes[0],
            )
        rest -= skipped
    for name in sorted(rest):
        raise CheckpointError(f"tensor {name!r} is unknown: it belongs to no part of this model")


def _trunk_shapes(config: InklingConfig) -> dict[str, tuple[Shape, ...]]:
    hidden = config.hidden_size
    return {
        "embed": ((config.vocab_size, hidden),),
        "embed_norm": ((hidden,),),
        "norm": ((hidden,),),
    }


def _block_shapes(config: InklingConfig, layer: int) -> dict[str, tuple[Shape, ...]]:
    hidden, taps = config.hidden_size, config.sconv_kernel_size
    heads = head_shape(config, layer)
    q, _, r = heads.widths
    kv = heads.kv_width
    extent = heads.window or config.rel_extent
    experts, width = config.n_routed_experts, config.moe_intermediate_size
    shared = config.n_shared_experts
    one: tuple[Shape, ...] = ((1,), ())
    return {
        **dict.fromkeys(("attn_norm", "mlp_norm"), ((hidden,),)),
        **dict.fromkeys(("q_norm", "k_norm"), ((heads.head_dim,),)),
        **dict.fromkeys(("k_conv", "v_conv"), ((kv, 1, taps),)),
        **dict.fromkeys(("attn_conv", "mlp_conv"), ((hidden, 1, taps),)),
        "q": ((q, hidden),),
        "k": ((kv, hidden),),
        "v": ((kv, hidden),),
        "r": ((r, hidden),),
        "o": ((hidden, q),),
        "rel_proj": ((heads.d_rel, extent),),
        "down": ((hidden, config.dense_intermediate_size),),
        **dict.fromkeys(("scale", "router_scale"), one),
        "router": ((experts + shared, hidden),),
        "router_bias": ((experts,),),
        "experts_down": ((experts, hidden, width),),
        "shared_down": ((shared, hidden, width),),
    }


def _gate_up_shapes(config: InklingConfig, layer: int) -> dict[str, Shape]:
    hidden, width = config.hidden_size, 2 * config.moe_intermediate_size
    if config.is_dense[layer]:
        return {"gate_up": (2 * config.dense_intermediate_size, hidden)}
    return {
        "experts_gate_up": (config.n_routed_experts, width, hidden),
        "shared_gate_up": (config.n_shared_experts, width, hidden),
    }


def head_shape(config: InklingConfig, layer: int) -> HeadShape:
    """Heads of a layer, by its kind."""
    if config.is_window[layer]:
        return HeadShape(
            config.swa_num_attention_heads,
            config.swa_num_key_value_heads,
            config.swa_head_dim,
            config.d_rel,
            config.sliding_window_size,
        )
    return HeadShape(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.d_rel,
        window=0,
    )


def _only(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors), dim=-2)


def _deinterleaved(tensors: Sequence[Tensor]) -> Tensor:
    rows = tensors[0]
    return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)


class WeightBuilder:
    """Reads parameters and puts them into layers, one layer at a time.

    `linear_shapes` and `num_parameters` are those of what was built so far. Raises CheckpointError for the first that is missing, misshapen or of a wrong dtype, before any is read.
    """

    def __init__(
        self,
        config: InklingConfig,
        checkpoint: Checkpoint,
        stored: dict[str, Stored],
        kernels: KernelSet,
        device: torch.device,
    ) -> None:
        self._config = config
        self._checkpoint, self._stored = checkpoint, stored
        self._kernels, self._device = kernels, device
        self.linear_shapes: set[tuple[int, int]] = set()
        self.num_parameters = 0
        for parameter in stored.values():
            for name in parameter.names:
                checkpoint.check(name, parameter.shapes)

    def parts(self) -> InklingParts:
        """The whole model."""
        embed = self.take("embed")
        tied = self._stored["unembed"] is self._stored["embed"]
        unembed = embed if tied else self.take("unembed")
        head = self.linear(unembed[: self._config.unpadded_vocab_size], wide=True)
        embedding = Embedding(self._kernels, embed)
        layers = [self.layer(i) for i in range(self._config.num_hidden_layers)]
        return InklingParts(
            embedding=embedding,
            embed_norm=self.norm("embed_norm"),
            layers=layers,
            norm=self.norm("norm"),
            head=head,
            linear_shapes=frozenset(self.linear_shapes),
            num_parameters=self.num_parameters,
        )

    def layer(self, i: int) -> InklingLayer:
        """Block `i`."""
        return InklingLayer(
            attn_norm=self.norm(f"{i}.attn_norm"),
            attention=self._attention(i),
            attn_conv=self._conv(f"{i}.attn_conv"),
            mlp_norm=self.norm(f"{i}.mlp_norm"),
            mlp=self._dense(i) if self._config.is_dense[i] else self._sparse(i),
            mlp_conv=self._conv(f"{i}.mlp_conv"),
        )

    def _attention(self, i: int) -> Attention:
        return Attention(
            self._kernels,
            head_shape(self._config, i),
            qkvr=self.linear(torch.cat([self.take(f"{i}.{key}") for key in "qkvr"])),
            out=self.linear(self.take(f"{i}.o")),
            q_norm=self.norm(f"{i}.q_norm"),
            k_norm=self.norm(f"{i}.k_norm"),
            kv_conv=self._conv(f"{i}.k_conv", f"{i}.v_conv"),
            rel_proj=self.take(f"{i}.rel_proj"),
        )

    def _dense(self, i: int) -> DenseMlp:
        return DenseMlp(
            self._kernels,
            gate_up=self.linear(self.take(f"{i}.gate_up")),
            down=self.linear(self.take(f"{i}.down")),
            scale=float(self.take(f"{i}.scale")),
        )

    def _sparse(self, i: int) -> MoeMlp:
        return MoeMlp(
            self._kernels,
            router=self.linear(self.take(f"{i}.router"), wide=True),
            bias=self.take(f"{i}.router_bias"),
            w13=torch.cat([self.take(f"{i}.experts_gate_up"), self.take(f"{i}.shared_gate_up")]),
            w2=torch.cat([self.take(f"{i}.experts_down"), self.take(f"{i}.shared_down")]),
            top_k=self._config.num_experts_per_tok,
            scale=self._config.route_scale * float(self.take(f"{i}.router_scale")),
        )

    def take(self, key: str) -> Tensor:
        """Parameter `key`."""
        parameter = self._stored[key]
        tensor = parameter.join([self._checkpoint.take(name, self._device) for name in parameter.names])
        self.num_parameters += tensor.numel()
        return tensor

    def linear(self, weight: Tensor, *, wide: bool = False) -> Linear:
        """A linear map, whose shape is noted."""
        linear = Linear(self._kernels, weight, wide=wide)
        self.linear_shapes.add(linear.shape)
        return linear

    def norm(self, key: str) -> RmsNorm:
        """The norm with gain `key`."""
        return RmsNorm(self._kernels, self.take(key), self._config.rms_norm_eps)

    def _conv(self, *keys: str) -> ShortConv:
        return ShortConv(self._kernels, torch.cat([self.take(key) for key in keys]).squeeze(1))
