"""The configuration of a block drafter (DFlash, DSpark) and the names and shapes of its tensors.

Both fill a block of mask tokens in one pass, over keys made of the target's residual streams; DSpark adds a head that goes from
token to token, and one that tells how sure it is. Files nest keys under `dflash_config` and `dspark_config`, as DFlash (arXiv
2602.06036) and SpecForge write them, or are flat, as DeepSpec writes them. Every key is used, checked to have the one supported value, or known
to be harmless; anything else is a CheckpointError. Knows no tensors and no target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from samebit.core.config import MAX_DRAFTS
from samebit.core.errors import CheckpointError

SLIDING_LAYER, FULL_LAYER = "sliding_attention", "full_attention"
TAP_LOCATION = "before_mlp_conv"
"""The one value of `dflash_config.tap_location`, a key of ours: residual after attention plus the raw output of the MLP."""

Shape = tuple[int, ...]


class BlockConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and constants of a block drafter.

    A block of `num_rows` tokens, the last one and masks, gives `num_drafts` guesses: row r predicts the token at its own
    place, so that the first row predicts nothing, or, with `sample_from_anchor`, the one behind it. `windows[i]` is the
    window of layer i (0: none), `is_causal[i]` whether rows see only those before them in their block. `vocab_size` is
    that of the config, padded or not. `markov_rank` 0: no Markov head. `num_target_layers` None: not told.
    """

    method: Literal["dflash", "dspark"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    block_size: int
    sample_from_anchor: bool
    windows: tuple[int, ...]
    is_causal: tuple[bool, ...]
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    markov_rank: int = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False

    @property
    def first_draft_row(self) -> int:
        """The row of the block that gives the first guess."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """Guesses of a whole block. A DFlash block counts its first row, a DSpark block its guesses."""
        return self.block_size if self.method == "dspark" else self.block_size - self.first_draft_row

    @property
    def num_rows(self) -> int:
        """Rows of a whole block."""
        return self.num_drafts + self.first_draft_row


# By architecture; `projector_type` of dflash_config may say more.
_ARCHITECTURES: Mapping[str, Literal["dflash", "dspark"]] = {
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
}

_ONLY_SUPPORTED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "quantization_config": None,
    "tap_location": TAP_LOCATION,
    "num_loops": 1,
    "loop_boundary_norm": False,
}

# They concern training, text processing or the file itself; no logit depends on them. Embedding and head are the target's.
_HARMLESS = {
    "_name_or_path", "_attn_implementation", "attention_dropout", "auto_map", "bos_token_id", "ce_loss_alpha",
    "confidence_head_alpha", "dtype", "eos_token_id", "initializer_range", "l1_loss_alpha", "loop_loss_weights", "loss_decay_gamma",
    "max_position_embeddings", "model_type", "num_anchors", "pad_token_id", "pretraining_tp", "tie_word_embeddings",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# They may only repeat what others say: the drafter works in the target's width, over its vocabulary.
_REPEATED = {"target_hidden_size": "hidden_size", "draft_vocab_size": "vocab_size"}
_NESTED = ("dflash_config", "dspark_config")
_HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def parse_block_config(raw: Mapping[str, Any]) -> BlockConfig:  # Any: JSON
    """A drafter's configuration from a whole config.json object.

    Raises CheckpointError naming the key and its value: missing, unknown, unsupported, contradictory or out of range.
    """
    keys = _flattened(raw)
    method = _method(keys)
    for key, supported in _ONLY_SUPPORTED.items():
        value = keys.pop(key, None)
        if value is not None and (value != supported or isinstance(value, bool) != isinstance(supported, bool)):
            raise CheckpointError(f"{key}={value!r}: only {supported!r} is supported")
    for key, other in _REPEATED.items():
        value = keys.pop(key, None)
        if value not in (None, keys.get(other)):
            raise CheckpointError(f"{key}={value!r}: only that of {other}={keys.get(other)!r} is supported")
    for key in _HARMLESS:
        keys.pop(key, None)
    num_layers = _positive(keys, "num_hidden_layers")
    keys |= {"method": method, "rope_theta": _rope_theta(keys)}
    keys["sample_from_anchor"] = _flag(keys, "sample_from_anchor", default=method == "dspark")
    keys["windows"] = _windows(keys, num_layers)
    causal = keys.pop("is_causal", None)
    if causal not in (None, True, False):
        raise CheckpointError(f"is_causal={causal!r}: must be true, false or null")
    keys["is_causal"] = tuple(window > 0 if causal is None else causal for window in keys["windows"])
    if keys.get("target_layer_ids") is None:
        keys["target_layer_ids"] = _evenly_spaced(_positive(keys, "num_target_layers"), num_layers)
    if keys.get("head_dim") is None:
        keys["head_dim"] = _positive(keys, "hidden_size") // _positive(keys, "num_attention_heads")
    _check_heads(keys, method)
    for key in keys:
        if key not in BlockConfig.__struct_fields__:
            raise CheckpointError(f"{key}={keys[key]!r}: unknown key, its effect on the drafter cannot be told")
    try:
        config = msgspec.convert({key: value for key, value in keys.items() if value is not None}, BlockConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"drafter configuration: {error}") from error
    _check_ranges(config)
    return config


def block_tensors(config: BlockConfig) -> dict[str, Shape]:
    """Every tensor of the drafter by its published name, [N, K] for linear maps; none is fused."""
    hidden, width = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (config.head_dim,),
            "self_attn.k_norm": (config.head_dim,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        found |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found | _head_tensors(config)


def _head_tensors(config: BlockConfig) -> dict[str, Shape]:
    hidden, rank = config.hidden_size, config.markov_rank
    found: dict[str, Shape] = {}
    if rank:
        found["markov_head.markov_w1.weight"] = found["markov_head.markov_w2.weight"] = (config.vocab_size, rank)
        if config.markov_head_type == "gated":
            found |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if config.markov_head_type == "rnn":
            joint = (3 * rank, 2 * rank + hidden)
            found |= {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": joint[:1]}
    if config.enable_confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        found |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return found


def _flattened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The nested keys beside those around them, which must not contradict them."""
    keys = {key: value for key, value in raw.items() if key not in _NESTED}
    if "num_draft_layers" in keys:
        keys["num_hidden_layers"] = keys.pop("num_draft_layers")
    for name in _NESTED:
        nested = raw.get(name) or {}
        if not isinstance(nested, dict):
            raise CheckpointError(f"{name}={nested!r}: must be an object")
        for key, value in nested.items():
            if keys.get(key, value) != value and keys[key] is not None:
                raise CheckpointError(f"{name}.{key}={value!r}: contradicts {key}={keys[key]!r} outside")
            keys[key] = value
    return keys


def _method(keys: dict[str, Any]) -> Literal["dflash", "dspark"]:
    architectures, projector = keys.pop("architectures", None), keys.pop("projector_type", None)
    known = ", ".join(_ARCHITECTURES)
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _ARCHITECTURES:
        raise CheckpointError(f"architectures={architectures!r}: must be one of {known}")
    method = _ARCHITECTURES[architectures[0]]
    if projector not in (None, "dflash", "dspark"):
        raise CheckpointError(f"projector_type={projector!r}: only 'dflash' and 'dspark' are supported")
    if projector == "dflash" and method == "dspark":
        raise CheckpointError(f"projector_type={projector!r}: contradicts architectures={architectures!r}")
    return projector or method


def _rope_theta(keys: dict[str, Any]) -> float:
    """The base of the drafter's own rotary embedding, which must be the plain one."""
    given = keys.pop("rope_parameters", None) or {}
    scaling = keys.pop("rope_scaling", None) or {}
    theta = keys.pop("rope_theta", None)
    for name, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        kind = value.get("rope_type", value.get("type", "default")) if isinstance(value, dict) else value
        others = set(value) - {"rope_type", "type", "rope_theta"} if isinstance(value, dict) else set()
        if kind != "default" or others:
            raise CheckpointError(f"{name}={value!r}: only the default rotary embedding is supported")
    found = {value for value in (theta, given.get("rope_theta"), scaling.get("rope_theta")) if value is not None}
    if len(found) != 1:
        raise CheckpointError(f"rope_theta={theta!r}: must be given once" if found else "rope_theta: missing")
    value = found.pop()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"rope_theta={value!r}: must be a number")
    return float(value)


