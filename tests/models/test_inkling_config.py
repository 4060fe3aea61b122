"""Both spellings of config.json mean the same; whatever is not understood is refused by name."""

from __future__ import annotations

import json

import pytest

from samebit.core.errors import CheckpointError
from samebit.models.inkling_config import parse_config
from tests.models import tiny

PUBLISHED = {"model_type": "inkling_mm_model", "text_config": tiny.PUBLISHED | tiny.SWITCHES}


def changed(**keys):
    return PUBLISHED | {"text_config": PUBLISHED["text_config"] | keys}


def without(key):
    return PUBLISHED | {"text_config": {k: v for k, v in PUBLISHED["text_config"].items() if k != key}}


@pytest.mark.parametrize("spelling", tiny.SPELLINGS)
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_all_spellings_give_one_configuration(spelling, variant, tmp_path):
    tiny.SPELLINGS[spelling](tiny.tiny_model(**tiny.VARIANTS[variant]), tmp_path)
    text = tiny.PUBLISHED | tiny.VARIANTS[variant]
    config = parse_config(json.loads((tmp_path / "config.json").read_text()))
    assert config == parse_config({"text_config": text})
    assert (config.dense_intermediate_size, config.moe_intermediate_size) == (24, 12)
    assert config.is_window == tuple(i in text["local_layer_ids"] for i in range(text["num_hidden_layers"]))
    assert config.is_dense == tuple(i < text["dense_mlp_idx"] for i in range(text["num_hidden_layers"]))


def test_the_two_meanings_of_the_plain_width_are_told_apart():
    transformers = {k: v for k, v in tiny.PUBLISHED.items() if k != "dense_intermediate_size"}
    transformers |= {"intermediate_size": 24, "moe_intermediate_size": 12}
    assert parse_config({"text_config": transformers}) == parse_config(PUBLISHED)


@pytest.mark.parametrize("key", sorted(tiny.PUBLISHED.keys() - {"unpadded_vocab_size", "dense_intermediate_size"}))
def test_a_missing_key_is_named(key):
    name = "moe_intermediate_size" if key == "intermediate_size" else key
    with pytest.raises(CheckpointError, match=name):
        parse_config(without(key))


def test_without_either_spelling_of_the_widths_the_missing_one_is_named():
    with pytest.raises(CheckpointError, match="moe_intermediate_size"):
        parse_config(without("dense_intermediate_size"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("q_bias", True),
        ("o_bias", True),
        ("final_logit_softcapping", 30.0),
        ("gate_activation", "softmax"),
        ("use_sconv", False),
        ("use_sconv", 1),
        ("use_embed_norm", False),
        ("use_gate_bias", False),
        ("use_global_scale", False),
        ("shared_expert_sink", False),
        ("norm_after_topk", False),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("number_of_conv_states", 6),
    ],
)
def test_an_unsupported_switch_is_named_with_its_value(key, value):
    with pytest.raises(CheckpointError, match=rf"^{key}={value!r}: only .* is supported"):
        parse_config(changed(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "32"),
        ("hidden_size", 32.5),
        ("head_dim", True),
        ("num_hidden_layers", None),
        ("num_hidden_layers", -1),
        ("num_attention_heads", 5),
        ("swa_num_attention_heads", 5),
        ("num_experts_per_tok", 7),
        ("unpadded_vocab_size", 65),
        ("sconv_kernel_size", 1),
        ("log_scaling_n_floor", 0),
        ("log_scaling_alpha", -0.1),
        ("route_scale", float("nan")),
        ("rms_norm_eps", 0.0),
        ("logits_mup_width_multiplier", float("inf")),
        ("local_layer_ids", [4]),
        ("local_layer_ids", [True]),
        ("local_layer_ids", 3),
        ("layer_types", ["hybrid"]),
        ("layer_types", ["hybrid", "hybrid", "hybrid", "loop"]),
        ("mlp_layer_types", "dense"),
        ("dense_mlp_idx", 5),
    ],
)
def test_a_value_out_of_range_is_named(key, value):
    with pytest.raises(CheckpointError, match=key):
        parse_config(changed(**{key: value}))


@pytest.mark.parametrize("key", ["attention_sink", "embedding_multiplier", "rope_theta"])
def test_an_unknown_key_is_named_with_its_value(key):
    with pytest.raises(CheckpointError, match=f"^{key}=24.0: unknown key"):
        parse_config(changed(**{key: 24.0}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_kernel_size", 3),
        ("max_position_embeddings", 511),
        ("sliding_window", 6),
        ("moe_intermediate_size", 13),
        ("layer_types", ["hybrid"] * 4),
        ("mlp_layer_types", ["sparse"] * 4),
    ],
)
def test_two_spellings_that_disagree_are_refused(key, value):
    with pytest.raises(CheckpointError, match=f"{key}.*contradicts|contradicts {key}"):
        parse_config(changed(**{key: value}))


def test_a_quantised_checkpoint_is_refused():
    with pytest.raises(CheckpointError, match="quantised checkpoints are not supported"):
        parse_config(PUBLISHED | {"quantization_config": {"quant_method": "modelopt"}})


def test_a_text_config_that_is_no_object_is_refused():
    with pytest.raises(CheckpointError, match="text_config='inkling'"):
        parse_config({"text_config": "inkling"})
