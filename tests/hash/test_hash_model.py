"""The hash model is the one that its formulas describe, and every word of its state matters."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.audit.replay import DifferenceError, Drain, Step
from samebit.core.config import EngineConfig
from samebit.core.errors import CheckpointError
from samebit.engine.sizing import size_pools
from samebit.kernels.selection import torch_kernels
from samebit.models.base import load_model
from samebit.models.hash import HashConfig, HashModel, save_hash, state_layout
from samebit.state.pools import StatePools
from tests.hash.cold import greedy
from tests.hash.fuzzer import LAYOUTS, SHARED, VOCAB, World
from tests.hash.oracle import cold_model

CPU, META = torch.device("cpu"), torch.device("meta")
POOLS = {"max_num_seqs": 2, "num_checkpoints": 4, "num_pages": 20, "num_window_pages": 20, "checkpoint_interval": 8}
LENGTH = 17


@settings(max_examples=25)
@given(
    layout=st.sampled_from(LAYOUTS),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=32),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_prompt_gets_the_answer_of_the_interpreter(kernel_kind, layout, prompt, temperature):
    world = World(*layout, **POOLS, kernels=kernel_kind)
    params = {"max_tokens": 8, "temperature": temperature, "logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True}
    (name,) = world.add(prompt, params=params, seed=4)
    world.do(Drain())
    assert len(world.player.answers[name].token_ids) == 8


def live_words(world: World) -> list[tuple[torch.Tensor, int]]:
    """Every word of State(LENGTH) of the running sequence, as (flat tensor, place): what the next token may depend on."""
    pools, geometry = world.engine.pools, world.engine.pools.geometry
    (sequence,) = world.engine.scheduler._running
    state = sequence.state
    assert state.length == LENGTH
    words = []
    for conv in pools.conv:
        ring = [geometry.ring_base(state.slot) + p % geometry.ring_length for p in range(LENGTH)]
        words += [(conv.rows.view(-1), place) for place in ring[LENGTH - geometry.layout.history :]]
    for group, held, layers in zip(geometry.layout.groups, state.groups, pools.kv, strict=True):
        for layer in layers:
            for position in range(group.first_position(LENGTH), LENGTH):
                place = held.pages[position // 4] * 4 + position % 4
                words += [(tensor.view(-1), place) for tensor in (layer.k, layer.v)]
    return words


def world_at_length(layout) -> World:
    world = World(*layout, **POOLS, enable_prefix_caching=False)
    world.add(SHARED[:LENGTH], params={"max_tokens": 4, "temperature": 0.0, "logprobs": 1})
    world.do(Step(1))
    return world


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_word_of_a_state_changes_the_next_token(layout):
    rng = random.Random(0)
    for number in range(len(live_words(world_at_length(layout)))):
        world = world_at_length(layout)
        words, place = live_words(world)[number]
        words[place] ^= 1 << rng.randrange(63)
        with pytest.raises(DifferenceError, match=r"token_ids\[[123]\]|logprobs\[1\]"):
            world.do(Drain())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_other_word_changes_an_answer(layout):
    world = world_at_length(layout)
    live = live_words(world)
    kept = [int(words[place]) for words, place in live]
    pools = world.engine.pools
    for tensor in (*(c.rows for c in pools.conv), *(t for g in pools.kv for p in g for t in (p.k, p.v))):
        tensor.bitwise_xor_(0x5A5A5A5A5A5A5A)
    for (words, place), word in zip(live, kept, strict=True):
        words[place] = word
    world.do(Drain())


def test_every_bit_of_the_final_word_changes_the_ranking():
    model = HashModel(HashConfig(mixers=("full",)), CPU)
    words = torch.tensor([random.Random(n).getrandbits(63) for n in range(40)])[:, None]
    before = model.logits(words)
    assert before.dtype == torch.float32
    for bit in range(64):
        after = model.logits(words ^ (1 << bit if bit < 63 else -(1 << 63)))
        moved = after.argsort(stable=True) != before.argsort(stable=True)
        assert moved.any(dim=1).all(), bit
        assert (after.argmax(dim=1) != before.argmax(dim=1)).sum() > 30, bit


def test_logits_are_exact_and_in_range():
    model, cold = HashModel(HashConfig(mixers=("full",)), CPU), cold_model(HashConfig(mixers=("full",)))
    for word in (0, 1, 2**63 - 1):
        cold.word = word
        logits = model.logits(torch.tensor([[word]]))[0].tolist()
        assert logits == cold.logits()
        assert all(0 <= logit < 16 for logit in logits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_needs_no_value_on_the_host(layout, monkeypatch):
    """On a device without values, whatever reads one or has a shape that depends on one is an error."""
    seen, forward = [], HashModel.forward
    monkeypatch.setattr(
        HashModel, "forward", lambda self, index, pools: [seen.append(index), forward(self, index, pools)][1]
    )
    world = World(*layout, **POOLS, schedule={"pad_rows": 2, "pad_tokens": 3})
    for first in range(2):
        world.add(SHARED[first : first + 9], params={"max_tokens": 2, "temperature": 0.0})
    world.do(Step(1))
    model, pools = HashModel(world.config, META), StatePools(world.engine.pools.geometry, META)
    hidden = forward(model, without_values(seen[0]), pools.whole).final
    assert hidden.shape == (21, 1)
    assert model.logits(hidden).shape == (21, VOCAB)


def without_values(value):
    """A nest of tuples and dataclasses with its tensors on the device that has none."""
    if isinstance(value, torch.Tensor):
        return value.to(META)
    if isinstance(value, tuple):
        return tuple(without_values(item) for item in value)
    if isinstance(value, int):
        return value
    return replace(value, **{f.name: without_values(getattr(value, f.name)) for f in fields(value)})


def test_integer_pools_hold_the_configured_bytes_and_poison():
    world = World(["conv", 6, "full"], 4, **POOLS)
    pools = world.engine.pools
    assert pools.geometry.layout.element_bytes == 8
    assert {t.dtype for t in (pools.conv[0].rows, pools.kv[0][0].k, pools.kv[1][0].v)} == {torch.int64}
    assert int(pools.conv[0].rows[0, 0]) == 0
    assert len(set(pools.conv[0].rows[1:, 0].tolist())) == 1
    assert int(pools.conv[0].rows[1, 0]) != 0
    assert world.engine.info.memory["parameters"] == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mixers": ["conv"]}, "mixers"),
        ({"mixers": ["conv", 0]}, "a window of 0"),
        ({"mixers": ["slide"]}, "slide"),
        ({"kernel_size": 1}, "kernel_size=1"),
        ({"vocab_size": 1}, "vocab_size=1"),
        ({"max_length": "far"}, "max_length"),
        ({"heads": 2}, "heads"),
    ],
)
def test_a_wrong_configuration_is_named(tmp_path, change, named):
    save_hash(tmp_path, HashConfig(mixers=("full",)))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=named):
        load_model(tmp_path, torch_kernels(1), CPU)


def test_the_offline_interface_serves_it_like_any_model(tmp_path):
    from samebit import LLM, SamplingParams

    config = HashConfig(mixers=("conv", 6, "full"))
    llm = LLM(str(save_hash(tmp_path, config)), num_threads=1, max_model_len=64, max_num_seqs=2, cache_bytes=1 << 20)
    (output,) = llm.generate("one wrong word", SamplingParams(temperature=0.0, max_tokens=6))
    assert output.outputs[0].token_ids == greedy(cold_model(config), list(b"one wrong word"), 6)


def test_a_budget_holds_half_as_many_integers_as_floats():
    layout = state_layout(HashConfig(mixers=("conv", 6, "full")))
    config = EngineConfig(cache_bytes=40_000, max_num_seqs=4, page_size=4, checkpoint_interval=8)
    integers, _ = size_pools(config, layout, 400)
    floats, _ = size_pools(config, msgspec.structs.replace(layout, element="float32"), 400)
    assert floats.num_snapshots // 2 == integers.num_snapshots > 4
    # What a checkpoint too few leaves makes a page or two.
    assert 0 <= integers.num_pages[1] - floats.num_pages[1] // 2 <= 2
    assert integers.num_pages[1] > 4


def test_a_vocabulary_beyond_bytes_is_control_tokens(tmp_path):
    from samebit.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(save_hash(tmp_path, HashConfig(mixers=("full",), vocab_size=300)))
    assert tokenizer.vocab_size == 300
    assert tokenizer.special_ids == set(range(256, 300))
    assert tokenizer.encode("é", allow_special=False) == [0xC3, 0xA9]
