"""Our logits are transformers' logits, for every spelling of a checkpoint and every cut of a sequence into steps."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch._subclasses import FakeTensorMode
from transformers import InklingForConditionalGeneration

import samebit
from tests.models import tiny
from tests.models.driver import Sequence, chunked_logits

# fp32 noise of two summation orders on logits of standard deviation 2; a wrong rule moves them by 0.01 or more.
TOLERANCE = 5e-5
NUM_TOKENS = 40
CUTS = {"whole": [], "chunks": [3, 1, 1, 7, 2, 16], "single": [1] * NUM_TOKENS}


def expected_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=tiny.VARIANTS)
def variant(request, tmp_path_factory):
    model = tiny.tiny_model(**tiny.VARIANTS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    tiny.save_published(model, folder)
    return model, folder


@pytest.mark.parametrize("cuts", CUTS)
def test_logits_are_those_of_transformers(variant, cuts, load):
    reference, folder = variant
    ids = tiny.token_ids(NUM_TOKENS)
    expected = expected_logits(reference, ids)
    assert expected.std() > 0.5
    actual = chunked_logits(load(folder), ids, CUTS[cuts])
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_greedy_tokens_are_those_of_transformers(variant, load):
    reference, folder = variant
    ids = tiny.token_ids(5, seed=2)
    model = load(folder)
    sequence = Sequence(model, 40)
    ours = [int(sequence.advance(ids)[-1].argmax())]
    while len(ours) < 30:
        ours.append(int(sequence.advance(ours[-1:])[-1].argmax()))
    theirs = list(ids)
    while len(theirs) < len(ids) + len(ours):
        theirs.append(int(expected_logits(reference, theirs)[-1].argmax()))
    assert ours == theirs[len(ids) :]
    assert len(set(ours)) > 3


def test_the_cut_into_steps_and_padding_change_no_bit(pristine, load):
    model = load(pristine)
    ids = tiny.token_ids(30)
    whole = chunked_logits(model, ids, [])

    @given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 3))
    def check(chunks, pad_tokens):
        assert torch.equal(chunked_logits(model, ids, chunks, pad_tokens), whole)

    check()


@pytest.mark.parametrize("spelling", tiny.SPELLINGS)
@pytest.mark.parametrize("shards", ["one_file", "sharded"])
def test_every_spelling_of_a_checkpoint_is_the_same_model(spelling, shards, mixed_model, pristine, tmp_path, load):
    options = {"max_shard_size": "20KB"} if shards == "sharded" else {}
    tiny.SPELLINGS[spelling](mixed_model, tmp_path, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shards == "one_file"
    ids = tiny.token_ids(12)
    model = load(tmp_path)
    assert torch.equal(chunked_logits(model, ids, []), chunked_logits(load(pristine), ids, []))
    assert model.num_parameters == load(pristine).num_parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_mean_their_exact_values(dtype, folder, load):
    def narrow(tensors):
        for name, tensor in tensors.items():
            # Mixed dtypes, as published: the router's bias and scale stay fp32, and so may a single projection.
            if "gate." not in name and "1.attn.wk" not in name:
                tensors[name] = tensor.to(dtype)

    def widen(tensors):
        for name in tensors:
            tensors[name] = tensors[name].float()

    ids = tiny.token_ids(20)
    tiny.edit_tensors(folder, narrow)
    half = chunked_logits(load(folder), ids, [])
    tiny.edit_tensors(folder, widen)
    assert torch.equal(half, chunked_logits(load(folder), ids, []))


def test_the_head_may_be_stored_without_padding_rows(folder, pristine, load):
    def cut(tensors):
        tensors["model.llm.unembed.weight"] = tensors["model.llm.unembed.weight"][:60]

    ids = tiny.token_ids(8)
    expected = chunked_logits(load(pristine), ids, [])
    assert expected.shape == (8, 60)
    tiny.edit_tensors(folder, cut)
    assert torch.equal(chunked_logits(load(folder), ids, []), expected)


def test_without_a_head_the_embedding_serves_as_one(folder, load):
    def tie(tensors):
        tensors["model.llm.unembed.weight"] = tensors["model.llm.embed.weight"].clone()

    ids = tiny.token_ids(8)
    tiny.edit_tensors(folder, tie)
    expected = chunked_logits(load(folder), ids, [])
    tiny.edit_tensors(folder, lambda tensors: tensors.pop("model.llm.unembed.weight"))
    assert torch.equal(chunked_logits(load(folder), ids, []), expected)


def test_every_tensor_moves_the_logits(pristine, folder, load):
    ids = tiny.token_ids(30)
    original = chunked_logits(load(pristine), ids, [])
    stored = load_file(pristine / "model.safetensors")
    names = [name for name in stored if name.startswith("model.llm.")]
    assert len(names) == 4 + 4 * 14 + 3 + 3 * 7
    for name in names:
        slope = torch.linspace(0.5, 1.5, stored[name].numel()).view_as(stored[name])
        save_file(stored | {name: stored[name] + slope}, folder / "model.safetensors")
        moved = (chunked_logits(load(folder), ids, []) - original).abs().max()
        assert moved > 100 * TOLERANCE, name


@pytest.mark.parametrize(
    "key",
    ["log_scaling_n_floor", "log_scaling_alpha", "num_experts_per_tok", "route_scale", "rms_norm_eps",
     "logits_mup_width_multiplier"],
)  # fmt: skip
def test_every_constant_moves_the_logits(key, pristine, folder, load):
    ids = tiny.token_ids(30)
    original = chunked_logits(load(pristine), ids, [])
    tiny.edit_config(folder, lambda config: config["text_config"].update({key: 2 * tiny.PUBLISHED[key]}))
    assert (chunked_logits(load(folder), ids, []) - original).abs().max() > 100 * TOLERANCE


def test_the_state_layout_names_groups_by_first_layer_and_three_streams_a_layer(variant, load):
    reference, folder = variant
    layout = load(folder).state_layout()
    text = reference.config.text_config
    kinds = list(dict.fromkeys(text.layer_types))
    windows = [text.sliding_window_size if kind == "hybrid_sliding" else None for kind in kinds]
    assert [group.window for group in layout.groups] == windows
    assert [len(group.layers) for group in layout.groups] == [text.layer_types.count(kind) for kind in kinds]
    assert len(layout.streams) == 3 * text.num_hidden_layers
    assert layout.kernel_size == text.conv_kernel_size


def without_data(value, mode):
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, tuple):
        return tuple(without_data(item, mode) for item in value)
    if isinstance(value, int):
        return value
    return replace(value, **{f.name: without_data(getattr(value, f.name), mode) for f in fields(value)})


def test_the_forward_needs_no_value_from_the_device(pristine, load):
    model = load(pristine)
    sequence = Sequence(model, 16)
    index = sequence.next_index(tiny.token_ids(7), pad_tokens=2)
    # Fake tensors have shapes and no data: a value read back or a shape that depends on data raises.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        index = without_data(index, mode)
        hidden = model.forward(index, sequence.pools.whole).final
        assert model.logits(hidden).shape == (9, 60)


def test_the_bundled_model_agrees_with_transformers_beyond_its_window(load):
    nano = Path(samebit.__file__).parent / "assets" / "nano"
    source = Path(__file__).read_text()
    ids = Tokenizer.from_file(str(nano / "tokenizer.json")).encode(source, add_special_tokens=False).ids[:300]
    reference, report = InklingForConditionalGeneration.from_pretrained(
        nano, dtype=torch.float32, output_loading_info=True
    )
    assert all("_tower." in name for name in report["missing_keys"])
    expected = expected_logits(reference.eval(), ids)
    actual = chunked_logits(load(nano), ids, [200, 1, 50])
    # Its logits are larger than the tiny models', and so is their noise.
    torch.testing.assert_close(actual, expected, atol=TOLERANCE * float(expected.std()), rtol=0)
    loss = torch.nn.functional.cross_entropy(actual[:-1], torch.tensor(ids[1:]))
    assert loss < 3.5
