"""Which drafters are trained and how: shapes as config.json objects for a target, and the course of a run. Plain values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samebit.core.errors import ConfigError
from samebit.models.inkling_config import InklingConfig
from samebit.speculative.block_config import FULL_LAYER, TAP_LOCATION
from samebit.train.drafters.students import LossWeights
from samebit.train.optim import Rates

BLOCK_METHODS = ("dflash", "dspark")
METHODS = (*BLOCK_METHODS, "mtp")
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
LOSSES = {
    "dflash": LossWeights(labels=1.0),
    "dspark": LossWeights(labels=0.1, distance=0.9, confidence=1.0),
}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block drafter of `num_layers`, which reads the target's layers `taps` and guesses `num_drafts` tokens. Heads are as wide and
    as many as the target's, those of keys and values `num_kv_heads`: the narrower, the less a guess can take from one position.
    """

    num_layers: int
    num_kv_heads: int
    intermediate_size: int
    taps: tuple[int, ...]
    num_drafts: int
    markov_rank: int


@dataclass(frozen=True, slots=True)
class OwnTexts:
    """Text of the target's own: a `share` of the steps, in sequences of `length` tokens. Of these the first are given: as many as two
    numbers say at least and at most (`prompt`), since what the target writes behind little context is not what it writes behind much.

    `rows` are written at a time, one in `drawn_every` drawn and the others greedy, and each is used `uses` times.
    """

    share: float
    rows: int
    length: int
    prompt: tuple[int, int]
    uses: int
    drawn_every: int = 4


@dataclass(frozen=True, slots=True)
class Measures:
    """What is measured: `rows` continuations of held-out code by `new` tokens after `prompt`, and `probes` replies at each of
    `distances`, of at most `reply` tokens.
    """

    rows: int
    prompt: int
    new: int
    distances: tuple[int, ...]
    probes: int
    reply: int


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """A step takes `rows` rows of `row_length` tokens, cut into sequences of one of `lengths`, with a block for so many tokens as
    `tokens_per_block` says. It runs for `seconds`, or where `steps` are given for so many instead.

    `rates`: by method; they rise over `warmup` steps and fall as half a cosine.
    """

    shape: BlockShape
    row_length: int
    rows: int
    lengths: tuple[int, ...]
    tokens_per_block: int
    dialogue_share: float
    own: OwnTexts
    measures: Measures
    seconds: float
    steps: int | None = None
    rates: Mapping[str, Rates] = field(
        default_factory=lambda: {"dflash": Rates(), "dspark": Rates(), "mtp": Rates(muon=2e-3, adam=3e-4)}
    )
    warmup: int = 200
    ring_rows: int = 2048


def block_config_json(method: str, shape: BlockShape, target: InklingConfig) -> dict[str, Any]:  # Any: JSON
    """A whole config.json object in the published layout. The mask is the target's first padding row.

    Raises ConfigError for a target without one, or without the layers to tap.
    """
    if target.unpadded_vocab_size >= target.vocab_size:
        raise ConfigError(
            f"vocab_size={target.vocab_size}: the target's table has no padding row, which the mask would be"
        )
    if shape.taps[-1] >= target.num_hidden_layers:
        raise ConfigError(f"target_layer_ids={list(shape.taps)}: the target has {target.num_hidden_layers} layers")
    own: dict[str, Any] = {
        "mask_token_id": target.unpadded_vocab_size,
        "target_layer_ids": list(shape.taps),
        "tap_location": TAP_LOCATION,
    }
    if method == "dspark":
        own |= {
            "projector_type": "dspark",
            "sample_from_anchor": True,
            "markov_rank": shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    return {
        "architectures": [_ARCHITECTURES[method]],
        "model_type": "qwen3",
        # A DFlash block counts the token before its guesses.
        "block_size": shape.num_drafts + (method == "dflash"),
        "num_hidden_layers": shape.num_layers,
        "num_target_layers": target.num_hidden_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": target.model_max_length,
        "layer_types": [FULL_LAYER] * shape.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "dflash_config": own,
    }


DRAFTER_RECIPES: Mapping[str, DrafterRecipe] = {
    "nano": DrafterRecipe(
        shape=BlockShape(
            num_layers=3, num_kv_heads=4, intermediate_size=576, taps=(1, 4, 6, 7), num_drafts=7, markov_rank=64
        ),
        row_length=4096,
        rows=8,
        lengths=(512, 512, 512, 512, 512, 512, 1024, 2048),
        tokens_per_block=4,
        dialogue_share=0.25,
        own=OwnTexts(share=0.75, rows=4096, length=512, prompt=(64, 384), uses=4),
        measures=Measures(rows=64, prompt=256, new=192, distances=(250, 1000), probes=48, reply=48),
        # With what it takes to start, to write text and to measure below 400 s.
        seconds=320,
    ),
    "toy": DrafterRecipe(
        shape=BlockShape(
            num_layers=2, num_kv_heads=2, intermediate_size=96, taps=(0, 1, 2), num_drafts=4, markov_rank=8
        ),
        row_length=128,
        rows=4,
        lengths=(64, 128),
        tokens_per_block=8,
        dialogue_share=0.25,
        own=OwnTexts(share=0.2, rows=16, length=64, prompt=(16, 32), uses=2),
        measures=Measures(rows=8, prompt=32, new=24, distances=(250,), probes=3, reply=24),
        seconds=30,
        steps=50,
        warmup=5,
        ring_rows=64,
    ),
}


def drafter_recipe(name: str) -> DrafterRecipe:
    """A recipe by name. Raises ConfigError if there is none."""
    if name not in DRAFTER_RECIPES:
        raise ConfigError(f"recipe={name!r}: is not one of {', '.join(DRAFTER_RECIPES)}")
    return DRAFTER_RECIPES[name]
