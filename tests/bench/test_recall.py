"""The forgetful-agent table: its problems, its exactness, and that a cache without its state would show."""

import random

import pytest

from benchmarks.recall import NeverWritten
from samebit import LLM
from samebit.bench.recall import NUM_TURNS, PAGE_SIZE, SETTINGS, make_problems, run_arm, table
from samebit.core.errors import InvalidRequestError
from samebit.dialogues import Fact, Spoken


def make_llm(**settings):
    return LLM("nano", **SETTINGS, num_pages=800, num_window_pages=1500, num_checkpoints=150, num_threads=1, **settings)


@pytest.fixture(scope="module")
def llm():
    return make_llm()


@pytest.fixture(scope="module")
def problems(llm):
    return make_problems(llm, 2)


def test_problems_are_seeded_long_and_ask_for_what_was_said(llm, problems):
    assert [p.prompts for p in make_problems(llm, 2)] == [p.prompts for p in problems]
    for problem in problems:
        assert len(problem.prompts) == NUM_TURNS
        told = llm.get_tokenizer().decode(problem.prompts[-1])
        assert all(value is None or f" {value}" in told for value in problem.values)
        for shorter, longer in zip(problem.prompts, problem.prompts[1:], strict=False):
            assert longer[: len(shorter)] == shorter


@pytest.mark.parametrize("seed", range(20))
def test_a_value_can_be_put_right_behind_the_boundary_that_the_next_request_resumes_from(llm, seed):
    tokenizer, fact = llm.get_tokenizer(), Fact("access code of the amber anchor", "7341")
    spoken = Spoken(tokenizer, PAGE_SIZE)
    turn = spoken.statement(random.Random(seed), fact, behind_boundary=True)
    prompt = spoken.ask(turn)
    tail = prompt[(len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE :]
    assert any(tokenizer.decode(tail[skipped:]).startswith(" 7341") for skipped in range(3))


def test_the_cache_changes_no_answer_and_a_cache_without_its_state_does(llm, problems):
    on = run_arm(llm, problems, "cache on")
    off = run_arm(make_llm(enable_prefix_caching=False), problems, "cache off")
    assert on.transcripts == off.transcripts
    assert on.num_hits > 0.9 * on.num_turns
    assert off.num_hits == 0
    assert on.percent_right > 90
    broken = make_llm()
    broken._engine._runner = NeverWritten(broken)
    assert run_arm(broken, problems, "never written").num_changed(on) > 0
    assert "| cache off | " in table([on, off])


def test_a_model_that_does_not_speak_the_format_is_refused(tmp_path):
    from tests.random_checkpoint import write_checkpoint

    other = LLM(write_checkpoint(tmp_path), num_threads=1, num_pages=64, num_window_pages=64, num_checkpoints=4)
    with pytest.raises(InvalidRequestError, match="does not speak this message format"):
        make_problems(other, 1)
