"""The configuration of an Inkling text model, from either spelling of config.json.

The published spelling nests the text model under `text_config` and says `dense_intermediate_size` for the dense width and
`intermediate_size` for an expert's; transformers says `intermediate_size` for the dense width and
`moe_intermediate_size` for an expert's. Every key is used, checked to have the one supported value, or known to be
harmless; anything else is a CheckpointError. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from samebit.core.errors import CheckpointError

WINDOW_LAYER, FULL_LAYER = "hybrid_sliding", "hybrid"
DENSE_LAYER, SPARSE_LAYER = "dense", "sparse"


class InklingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and constants of the text model. `swa_` values hold for sliding-window layers, the plain ones for full layers.

    `is_window[i]`, `is_dense[i]`: the kind of layer i. `vocab_size`: rows of the embedding; `unpadded_vocab_size`: tokens
    that exist. `log_scaling_n_floor` None: no scaling.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    swa_num_attention_heads: int
    swa_num_key_value_heads: int
    swa_head_dim: int
    sliding_window_size: int
    d_rel: int
    rel_extent: int
    log_scaling_n_floor: int | None
    log_scaling_alpha: float
    is_window: tuple[bool, ...]
    is_dense: tuple[bool, ...]
    dense_intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    route_scale: float
    logits_mup_width_multiplier: float
    vocab_size: int
    unpadded_vocab_size: int
    sconv_kernel_size: int
    model_max_length: int
    rms_norm_eps: float


_OTHER_NAMES = {
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
    "sliding_window": "sliding_window_size",
    "num_local_experts": "n_routed_experts",
}

_ONLY_SUPPORTED: Mapping[str, object] = {
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "shared_expert_sink": True,
    "norm_after_topk": True,
    "gate_activation": "sigmoid",
    "hidden_act": "silu",
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
    "number_of_conv_states": 4,
    "tie_word_embeddings": False,
}

# They concern training, text processing, the draft heads or the file itself; no logit depends on them.
_HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chain_hidden_post_norm", "dtype",
    "eos_token_id", "initializer_range", "model_type", "mtp_hidden_states_first", "mtp_local_layer_ids", "num_mtp_layers",
    "pad_token_id", "rms_norm_eps_moe_gate", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def parse_config(raw: Mapping[str, Any]) -> InklingConfig:  # Any: JSON
    """The text model's configuration from a whole config.json object.

    Raises CheckpointError naming the key and its value: missing, unknown, unsupported, contradictory or out of range.
    """
    if raw.get("quantization_config") is not None:
        raise CheckpointError("quantization_config is set: quantised checkpoints are not supported")
    text = raw.get("text_config", raw)
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config={text!r}: must be an object")
    keys = _one_spelling(text)
    for key, supported in _ONLY_SUPPORTED.items():
        value = keys.pop(key, supported)
        if value != supported or type(value) is not type(supported):
            raise CheckpointError(f"{key}={value!r}: only {supported!r} is supported")
    for key in _HARMLESS:
        keys.pop(key, None)
    num_layers = _positive(keys, "num_hidden_layers")
    keys["is_window"] = _window_layers(keys, num_layers)
    keys["is_dense"] = _dense_layers(keys, num_layers)
    if keys.get("unpadded_vocab_size") is None:
        keys["unpadded_vocab_size"] = _positive(keys, "vocab_size")
    for key in keys:
        if key not in InklingConfig.__struct_fields__:
            raise CheckpointError(f"{key}={keys[key]!r}: unknown key, its effect on the model cannot be told")
    try:
        config = msgspec.convert(keys, InklingConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"text configuration: {error}") from error
    _check_ranges(config)
    return config


class _DraftHeads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`mtp_config` of the published spelling. `local_extent` None: the trunk's window."""

    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    chain_hidden_post_norm: bool = False
    local_layer_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    local_extent: Annotated[int, msgspec.Meta(ge=1)] | None = None


def parse_depths(raw: Mapping[str, Any]) -> InklingConfig | None:  # Any: JSON
    """The draft heads of a config.json object as a model of dense layers, one for each depth; None without any.

    Raises CheckpointError where `mtp_config` says what is not supported.
    """
    try:
        wanted = msgspec.convert(raw.get("mtp_config") or {}, _DraftHeads)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"mtp_config: {error}") from error
    count, local = wanted.num_nextn_predict_layers, wanted.local_layer_ids
    if not count:
        return None
    if any(i >= count for i in local):
        raise CheckpointError(f"mtp_config: local_layer_ids={local}: there are {count} heads, 0 .. {count - 1}")
    trunk = parse_config(raw)
    window = wanted.local_extent or trunk.sliding_window_size
    return msgspec.structs.replace(
        trunk,
        num_hidden_layers=count,
        sliding_window_size=window,
        is_window=tuple(i in local for i in range(count)),
        is_dense=(True,) * count,
    )


