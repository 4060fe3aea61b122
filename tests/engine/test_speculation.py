"""Speculation as a caller sees it: the same answers, other counts."""

import msgspec
import pytest

from samebit import LLM, SamplingParams
from samebit.core.config import SpeculativeConfig
from samebit.engine.batch_file import read_lines, run_lines

POOLS = {"num_pages": 64, "num_window_pages": 64, "num_checkpoints": 8, "max_num_seqs": 8, "num_threads": 1}
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, logprobs=2, n=2)


@pytest.fixture(scope="module")
def plain():
    return LLM("nano", **POOLS)


@pytest.fixture(scope="module")
def guessing():
    return LLM("nano", speculative_config={"method": "ngram", "num_speculative_tokens": 4}, **POOLS)


def ask(llm, params):
    return llm.generate([PROMPT], params, cache_salt=str(id(params)))[0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_guesses_change_nothing_in_an_answer(plain, guessing, params):
    assert ask(plain, params).outputs == ask(guessing, params).outputs


def test_the_settings_may_be_a_struct(plain):
    llm = LLM("nano", speculative_config=SpeculativeConfig(method="ngram"), **POOLS)
    assert ask(plain, GREEDY).outputs == ask(llm, GREEDY).outputs
    assert llm.stats()["num_draft_tokens"] > 0


def test_a_request_without_guesses_has_the_same_answer_and_none_are_made(guessing):
    before = guessing.stats()["num_draft_tokens"]
    without = ask(guessing, msgspec.structs.replace(GREEDY, speculation=False))
    assert guessing.stats()["num_draft_tokens"] == before
    assert without.outputs == ask(guessing, GREEDY).outputs
    assert guessing.stats()["num_draft_tokens"] > before


def test_a_line_of_a_batch_file_can_go_without_guesses(guessing, tmp_path):
    counts = []
    for line in ('{"prompt": "a = [1, 1, 1, 1, 1, 1,", "speculation": false}', '{"prompt": "a = [1, 1, 1, 1, 1, 1,"}'):
        path = tmp_path / "lines.jsonl"
        path.write_text(line)
        before = guessing.stats()["num_draft_tokens"]
        run_lines(guessing, read_lines(path), {"temperature": 0.0}, show_progress=False)
        counts.append(guessing.stats()["num_draft_tokens"] - before)
    assert counts[0] == 0 < counts[1]
