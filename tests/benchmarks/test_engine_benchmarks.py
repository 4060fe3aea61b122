"""Benchmarks of ours: what they count, that they time nothing that is wrong, and that each runs to its end."""

import json

import pytest

from benchmarks import prefix_cache, speculation, startup
from benchmarks.driving import Answer, Answers, answer_all
from samebit import LLM, SamplingParams
from samebit.bench.datasets import Conversation, Turn
from tests.random_checkpoint import write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)


def make_llm(folder, seed=0, **settings):
    pools = {"num_pages": 64, "num_window_pages": 64, "num_checkpoints": 16, "page_size": 4, "checkpoint_interval": 4}
    return LLM(write_checkpoint(folder, seed=seed), num_threads=1, max_num_seqs=4, **pools, **settings)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return make_llm(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return make_llm(tmp_path_factory.mktemp("other"), seed=1)


def test_decoding_counts_what_came_when_all_answers_had_begun():
    early, late = Answer(token_s=[1.0, 2.0, 3.0, 4.0]), Answer(token_s=[2.0, 3.0, 3.0, 6.0])
    assert Answers([early, late], step_s=[1.0, 2.0, 3.0, 4.0, 6.0, 7.0]).decoding() == (5, 3, 4.0)


def test_answers_are_those_of_generate(llm):
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    found = answer_all(llm, prompts, GREEDY).answers
    expected = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    assert [answer.token_ids for answer in found] == [output.token_ids for output in expected]
    for answer, output in zip(found, expected, strict=True):
        told = [tops[token].logprob for tops, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert [float.fromhex(logprob) for logprob in answer.logprobs] == told
        assert len(answer.token_s) == len(answer.token_ids)


def test_speculation_is_not_timed_where_an_answer_differs(llm, other):
    with pytest.raises(SystemExit, match="mtp: guesses changed an answer"):
        speculation.compare({"none": llm, "mtp": other}, [[[5, 6, 7]]], GREEDY, rounds=1)
    same = speculation.compare({"none": llm, "mtp": llm}, [[[5, 6, 7]]], GREEDY, rounds=2)
    assert same["mtp"]["tokens"] == same["none"]["tokens"] == 6
    assert same["mtp"]["tokens_per_draw"] == 1.0


def talk_between(on, off):
    turns = tuple(Turn("one two three", 6, 4) for _ in range(3))
    return prefix_cache.talk(
        {"on": on, "off": off}, Conversation(turns, system="four five six seven", num_system_tokens=8)
    )


def test_the_prefix_cache_is_not_timed_where_it_changes_bits_or_is_not_off(llm, other, tmp_path):
    off = make_llm(tmp_path, enable_prefix_caching=False)
    found = talk_between(llm, off)
    assert [bool(turn.cached_tokens) for turn in found] == [False, True, True]
    assert prefix_cache.summary([found])["hits"] == 2
    with pytest.raises(SystemExit, match="other bits with the cache"):
        talk_between(other, off)
    with pytest.raises(SystemExit, match=r"turn 0 .* from the cache"):
        talk_between(llm, off)
    with pytest.raises(SystemExit, match="found nothing in the cache"):
        prefix_cache.summary([talk_between(off, off)])


def test_each_benchmark_runs_to_its_end_and_stores_a_record(tmp_path):
    output = tmp_path / "record.json"
    speculation.main(["--smoke", "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["code, batch 2, temperature 0"].keys() == {"none", *speculation.METHODS}
    prefix_cache.main(["nano", "--smoke", "--output", str(output)])
    assert json.loads(output.read_text())["hits"] == 2
    startup.main(["nano", "--cold", "0", "--warm", "1", "--output", str(output)])
    record = json.loads(output.read_text())
    assert record["warm"]["first_token_s"] >= record["warm"]["phases"]["engine"] > 0