def _one_spelling(text: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    # The dense width says which spelling this is: with it, the plain width is an expert's.
    experts_plain = "dense_intermediate_size" in text
    plain = "moe_intermediate_size" if experts_plain else "dense_intermediate_size"
    for key, value in text.items():
        name = plain if key == "intermediate_size" else _OTHER_NAMES.get(key, key)
        if name in keys and keys[name] != value:
            raise CheckpointError(f"{key}={value!r}: contradicts {keys[name]!r}, given under another name")
        keys[name] = value
    return keys


def _positive(keys: Mapping[str, Any], key: str) -> int:
    if key not in keys:
        raise CheckpointError(f"{key}: missing")
    value = keys[key]
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{key}={value!r}: must be a positive whole number")
    return value


def _window_layers(keys: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    kinds, local = keys.pop("layer_types", None), keys.pop("local_layer_ids", None)
    found: list[tuple[bool, ...]] = []
    if kinds is not None:
        found.append(_flags("layer_types", kinds, num_layers, WINDOW_LAYER, FULL_LAYER))
    if local is not None:
        if not isinstance(local, list) or not all(type(i) is int and 0 <= i < num_layers for i in local):
            raise CheckpointError(f"local_layer_ids={local!r}: must list layers 0 .. {num_layers - 1}")
        found.append(tuple(i in local for i in range(num_layers)))
    return _agreed("local_layer_ids", "layer_types", found)


def _dense_layers(keys: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    kinds, count = keys.pop("mlp_layer_types", None), keys.pop("dense_mlp_idx", None)
    found: list[tuple[bool, ...]] = []
    if kinds is not None:
        found.append(_flags("mlp_layer_types", kinds, num_layers, DENSE_LAYER, SPARSE_LAYER))
    if count is not None:
        if type(count) is not int or not 0 <= count <= num_layers:
            raise CheckpointError(f"dense_mlp_idx={count!r}: must be between 0 and {num_layers}")
        found.append(tuple(i < count for i in range(num_layers)))
    return _agreed("dense_mlp_idx", "mlp_layer_types", found)


def _flags(key: str, kinds: object, num_layers: int, yes: str, no: str) -> tuple[bool, ...]:
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in (yes, no) for kind in kinds):
        raise CheckpointError(f"{key}={kinds!r}: must list {num_layers} times {yes!r} or {no!r}")
    return tuple(kind == yes for kind in kinds)


def _agreed(key: str, other: str, found: list[tuple[bool, ...]]) -> tuple[bool, ...]:
    if not found:
        raise CheckpointError(f"{key}: missing (and so is {other})")
    if len(set(found)) > 1:
        raise CheckpointError(f"{key} contradicts {other}")
    return found[0]


def _check_ranges(config: InklingConfig) -> None:
    optional = {"log_scaling_n_floor"}
    at_least = {"sconv_kernel_size": 2, "log_scaling_alpha": 0, "route_scale": 0}
    for key in InklingConfig.__struct_fields__:
        value = getattr(config, key)
        if isinstance(value, tuple) or (value is None and key in optional):
            continue
        if not math.isfinite(value):
            raise CheckpointError(f"{key}={value!r}: must be finite")
        low = at_least.get(key)
        if low is None and value <= 0:
            raise CheckpointError(f"{key}={value!r}: must be greater than 0")
        if low is not None and value < low:
            raise CheckpointError(f"{key}={value!r}: must be at least {low}")
    limits = {
        "num_experts_per_tok": (
            config.num_experts_per_tok,
            "n_routed_experts",
            config.n_routed_experts,
        ),
        "unpadded_vocab_size": (config.unpadded_vocab_size, "vocab_size", config.vocab_size),
    }
    for key, (value, other, limit) in limits.items():
        if value > limit:
            raise CheckpointError(f"{key}={value}: must not exceed {other} ({limit})")
    for prefix in ("", "swa_"):
        heads = getattr(config, f"{prefix}num_attention_heads")
        kv_heads = getattr(config, f"{prefix}num_key_value_heads")
        if heads % kv_heads:
            raise CheckpointError(
                f"{prefix}num_attention_heads={heads}: must be a multiple of {prefix}num_key_value_heads ({kv_heads})"
            )
