"""Small random Inkling checkpoints in the published layout, written with safetensors alone; every rule acts in few tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from samebit.models.hash import byte_tokenizer

VOCAB = 272

# Odd sizes on purpose: a window of 6 with pages of 4, K = 4, extents shorter than contexts, GQA that differs by kind.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "local_layer_ids": [0, 2],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 16,
    "sliding_window_size": 6,
    "d_rel": 4,
    "rel_extent": 12,
    "log_scaling_n_floor": 16,
    "log_scaling_alpha": 0.2,
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 48,
    "intermediate_size": 16,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 1.5,
    "vocab_size": VOCAB + 16,
    "unpadded_vocab_size": VOCAB,
    "sconv_kernel_size": 4,
    "model_max_length": 256,
    "rms_norm_eps": 1e-6,
}


def write_checkpoint(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, depths: int = 0, **changes: Any
) -> Path:
    """A folder with config.json, model.safetensors and a byte-level tokenizer; `changes` override SMALL.

    `depths` draft heads, the first with the window and the others without.
    """
    text = SMALL | changes
    config = {"model_type": "inkling_mm_model", "eos_token_id": VOCAB - 1, "text_config": text}
    if depths:
        config["mtp_config"] = {"num_nextn_predict_layers": depths, "local_layer_ids": [0]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(VOCAB)))
    tensors = _tensors(text, torch.Generator().manual_seed(seed), depths)
    keep = ("mlp.gate.bias", "mlp.gate.global_scale")
    save_file(
        {name: t if name.endswith(keep) else t.to(dtype) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def _tensors(c: dict[str, Any], generator: torch.Generator, depths: int) -> dict[str, Tensor]:
    def noise(*shape: int, scale: float | None = None) -> Tensor:
        return torch.randn(shape, generator=generator) * (scale or 2 / shape[-1] ** 0.5)

    def gain(size: int) -> Tensor:
        return 1 + noise(size, scale=0.3)

    hidden = c["hidden_size"]
    out = {
        "embed.weight": noise(c["vocab_size"], hidden, scale=1.0),
        "embed_norm.weight": gain(hidden),
        "norm.weight": gain(hidden),
        "unembed.weight": noise(c["vocab_size"], hidden),
    }
    for i in range(c["num_hidden_layers"]):
        layer = _block(c, noise, gain, is_local=i in c["local_layer_ids"], is_dense=i < c["dense_mlp_idx"])
        out |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    found = {f"model.llm.{name}": tensor for name, tensor in out.items()}
    for i in range(depths):
        prefix = f"model.mtp.layers.{i}."
        block = _block(c, noise, gain, is_local=i == 0, is_dense=True)
        found |= {f"{prefix}transformer_block.{name}": tensor for name, tensor in block.items()}
        found |= {f"{prefix}{name}.weight": gain(hidden) for name in ("hidden_norm", "embed_norm")}
        found[f"{prefix}input_proj.weight"] = noise(hidden, 2 * hidden)
    return found


def _block(c: dict[str, Any], noise: Any, gain: Any, *, is_local: bool, is_dense: bool) -> dict[str, Tensor]:
    hidden, taps, kind = c["hidden_size"], c["sconv_kernel_size"], "swa_" if is_local else ""
    heads, kv, width = (c[kind + key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    extent = c["sliding_window_size"] if is_local else c["rel_extent"]
    return {
        "attn_norm.weight": gain(hidden),
        "mlp_norm.weight": gain(hidden),
        "attn.wq_du.weight": noise(heads * width, hidden),
        "attn.wk_dv.weight": noise(kv * width, hidden),
        "attn.wv_dv.weight": noise(kv * width, hidden),
        "attn.wr_du.weight": noise(heads * c["d_rel"], hidden),
        "attn.wo_ud.weight": noise(hidden, heads * width),
        "attn.q_norm.weight": gain(width) * 3,
        "attn.k_norm.weight": gain(width) * 3,
        "attn.rel_logits_proj.proj": noise(c["d_rel"], extent, scale=1.0),
        "attn.k_sconv.weight": noise(kv * width, 1, taps, scale=0.4),
        "attn.v_sconv.weight": noise(kv * width, 1, taps, scale=0.4),
        "attn_sconv.weight": noise(hidden, 1, taps, scale=0.4),
        "mlp_sconv.weight": noise(hidden, 1, taps, scale=0.4),
        **(_dense(c, noise) if is_dense else _experts(c, noise)),
    }


def _dense(c: dict[str, Any], noise: Any) -> dict[str, Tensor]:
    width = c["dense_intermediate_size"]
    return {
        "mlp.w13_dn.weight": noise(2 * width, c["hidden_size"]),
        "mlp.w2_md.weight": noise(c["hidden_size"], width),
        "mlp.global_scale": torch.tensor([1.25]),
    }


def _experts(c: dict[str, Any], noise: Any) -> dict[str, Tensor]:
    routed, shared, hidden, width = (
        c[key] for key in ("n_routed_experts", "n_shared_experts", "hidden_size", "intermediate_size")
    )
    return {
        "mlp.gate.weight": noise(routed + shared, hidden),
        "mlp.gate.bias": noise(routed, scale=0.2),
        "mlp.gate.global_scale": torch.tensor([1.1]),
        "mlp.experts.w13_weight": noise(routed, 2 * width, hidden),
        "mlp.experts.w2_weight": noise(routed, hidden, width),
        "mlp.shared_experts.shared_w13_weight": noise(shared, 2 * width, hidden),
        "mlp.shared_experts.shared_w2_weight": noise(shared, hidden, width),
    }