def _windows(keys: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 where there is none, by Qwen3's rules."""
    kinds, window = keys.pop("layer_types", None), keys.pop("sliding_window", None)
    is_used, first = keys.pop("use_sliding_window", None), keys.pop("max_window_layers", num_layers)
    compact = keys.pop("swa_window_size", None)
    if kinds is None:
        slides = bool(is_used) and window is not None
        kinds = [SLIDING_LAYER if slides and i >= first else FULL_LAYER for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {SLIDING_LAYER, FULL_LAYER}:
        raise CheckpointError(
            f"layer_types={kinds!r}: must list {num_layers} times {SLIDING_LAYER!r} or {FULL_LAYER!r}"
        )
    if SLIDING_LAYER in kinds and is_used is False:
        raise CheckpointError(f"use_sliding_window={is_used!r}: contradicts layer_types={kinds!r}")
    if SLIDING_LAYER in kinds and (type(window) is not int or window < 1):
        raise CheckpointError(f"sliding_window={window!r}: must be a positive whole number")
    if compact is not None and (compact != window or FULL_LAYER in kinds):
        raise CheckpointError(f"swa_window_size={compact!r}: only the window of layers that all slide is supported")
    return tuple(window if kind == SLIDING_LAYER else 0 for kind in kinds)


def _evenly_spaced(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The layers of the target that are read where none are named: from 1 to the third from the end."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))


def _check_heads(keys: dict[str, Any], method: str) -> None:
    mode = keys.pop("attention_mode", None)
    heads, kv_heads = _positive(keys, "num_attention_heads"), _positive(keys, "num_key_value_heads")
    if mode not in (None, "gqa", "mha") or (mode == "mha" and heads != kv_heads):
        raise CheckpointError(f"attention_mode={mode!r}: only 'gqa', and 'mha' with equal heads, are supported")
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads={heads}: must be a multiple of num_key_value_heads ({kv_heads})")
    if method == "dflash":
        for key in _HEAD_KEYS:
            value = keys.pop(key, None)
            if value and key != "markov_head_type":
                raise CheckpointError(f"{key}={value!r}: only projector_type 'dspark' has such a head")


def _check_ranges(config: BlockConfig) -> None:
    for key in BlockConfig.__struct_fields__:
        value = getattr(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        low = 0 if key in {"markov_rank", "mask_token_id"} else None
        if not math.isfinite(value) or (value <= 0 if low is None else value < low):
            least = f"at least {low}" if low is not None else "finite and greater than 0"
            raise CheckpointError(f"{key}={value!r}: must be {least}")
    if not 1 <= config.num_drafts <= MAX_DRAFTS:
        raise CheckpointError(f"block_size={config.block_size}: must give 1 to {MAX_DRAFTS} guesses")
    if config.head_dim % 2:
        raise CheckpointError(f"head_dim={config.head_dim}: must be even, for the rotary embedding")
    ids = config.target_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise CheckpointError(f"target_layer_ids={list(ids)}: must be layers of the target, ascending and different")
    if config.confidence_head_with_markov and config.enable_confidence_head and not config.markov_rank:
        raise CheckpointError("confidence_head_with_markov=True: needs a Markov head (markov_rank)")


def _flag(keys: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = keys.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key}={value!r}: must be true or false")
    return default if value is None else value


def _positive(keys: Mapping[str, Any], key: str) -> int:
    value = keys.get(key)
    if value is None:
        raise CheckpointError(f"{key}: missing")
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{key}={value!r}: must be a positive whole number")
    return value
