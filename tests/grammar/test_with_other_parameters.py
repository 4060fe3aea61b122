"""What other sampling parameters do to an answer that is held to a grammar."""

import pytest

from samebit.core.config import EngineConfig, Schedule
from samebit.core.request import Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.engine import Engine
from samebit.grammar.grammars import Grammars
from samebit.grammar.vocabulary import Vocabulary
from tests.driving import run

EOS = 6


@pytest.fixture(scope="module")
def engine():
    sizes = {"num_pages": 200, "num_window_pages": 200, "num_checkpoints": 32, "max_num_seqs": 8, "num_threads": 1}
    return Engine(EngineConfig(model="nano", **sizes))


@pytest.fixture(scope="module")
def answer(engine):
    numbers = iter(range(1000))

    def answer(prompt="It is ", seed=1, wanted=None, **params):
        structured = None if wanted is None else StructuredOutputsParams(**wanted)
        settings = {"max_tokens": 40, "logprobs": 3, "structured_outputs": structured, **params}
        request = Request(
            request_id=str(next(numbers)),
            prompt_token_ids=engine.tokenizer.encode(prompt, allow_special=True) if isinstance(prompt, str) else prompt,
            params=SamplingParams(**settings),
            seed=seed,
            eos_token_ids=(EOS,),
        )
        return run(engine, [request])[request.request_id]

    return answer


def test_an_answer_ends_with_the_end_token_which_is_no_text_and_no_reason_of_the_callers(answer):
    result = answer(wanted={"choice": ["yes", "no"]})
    assert (result.text in ("yes", "no"), result.finish_reason, result.stop_reason) == (True, "stop", None)
    assert result.token_ids[-1] == EOS


def test_an_answer_that_is_cut_off_says_so(answer):
    result = answer(wanted={"regex": "[a-z]{50}"}, max_tokens=5)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 5)


@pytest.mark.parametrize("params", [{"min_tokens": 12}, {"ignore_eos": True}])
def test_an_answer_goes_on_while_the_grammar_allows_more_and_ends_where_it_does_not(answer, params):
    short = [answer(wanted={"regex": "a{1,20}"}, seed=seed, logit_bias={EOS: 100.0}) for seed in range(3)]
    assert all(len(result.text) < 5 for result in short), "the end is wanted"
    longer = answer(wanted={"regex": "a{1,20}"}, logit_bias={EOS: 100.0}, **params)
    assert longer.finish_reason == "stop"
    assert len(longer.text) == 20 or ("min_tokens" in params and len(longer.text) == params["min_tokens"])
    assert answer(wanted={"choice": ["yes"]}, **params).text == "yes"


def test_a_stop_token_of_the_callers_is_not_drawn_early_unless_there_is_nothing_else(engine, answer):
    (a,) = engine.tokenizer.encode("a", allow_special=False)
    stop = {"stop_token_ids": [a], "min_tokens": 4}
    either = answer(wanted={"regex": "[ab]{12}"}, logit_bias={a: 100.0}, **stop)
    assert a not in either.token_ids[:4]
    assert (either.finish_reason, either.stop_reason) == ("stop", a)
    forced = answer(wanted={"regex": "a"}, **stop)
    assert (forced.text, forced.token_ids, forced.finish_reason) == ("a", [a, EOS], "stop")


def test_a_stop_string_ends_an_answer_that_is_not_complete(answer):
    result = answer(wanted={"choice": ["left and right"]}, stop="and")
    assert (result.text, result.stop_reason) == ("left ", "and")


def test_a_bias_frees_nothing_and_chooses_among_what_is_allowed(engine, answer):
    (a,) = engine.tokenizer.encode("a", allow_special=False)
    (x,) = engine.tokenizer.encode("x", allow_special=False)
    for seed in range(3):
        result = answer(wanted={"regex": "[ab]c"}, logit_bias={a: 100.0, x: 100.0}, seed=seed)
        assert result.text == "ac"


def test_penalties_work_on_what_is_allowed(answer):
    plain = answer(wanted={"regex": "(a|b|c|d){24}"}, temperature=0.0)
    varied = answer(wanted={"regex": "(a|b|c|d){24}"}, temperature=0.0, frequency_penalty=2.0)
    assert plain.finish_reason == varied.finish_reason == "stop"
    assert len(set(varied.token_ids)) > len(set(plain.token_ids))


def test_logprobs_are_of_the_models_own_logits(engine, answer):
    free = answer(temperature=0.0, max_tokens=1)
    held = answer(temperature=0.0, max_tokens=1, wanted={"choice": ["zebra"]})
    assert held.logprobs[0][3:] == free.logprobs[0][3:]
    assert held.token_ids != free.token_ids
    whole = answer(wanted={"choice": ["zebra crossing"]})
    prompt = [*engine.tokenizer.encode("It is ", allow_special=True), *whole.token_ids]
    scored = answer(prompt=prompt, max_tokens=1, prompt_logprobs=3)
    assert whole.logprobs == scored.prompt_logprobs[-len(whole.logprobs) :]


def test_a_grammar_of_one_text_is_written_as_the_tokenizer_would(engine, answer):
    text = '{"name": "Greta", "age": 12}'
    result = answer(wanted={"choice": [text]}, temperature=3.0)
    assert result.token_ids[:-1] == engine.tokenizer.encode(text, allow_special=False)


def test_a_request_that_can_go_on_with_no_token_ends_with_an_error_of_its_own(engine):
    tokenizer = engine.tokenizer
    # A vocabulary that can spell an "a" and no "b".
    (a,) = tokenizer.encode("a", allow_special=False)
    poor = Vocabulary(tokenizer.vocab_size, lambda i: b"a" if i == a else b"", {}, lambda _: [])
    before, engine.scheduler._grammar = engine.scheduler._grammar, Grammars(poor).matcher
    try:
        prompt = tokenizer.encode("It is ", allow_special=False)
        stuck = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab][bc]"), logprobs=1)
        free = SamplingParams(max_tokens=6, logprobs=1)
        found = [
            Request(request_id=name, prompt_token_ids=prompt, params=params, seed=1)
            for name, params in (("free", free), ("stuck", stuck), ("also free", free))
        ]
        results = run(engine, found)
    finally:
        engine.scheduler._grammar = before
    assert (results["stuck"].finish_reason, results["stuck"].text) == ("error", "a")
    assert results["stuck"].error == "the grammar cannot be followed: no token is allowed"
    assert results["free"] == results["also free"]
    assert results["free"].finish_reason == "length"


def test_hits_and_preemption_leave_every_bit(engine):
    sizes = {"num_pages": 200, "num_window_pages": 200, "num_checkpoints": 32, "max_num_seqs": 8, "num_threads": 1}
    disturbed = Engine(EngineConfig(model="nano", schedule=Schedule(preempt_percent=30, chunk_sizes=(5,)), **sizes))
    prompt = engine.tokenizer.encode("A list of things, and of other things: " * 4, allow_special=False)
    wanted = StructuredOutputsParams(regex="([a-z]{1,8}, ){3,6}end")
    found = [
        Request(
            request_id=str(seed),
            prompt_token_ids=prompt,
            params=SamplingParams(structured_outputs=wanted, max_tokens=60, logprobs=2),
            seed=seed,
            eos_token_ids=(EOS,),
        )
        for seed in range(4)
    ]
    alone = {request.request_id: run(engine, [request])[request.request_id] for request in found}
    for _ in range(2):
        results = run(disturbed, found)
        assert results == alone
    assert all(result.num_cached_tokens > 0 for result in results.values())
    assert sum(result.num_preemptions for result in results.values()) > 0
