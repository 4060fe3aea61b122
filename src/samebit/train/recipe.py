"""What is trained and how: shapes as config.json objects, and stages. Knows plain values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from samebit.core.errors import ConfigError
from samebit.train.optim import Rates

# No logit depends on the towers; transformers loads no Inkling without them, so they are as small as it permits.
_TOWERS: Mapping[str, Any] = {
    "vision_config": {"num_hidden_layers": 3, "patch_size": 2, "temporal_patch_size": 2},
    "audio_config": {"n_mel_bins": 1, "mel_vocab_size": 1},
}
_SWITCHES: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
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
END_OF_TURN = 6


@dataclass(frozen=True, slots=True)
class Stage:
    """Sequences of `length` tokens, `rows` of them a step, for `seconds`; where `steps` are given, for so many instead.

    The rate rises over `warmup` steps to `peak` times the recipe's and falls, in the last `decay_share` of the stage, linearly to
    `final_rate` times the recipe's.
    """

    length: int
    rows: int
    dialogue_share: float
    seconds: float
    decay_share: float
    steps: int | None = None
    warmup: int = 150
    peak: float = 1.0
    final_rate: float = 0.02
    ring_rows: int = 8192


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model to train. `raw`: its config.json object; `contexts`, `distances`: what is evaluated; `probes`: a cell.

    `held_out_tokens`: how much of the held-out stream is measured (None: all of it).
    """

    raw: Mapping[str, Any]  # Any: JSON
    stages: tuple[Stage, ...]
    contexts: tuple[int, ...]
    distances: tuple[int, ...]
    probes: int
    held_out_tokens: int | None = None
    rates: Rates = field(default_factory=Rates)
    bias_rate: float = 1e-3

    def stage(self, number: int, seconds: float | None = None) -> Stage:
        """Stage `number`, from 1; `seconds` stand in for its time or steps. Raises ConfigError for a stage there is not."""
        if not 1 <= number <= len(self.stages):
            raise ConfigError(f"stage={number}: the recipe has stages 1 .. {len(self.stages)}")
        stage = self.stages[number - 1]
        return stage if seconds is None else replace(stage, seconds=seconds, steps=None)


def config_json(text: Mapping[str, Any], num_depths: int, local_depths: list[int]) -> dict[str, Any]:  # Any: JSON
    """A whole config.json object in the published spelling."""
    return {
        "model_type": "inkling_mm_model",
        "architectures": ["InklingForConditionalGeneration"],
        "eos_token_id": END_OF_TURN,
        "torch_dtype": "bfloat16",
        "text_config": {**text, **_SWITCHES},
        "mtp_config": {
            "num_nextn_predict_layers": num_depths,
            "chain_hidden_post_norm": False,
            "local_layer_ids": local_depths,
        },
        **_TOWERS,
    }


_NANO_TEXT = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "local_layer_ids": [0, 1, 2, 4, 5, 6],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 64,
    "sliding_window_size": 128,
    "d_rel": 16,
    # The whole context: which of several corrections is the last one shows in their distances.
    "rel_extent": 4096,
    "log_scaling_n_floor": 1024,
    "log_scaling_alpha": 0.1,
    "dense_mlp_idx": 2,
    # The two draft depths are dense blocks of the same width: with 640 and experts of 112 all is below 12 M.
    "dense_intermediate_size": 640,
    "intermediate_size": 112,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 4.0,
    "logits_mup_width_multiplier": 1.5,
    "vocab_size": 4160,
    "unpadded_vocab_size": 4096,
    "sconv_kernel_size": 4,
    "model_max_length": 8192,
}
_TOY_TEXT = _NANO_TEXT | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "local_layer_ids": [0, 2],
    "head_dim": 16,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "d_rel": 4,
    "rel_extent": 64,
    "log_scaling_n_floor": 64,
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 96,
    "intermediate_size": 32,
    "n_routed_experts": 4,
    "vocab_size": 656,
    "unpadded_vocab_size": 640,
    "model_max_length": 1024,
}

# "nano" takes one call of at most ten minutes on one H200; "toy" shows on a CPU that the whole path works.
RECIPES: Mapping[str, Recipe] = {
    "nano": Recipe(
        raw=config_json(_NANO_TEXT, num_depths=2, local_depths=[0, 1]),
        # Of one length: a second one would be compiled anew.
        stages=(
            Stage(length=4096, rows=16, dialogue_share=0.625, seconds=480, decay_share=0.6, ring_rows=2048),
            Stage(
                length=4096,
                rows=16,
                dialogue_share=0.75,
                seconds=300,
                decay_share=0.9,
                ring_rows=2048,
                warmup=60,
                peak=0.3,
            ),
        ),
        contexts=(512, 4096),
        distances=(250, 500, 1000, 2000, 3000),
        probes=50,
        held_out_tokens=2_000_000,
    ),
    "toy": Recipe(
        raw=config_json(_TOY_TEXT, num_depths=2, local_depths=[0]),
        stages=(
            Stage(
                length=64, rows=8, dialogue_share=0.25, seconds=30, decay_share=0.0, steps=30, warmup=5, ring_rows=64
            ),
            Stage(
                length=128, rows=4, dialogue_share=0.5, seconds=30, decay_share=0.7, steps=20, warmup=5, ring_rows=64
            ),
        ),
        contexts=(64, 256),
        distances=(250,),
        probes=4,
        held_out_tokens=8192,
    ),
}
