"""Small random block drafters for the small model of tests/random_checkpoint.py, in the layouts that training code publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from samebit.speculative.block_config import BlockConfig, block_tensors, parse_block_config
from tests.random_checkpoint import SMALL

# Windows are 5 where the target's is 6: a page group of the drafter's own. The mask is a padding row.
BACKBONE: dict[str, Any] = {
    "model_type": "qwen3",
    "block_size": 5,
    "num_hidden_layers": 3,
    "num_target_layers": SMALL["num_hidden_layers"],
    "hidden_size": SMALL["hidden_size"],
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "vocab_size": SMALL["vocab_size"],
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SHARED: dict[str, Any] = {"mask_token_id": SMALL["vocab_size"] - 3, "target_layer_ids": [0, 2]}
DFLASH: dict[str, Any] = {**BACKBONE, "architectures": ["DFlashDraftModel"], "dflash_config": SHARED}
HEADS: dict[str, Any] = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# SpecForge nests what DeepSpec writes flat; this is how its configuration for Inkling does.
DSPARK: dict[str, Any] = {
    **BACKBONE,
    "architectures": ["DSparkDraftModel"],
    "block_size": 4,
    "dflash_config": {**SHARED, "projector_type": "dspark", "attention_mode": "gqa"},
    "dspark_config": HEADS,
}
DEEPSPEC: dict[str, Any] = {
    **{key: value for key, value in BACKBONE.items() if key != "num_hidden_layers"},
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "num_draft_layers": 3,
    "num_anchors": 512,
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.1,
    "l1_loss_alpha": 0.9,
    "confidence_head_alpha": 1.0,
    **SHARED,
    **HEADS,
}

METHODS = {"dflash": DFLASH, "dspark": DSPARK}


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`config` with other values, each where it stands or would stand."""
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for key, value in changes.items():
        places = [found.get("dspark_config"), found.get("dflash_config"), found]
        holders = [place for place in places if place is not None and key in place]
        if not holders:
            holders = [place for place in places[1:2] if place is not None and key in _NESTED]
        (holders or [found])[0][key] = value
    return found


_NESTED = ("is_causal", "sample_from_anchor", "input_embedding_scale")


def random_tensors(config: BlockConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights sharp enough that every part acts on what is guessed."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in block_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        is_gain = len(shape) == 1 and name.endswith("norm.weight")
        is_gain = is_gain or name.endswith("layernorm.weight")
        sharp = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        scale = 1.0 if name.endswith((".bias", "markov_w1.weight")) else 2 / shape[-1] ** 0.5
        found[name] = sharp * (1 + 0.3 * noise) if is_gain else noise * scale
    return found


def write_drafter(
    folder: Path, raw: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Path, BlockConfig, dict[str, Tensor]]:
    """A folder with config.json and model.safetensors, and what they hold."""
    config = parse_block_config(raw)
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config, seed).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder, config, tensors
