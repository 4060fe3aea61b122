"""Speculation as a caller sees it: the same answers, other counts."""

import msgspec
import pytest

from samebit import LLM, SamplingParams
from samebit.core.config import SpeculativeConfig
from samebit.core.request import Request, SpeculationCounts, TokenLogprobs
from samebit.engine.batch_file import read_lines, run_lines
from samebit.engine.output import OutputProcessor
from samebit.scheduler.sequence import Progress

POOLS = {"num_pages": 64, "num_window_pages": 64, "num_checkpoints": 8, "max_num_seqs": 8, "num_threads": 1}
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return"
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


def test_a_request_tells_how_its_guesses_fared(guessing):
    before = guessing.stats()
    output = ask(guessing, SAMPLED)
    counts, after = output.metrics.speculation, guessing.stats()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert counts.num_drafts == gained["num_drafts"] > 0
    assert counts.num_draft_tokens == gained["num_draft_tokens"] <= 4 * counts.num_drafts
    assert counts.num_accepted_tokens == gained["num_accepted_tokens"] > 0
    for position, count in enumerate(counts.accepted_per_position):
        assert count == gained[f"num_accepted_tokens_at_{position}"]
    assert list(counts.accepted_per_position) == sorted(counts.accepted_per_position, reverse=True)
    assert counts.mean_acceptance_length == 1 + counts.num_accepted_tokens / counts.num_drafts
    # Every step that a guess did not save drew a token.
    assert sum(len(sample.token_ids) for sample in output.outputs) > counts.num_accepted_tokens


def test_guesses_behind_a_stop_string_are_no_part_of_the_answer(plain):
    outputs = OutputProcessor(plain.get_tokenizer())
    params = SamplingParams(stop="b", max_tokens=9)
    outputs.open(Request(request_id="r", prompt_token_ids=[1], params=params, seed=0))
    tokens = [
        TokenLogprobs(plain.get_tokenizer().encode(text, allow_special=False)[0], 0.0, 1, [], []) for text in "abcd"
    ]
    # Three guesses were accepted, and the second one ends the answer.
    gained = outputs.process(Progress(request_id="r", tokens=tokens, speculation=SpeculationCounts(1, 5, (1, 1, 1))))
    assert (len(gained.token_ids), gained.finish_reason) == (2, "stop")
    assert gained.speculation == SpeculationCounts(1, 5, (1, 1))


def test_nobody_counts_guesses_where_none_are_made(plain):
    counts = ask(plain, GREEDY).metrics.speculation
    assert (counts.num_drafts, counts.num_draft_tokens, counts.mean_acceptance_length) == (0, 0, 0)


def test_a_line_of_a_batch_file_can_go_without_guesses(guessing, tmp_path):
    counts = []
    for line in ('{"prompt": "a = [1, 1, 1, 1, 1, 1,", "speculation": false}', '{"prompt": "a = [1, 1, 1, 1, 1, 1,"}'):
        path = tmp_path / "lines.jsonl"
        path.write_text(line)
        before = guessing.stats()["num_draft_tokens"]
        run_lines(guessing, read_lines(path), {"temperature": 0.0}, show_progress=False)
        counts.append(guessing.stats()["num_draft_tokens"] - before)
    assert counts[0] == 0 < counts[1]
