"""Tiny random Inkling models made and saved by transformers, in every spelling, sharp enough that each rule acts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import InklingConfig, InklingForCausalLM, InklingForConditionalGeneration

# Within 40 tokens: windows and extents are passed, tau exceeds 1, GQA groups differ by kind, padding rows exist.
PUBLISHED: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "local_layer_ids": [0, 1, 3],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 4,
    "sliding_window_size": 5,
    "d_rel": 3,
    "rel_extent": 9,
    "log_scaling_n_floor": 6,
    "log_scaling_alpha": 0.3,
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 24,
    "intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 3.0,
    "logits_mup_width_multiplier": 1.7,
    "vocab_size": 64,
    "unpadded_vocab_size": 60,
    "sconv_kernel_size": 4,
    "model_max_length": 512,
    "rms_norm_eps": 1e-3,
}
# What the published file says on top; transformers refuses none of it and uses none of it.
SWITCHES: dict[str, Any] = {
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "shared_expert_sink": True,
    "norm_after_topk": True,
    "gate_activation": "sigmoid",
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "full_first_all_sparse": {
        "local_layer_ids": [1],
        "num_hidden_layers": 3,
        "dense_mlp_idx": 0,
        "sconv_kernel_size": 3,
        "sliding_window_size": 7,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "log_scaling_n_floor": None,
    },
    "window_only_all_dense": {
        "local_layer_ids": [0, 1],
        "num_hidden_layers": 2,
        "dense_mlp_idx": 2,
        "sliding_window_size": 1,
        "unpadded_vocab_size": None,
    },
    "full_only": {
        "local_layer_ids": [],
        "num_hidden_layers": 2,
        "log_scaling_n_floor": 1,
        "rel_extent": 2,
        "num_key_value_heads": 1,
    },
}


TOWERS: dict[str, Any] = {
    "vision_config": {"num_hidden_layers": 3, "patch_size": 2, "temporal_patch_size": 2},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 4},
}


def tiny_model(**changes: Any) -> InklingForConditionalGeneration:
    """A random model in fp32 whose logits have a standard deviation of about 1 or more."""
    config = InklingConfig(text_config=PUBLISHED | changes, **copy.deepcopy(TOWERS))
    model = InklingForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "global_scale")):
                parameter.copy_(1 + 0.3 * noise)
            elif "sconv" in name or "e_score_correction_bias" in name:
                parameter.copy_(0.4 * noise)
            elif "rel_logits_proj" in name:
                parameter.copy_(noise)
            elif parameter.is_floating_point() and parameter.dim() > 1:
                parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5)
    return model


def save_published(model: InklingForConditionalGeneration, folder: Path, **options: Any) -> None:
    """Published tensor names and the published spelling of config.json."""
    model.save_pretrained(folder, **options)
    text = model.config.text_config
    published = {key: getattr(text, key, None) for key in PUBLISHED}
    published |= {
        "dense_mlp_idx": text.mlp_layer_types.count("dense"),
        "dense_intermediate_size": text.intermediate_size,
        "intermediate_size": text.moe_intermediate_size,
    }
    config = {
        "model_type": "inkling_mm_model",
        "architectures": ["InklingForConditionalGeneration"],
        "eos_token_id": 6,
        "text_config": published | SWITCHES,
        "vision_config": {},
        "audio_config": {},
        "mtp_config": {"num_nextn_predict_layers": 8},
    }
    (folder / "config.json").write_text(json.dumps(config))


def save_transformers(model: InklingForConditionalGeneration, folder: Path, **options: Any) -> None:
    """transformers' multimodal tensor names and its config.json."""
    model.save_pretrained(folder, save_original_format=False, **options)


def save_text(model: InklingForConditionalGeneration, folder: Path, **options: Any) -> None:
    """transformers' text-only model of the same weights."""
    text = InklingForCausalLM(model.config.text_config)
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    text.save_pretrained(folder, **options)


SPELLINGS = {"published": save_published, "transformers": save_transformers, "text": save_text}


def token_ids(count: int, seed: int = 1) -> list[int]:
    """Random tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (count,), generator=generator).tolist()


def edit_tensors(folder: Path, change: Any) -> None:
    """Load `model.safetensors` as a dictionary, let `change` edit it in place, and store it again."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def edit_config(folder: Path, change: Any) -> None:
    """Let `change` edit the config.json object in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
