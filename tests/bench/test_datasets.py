"""The same seed asks the same, byte for byte; lengths are those that were asked for."""

import random
import sysconfig
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.bench.api import Api, Call
from samebit.bench.datasets import DATASETS, Workload, conversations
from samebit.bench.http import HttpClient
from samebit.bench.texts import code, counted, estimated, take, words
from samebit.core.errors import ConfigError
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer

SMALL = Workload(
    num_prompts=6,
    random_input_len=40,
    random_range_ratio=0.5,
    multi_turn_num_turns=3,
    multi_turn_system_len=30,
    multi_turn_input_len=10,
    prefix_repetition_prefix_len=30,
    prefix_repetition_suffix_len=10,
    prefix_repetition_num_prefixes=2,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model("nano"))


def workload(name, **fields):
    return msgspec.structs.replace(SMALL, dataset_name=name, **fields)


def bodies(name, backend="openai", run=0, **fields):
    api = Api(HttpClient("http://x"), "m", backend=backend)
    return [
        api.body(Call(one.system, (turn.text,), turn.max_tokens))
        for one in conversations(workload(name, **fields), estimated(), run)
        for turn in one.turns
    ]


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
@given(seed=st.integers(0, 2**63))
def test_the_same_seed_gives_the_same_requests_byte_for_byte(name, backend, seed):
    first = bodies(name, backend, seed=seed)
    assert first == bodies(name, backend, seed=seed)
    assert set(first).isdisjoint(bodies(name, backend, seed=seed + 1))


def test_the_requests_of_a_seed_are_those_of_every_version():
    """Records can be compared only while this holds: a change here is one that users are told of."""
    (first,) = bodies("random", num_prompts=1, random_input_len=6, random_range_ratio=0.0)
    assert first == (
        b'{"model":"m","stream":true,"stream_options":{"include_usage":true},"temperature":0.0,"prompt":"age year horse river hand list","max_tokens":128}'
    )


@pytest.mark.parametrize("name", DATASETS)
def test_every_run_of_a_sweep_says_something_else(name):
    assert set(bodies(name)).isdisjoint(bodies(name, run=1))


@pytest.mark.parametrize("name", DATASETS)
def test_more_prompts_do_not_change_the_first(name):
    assert bodies(name, num_prompts=9)[: len(bodies(name))] == bodies(name)


@given(ratio=st.floats(0.0, 0.99), length=st.integers(1, 300), seed=st.integers(0, 99))
def test_lengths_stay_in_their_range(ratio, length, seed):
    found = conversations(workload("random", random_input_len=length, random_range_ratio=ratio, seed=seed), estimated())
    low, high = max(1, round(length * (1 - ratio))), max(1, round(length * (1 + ratio)))
    for one in found:
        assert low <= one.turns[0].num_tokens <= high
        assert len(one.turns[0].text.split()) == one.turns[0].num_tokens


def test_a_ratio_spreads_lengths_and_none_does_not():
    def lengths(ratio):
        found = conversations(workload("random", num_prompts=50, random_range_ratio=ratio), estimated())
        return {one.turns[0].num_tokens for one in found}

    assert lengths(0.0) == {40}
    assert len(lengths(0.5)) > 10


@pytest.mark.parametrize("pieces", [words, code])
def test_texts_have_the_tokens_that_are_asked_for(tokenizer, pieces):
    lengths = [
        len(tokenizer.encode(take(pieces(random.Random(n)), 500, counted(tokenizer)), allow_special=False))
        for n in range(5)
    ]
    assert lengths == pytest.approx([500] * 5, rel=0.03)


@given(length=st.integers(1, 400), seed=st.integers(0, 99), scale=st.floats(0.25, 4))
def test_a_text_is_as_long_as_whole_pieces_allow(length, seed, scale):
    cost = estimated(scale)
    text = take(words(random.Random(seed)), length, cost)
    total = sum(cost(" " + word) for word in text.split())
    assert abs(total - length) <= scale or len(text.split()) == 1


def test_prefixes_are_shared_in_groups_and_suffixes_by_nobody():
    texts = [one.turns[0].text.split("\n") for one in conversations(workload("prefix_repetition"), estimated())]
    assert [text[0] == texts[0][0] for text in texts] == [True, False] * 3
    assert texts[1][0] == texts[3][0] == texts[5][0]
    assert len({text[1] for text in texts}) == 6


def test_conversations_share_their_system_prompt_and_nothing_else():
    found = conversations(workload("multi_turn"), estimated())
    assert len({one.system for one in found}) == 1
    assert len(found[0].system.split()) == 30
    assert len({turn.text for one in found for turn in one.turns}) == 18
    assert found[0].num_tokens == 30 + 2 * (10 + 64) + 10


def test_code_is_that_of_the_standard_library():
    library = "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    )
    found = conversations(workload("code", random_range_ratio=0.0), estimated())
    assert all(one.turns[0].text in library for one in found)
    assert len({one.turns[0].text for one in found}) == 6


def test_code_goes_on_behind_the_end_of_a_module():
    assert len(take(code(random.Random(0)), 300_000, estimated())) > 300_000


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dataset_name": "sharegpt"}, "dataset_name='sharegpt': must be one of random, prefix_repetition"),
        ({"random_range_ratio": 1.0}, "random_range_ratio=1.0"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"random_output_len": -1}, "random_output_len=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_what_is_out_of_range_is_named(fields, text):
    with pytest.raises(ConfigError, match=text):
        Workload(**fields).validate()
