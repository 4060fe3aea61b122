"""Which block drafters are served, in which layouts, and why others are refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebit import LLM, EngineConfig, SamplingParams
from samebit.core.config import SpeculativeConfig
from samebit.core.errors import CheckpointError, ConfigError, ModelNotFoundError, SamebitError
from samebit.engine.engine import Engine
from samebit.engine.model_source import bundled_drafter
from samebit.models.hash import HashConfig, save_hash
from samebit.speculative.block_config import TAP_LOCATION, block_tensors, parse_block_config
from tests.driving import make_request, run
from tests.random_checkpoint import SMALL, VOCAB, write_checkpoint
from tests.speculative.block_checkpoint import DEEPSPEC, DFLASH, DSPARK, HEADS, changed, write_drafter
from tests.speculative.recording import recorded

POOLS = {"num_threads": 1, "num_pages": 60, "num_window_pages": 60, "num_checkpoints": 4, "max_num_seqs": 2}
PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target"))


def load(target, drafter, method="dflash", **wanted) -> LLM:
    settings = {"method": method, "model": str(drafter), "token_cost": 0, **wanted}
    return LLM(str(target), speculative_config=settings, **POOLS)


def guesses(target, drafter, method="dflash"):
    """All that is guessed for one request; a drafter with one other weight guesses otherwise."""
    wanted = SpeculativeConfig(method=method, model=str(drafter), token_cost=0)
    engine = Engine(EngineConfig(model=str(target), speculative_config=wanted, **POOLS))
    with recorded(engine) as found:
        run(engine, [make_request("r", PROMPT, temperature=0.0, max_tokens=20, ignore_eos=True)])
    return found.of["r"]


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize(("raw", "method"), [(DFLASH, "dflash"), (DSPARK, "dspark"), (DEEPSPEC, "dspark")])
@pytest.mark.parametrize("vocab_size", [SMALL["vocab_size"], VOCAB])
def test_published_layouts_are_served(target, tmp_path, raw, method, vocab_size):
    write_drafter(tmp_path, changed(raw, vocab_size=vocab_size), dtype=torch.bfloat16)
    found = guesses(target, tmp_path, method)
    assert len(found) > 8
    assert {len(tokens) for tokens, _ in found.values()} == {4}


def test_other_names_and_fused_tensors_are_the_same_drafter(target, tmp_path):
    plain, config, tensors = write_drafter(tmp_path / "plain", DFLASH)
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    renamed["encoder.fc.weight"] = renamed.pop("model.fc.weight")
    renamed["encoder.output_norm_enc.weight"] = renamed.pop("model.hidden_norm.weight")
    for i in range(config.num_hidden_layers):
        for fused, names in {
            "self_attn.qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
            "mlp.gate_up": ("mlp.gate", "mlp.up"),
        }.items():
            parts = [renamed.pop(f"model.layers.{i}.{name}_proj.weight") for name in names]
            renamed[f"model.layers.{i}.{fused}_proj.weight"] = torch.cat(parts)
    # The target's, or computed.
    renamed["model.embed_tokens.weight"] = torch.zeros(3, 3)
    renamed["lm_head.weight"] = torch.zeros(3, 3)
    renamed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((plain / "config.json").read_text())
    save_file(renamed, other / "model.safetensors")
    assert guesses(target, other) == guesses(target, plain)


def test_heads_of_older_files_have_another_name(target, tmp_path):
    plain, _, tensors = write_drafter(tmp_path / "plain", DSPARK)
    other, _, _ = write_drafter(tmp_path / "other", DSPARK, seed=1)
    save_file({k.replace("markov_head.", "logit_head."): v for k, v in tensors.items()}, other / "model.safetensors")
    assert guesses(target, other, "dspark") == guesses(target, plain, "dspark")


def test_the_published_configuration_for_inkling_is_understood():
    """SpecForge's configs/inkling-dspark.json, less its keys for training and text."""
    raw = {
        "architectures": ["DSparkDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": 7,
        "dflash_config": {
            "attention_mode": "gqa",
            "mask_token_id": 200064,
            "projector_type": "dspark",
            "target_layer_ids": [5, 17, 35, 47, 59],
        },
        "dspark_config": HEADS | {"markov_rank": 256},
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 5,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "num_attention_heads": 64,
        "num_hidden_layers": 5,
        "num_key_value_heads": 16,
        "num_target_layers": 66,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 8000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 201024,
    }
    config = parse_block_config(raw)
    assert (config.method, config.num_drafts, config.num_rows) == ("dspark", 7, 7)
    # Five layers, the projection of the target's streams, and two tables of rank 256.
    layer = 6144 * 64 * (2 * 64 + 2 * 16) + 3 * 6144 * 12288 + 2 * 6144 + 2 * 64
    others = 5 * 6144**2 + 2 * 6144 + 2 * 201024 * 256 + 6144 + 256 + 1
    assert sum(math.prod(shape) for shape in block_tensors(config).values()) == 5 * layer + others


@pytest.mark.parametrize(
    ("num_target", "num_layers", "wanted"), [(36, 5, (1, 9, 17, 25, 33)), (7, 3, (1, 2, 4)), (9, 1, (4,))]
)
def test_layers_that_nobody_names_are_spread_evenly(num_target, num_layers, wanted):
    raw = changed(DFLASH, num_target_layers=num_target, num_hidden_layers=num_layers, layer_types=None)
    raw["dflash_config"] = {"mask_token_id": 3}
    assert parse_block_config(without(raw, "layer_types")).target_layer_ids == wanted


def test_spellings_of_one_configuration_agree():
    wanted = parse_block_config(DSPARK)
    assert parse_block_config(changed(DEEPSPEC)) == wanted
    assert parse_block_config(changed(DSPARK, architectures=["DFlashDraftModel"])) == wanted
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": DSPARK["rope_theta"]}}
    assert parse_block_config(without(DSPARK, "rope_theta") | rope) == wanted
    nested = {**DSPARK["dflash_config"], "block_size": DSPARK["block_size"], "tap_location": TAP_LOCATION}
    assert parse_block_config(without(DSPARK, "block_size") | {"dflash_config": nested}) == wanted
    nested = DSPARK["dflash_config"] | DSPARK["dspark_config"]
    assert parse_block_config(without(DSPARK, "dspark_config") | {"dflash_config": nested}) == wanted
    repeated = {"target_hidden_size": DSPARK["hidden_size"], "draft_vocab_size": DSPARK["vocab_size"], "num_loops": 1}
    assert parse_block_config(DSPARK | repeated) == wanted
    assert min(block_tensors(wanted)) == "confidence_head.proj.bias"


def test_layers_slide_by_the_rule_where_no_kinds_are_listed():
    raw = without(changed(DFLASH, max_window_layers=1), "layer_types")
    assert parse_block_config(raw).windows == (0, 5, 5)
    assert parse_block_config(raw | {"use_sliding_window": False}).windows == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "architectures=.*must be one of"),
        ({"projector_type": "domino"}, "projector_type='domino': only"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*default"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True: only False"),
        ({"attention_mode": "mla"}, "attention_mode='mla'"),
        ({"selector_rank": 64}, "selector_rank=64: only None"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ({"tap_location": "after_mlp_conv"}, "tap_location='after_mlp_conv': only 'before_mlp_conv'"),
        ({"target_hidden_size": 64}, "target_hidden_size=64: only that of hidden_size=32"),
        ({"draft_vocab_size": 100}, "draft_vocab_size=100: only that of vocab_size=288"),
        ({"num_loops": 2}, "num_loops=2: only 1"),
        ({"fc_layernorm": True}, "fc_layernorm=True: unknown key"),
        ({"layer_types": ["full_attention"]}, "layer_types=.*must list 3 times"),
        ({"use_sliding_window": False}, "use_sliding_window=False: contradicts layer_types"),
        ({"sliding_window": None}, "sliding_window=None: must be a positive whole number"),
        ({"swa_window_size": 5}, "swa_window_size=5: only the window of layers that all slide"),
        ({"is_causal": "maybe"}, "is_causal='maybe'"),
        ({"block_size": 1}, "block_size=1: must give 1 to 32 guesses"),
        ({"block_size": 0}, "block_size=0: must be finite and greater than 0"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4: must be a multiple"),
        ({"target_layer_ids": [2, 0]}, r"target_layer_ids=\[2, 0\]: must be layers of the target, ascending"),
        ({"target_layer_ids": [-1, 2]}, r"target_layer_ids=\[-1, 2\]"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
        ({"markov_rank": 4}, "markov_rank=4: only projector_type 'dspark'"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused_by_name(changes, message):
    nested = {*DFLASH["dflash_config"], "projector_type", "attention_mode", "tap_location", "is_causal"}
    raw = {**DFLASH, **{k: v for k, v in changes.items() if k not in nested}}
    raw["dflash_config"] = DFLASH["dflash_config"] | {k: v for k, v in changes.items() if k in nested}
    with pytest.raises(CheckpointError, match=message):
        parse_block_config(raw)


def test_keys_inside_and_outside_must_not_contradict_one_another():
    with pytest.raises(CheckpointError, match=r"dflash_config\.block_size=7: contradicts block_size=5 outside"):
        parse_block_config({**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "block_size": 7}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden_size is 16, the target's 32"),
        ({"vocab_size": 300}, "vocab_size is 300, the target's 272, or 288 with padding"),
        ({"mask_token_id": 288}, "mask_token_id is 288, the target's embedding has 288 rows"),
        ({"target_layer_ids": [1, 3]}, r"target_layer_ids are \[1, 3\], the target has layers 0 to 2"),
        ({"num_target_layers": 4}, "num_target_layers is 4, the target has 3"),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_both_values(target, tmp_path, changes, message):
    write_drafter(tmp_path, changed(DFLASH, **changes))
    with pytest.raises(ConfigError, match=message):
        load(target, tmp_path)


def test_settings_that_the_drafter_does_not_meet_are_refused(target, tmp_path):
    write_drafter(tmp_path / "d", DFLASH)
    with pytest.raises(ConfigError, match="num_speculative_tokens=5: the drafter gives at most 4"):
        load(target, tmp_path / "d", num_speculative_tokens=5)
    with pytest.raises(ConfigError, match="method='dspark': the drafter is one of 'dflash'"):
        load(target, tmp_path / "d", method="dspark")
    with pytest.raises(ConfigError, match="model='x': method 'ngram' takes no drafter of its own"):
        load(target, "x", method="ngram")
    with pytest.raises(ModelNotFoundError, match="not a folder"):
        load(target, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="must name a drafter's folder, as none for method 'dspark' is bundled"):
        LLM(str(target), speculative_config={"method": "dspark"}, **POOLS)


def test_targets_without_residual_streams_are_refused(tmp_path):
    hashing = save_hash(tmp_path / "hash", HashConfig(vocab_size=300, mixers=("full",)))
    write_drafter(tmp_path / "d", DFLASH)
    with pytest.raises(ConfigError, match="method='dflash': needs an Inkling model"):
        load(hashing, tmp_path / "d")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"'layers\.1\.mlp\.up_proj\.weight' is missing"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), r"'extra\.weight' is unknown"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 32)}), r"shape \[32, 32\], expected \[32, 64\]"),
        (lambda t: t.update({"norm.weight": torch.zeros(32).int()}), r"'norm\.weight' has dtype I32"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32)}), "is the same as"),
        (
            lambda t: t.update({"layers.0.mlp.gate_up_proj.weight": torch.zeros(80, 32)}),
            r"holds 'layers\.0\.mlp\.gate_proj\.weight', which .* holds too",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(target, tmp_path, edit, message):
    folder, _, _ = write_drafter(tmp_path, DFLASH)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(target, folder)


@pytest.mark.parametrize("temperatures", [[1.0], [1, 1, 1, 0], "hot", [1.0, 1.0, 1.0, float("inf")]])
def test_a_calibration_of_another_drafter_is_refused(target, tmp_path, temperatures):
    folder, _, _ = write_drafter(tmp_path, DSPARK)
    (folder / "calibration.json").write_text(json.dumps({"temperatures": temperatures}))
    with pytest.raises(CheckpointError, match="must be 4 numbers above 0"):
        load(target, folder, "dspark")


def test_a_mask_row_of_its_own_is_refused(target, tmp_path):
    folder, _, _ = write_drafter(tmp_path, DFLASH)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a mask row of its own"):
        load(target, folder)


def test_the_bundled_model_finds_the_drafter_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("samebit.engine.model_source._assets", lambda: tmp_path)
    assert bundled_drafter("nano", "dspark") is None
    (tmp_path / "nano-dspark").mkdir()
    assert bundled_drafter("nano", "dspark") == tmp_path / "nano-dspark"
    assert bundled_drafter("other", "dspark") is None


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_bundled_model_has_drafters_that_guess_right(method):
    llm = LLM("nano", speculative_config={"method": method}, **POOLS)
    prompt = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):"
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    assert llm.stats()["mean_acceptance_length"] > 1.5


def test_every_refusal_is_one_of_ours():
    with pytest.raises(SamebitError):
        parse_block_config({})


def test_what_is_wrong_with_a_drafter_names_its_folder(tmp_path):
    target = write_checkpoint(tmp_path / "target")
    with pytest.raises(CheckpointError, match=rf"^drafter {target}: architectures="):
        LLM(str(target), speculative_config={"method": "dflash", "model": str(target)})
    folder, _, _ = write_drafter(tmp_path / "drafter", DFLASH)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"^drafter {folder}: "):
        LLM(str(target), speculative_config={"method": "dflash", "model": str(folder)})
