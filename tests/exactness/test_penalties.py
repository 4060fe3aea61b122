"""Bias and penalties look back on a request's own tokens: they change its answer, and nothing around it changes that."""

from __future__ import annotations

import pytest

from samebit.core.config import Schedule, SpeculativeConfig
from tests.driving import make_request, run

RULES = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "frequency wanted": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 3.0},
    "bias": {"logit_bias": {3: 2.0, 7: -100.0, 9: 1.0}},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.4,
        "logit_bias": {3: 1.0, 250: -1.0},
        "min_tokens": 4,
        "stop_token_ids": [3, 5],
    },
}
PROMPT = [17, 4, 17, 4, 9, 17, 4, 17, 4, 9, 17, 4, 17]


def requests_with_rules(**settings):
    return [
        make_request(f"{name} {seed}", PROMPT, seed=seed, max_tokens=20, **settings, **rules)
        for name, rules in RULES.items()
        for seed in range(2)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("speculation", [None, "ngram", "mtp", "dflash"])
def test_rules_change_an_answer_and_nothing_around_the_request_does(
    make_engine, drafters, cold, temperature, speculation
):
    who = {"method": speculation, "model": drafters.get(speculation), "prompt_lookup_min": 1, "token_cost": 0.0}
    engine = make_engine(
        schedule=Schedule(chunk_sizes=(5, 2), preempt_percent=10, shuffle_rows=True, pad_rows=1),
        max_num_batched_tokens=40,
        speculative_config=SpeculativeConfig(**who) if speculation else None,
    )
    drawing = {"temperature": temperature, "top_k": 4}
    requests = requests_with_rules(**drawing)
    for _ in range(2):  # the second time the cache is warm
        results = run(engine, requests)
        for request in requests:
            assert results[request.request_id] == cold(request), request.request_id
    plain = [cold(make_request("plain", PROMPT, seed=seed, max_tokens=20, **drawing)).token_ids for seed in range(2)]
    for name in RULES:
        assert [results[f"{name} {seed}"].token_ids for seed in range(2)] != plain, name
    if speculation == "ngram":
        assert engine.scheduler.counters.num_accepted_tokens > 0, "guesses are accepted under rules"


def test_presence_and_frequency_look_at_the_answer_and_repetition_at_the_prompt_too(cold):
    first = {"max_tokens": 1, "temperature": 0.0}
    prompts = [list(range(shift, shift + 90)) for shift in range(0, 160, 10)]
    drawn = [(prompt, cold(make_request("a", prompt, **first)).token_ids[0]) for prompt in prompts]
    mentioned = [(prompt, token) for prompt, token in drawn if token in prompt]
    assert mentioned
    for prompt, token in mentioned:
        for rule in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
            assert cold(make_request("b", prompt, **first, **rule)).token_ids == [token]
        assert cold(make_request("c", prompt, **first, repetition_penalty=100.0)).token_ids != [token]


def test_a_bias_of_a_hundred_decides(cold):
    forced = cold(make_request("a", PROMPT, logit_bias={42: 100.0}, seed=3, temperature=1.0, max_tokens=6))
    assert forced.token_ids == [42] * 6
    plain = cold(make_request("b", PROMPT, seed=3, temperature=1.0, max_tokens=1))
    assert forced.prompt_logprobs == plain.prompt_logprobs
    # Logprobs are of the raw logits: the alternatives of the first token are the same, whatever the bias.
    assert forced.logprobs[0][3:] == plain.logprobs[0][3:]


def test_logprobs_do_not_know_of_rules(cold):
    """The tokens that rules led to, scored as a prompt without any, have the same logprobs."""
    ruled = cold(make_request("a", PROMPT, temperature=0.9, max_tokens=10, **RULES["all"]))
    whole = [*PROMPT, *ruled.token_ids]
    scored = cold(make_request("b", whole, prompt_logprobs=3, max_tokens=1)).prompt_logprobs
    assert scored[-len(ruled.token_ids) :] == ruled.logprobs


def test_rules_hold_in_recorded_steps(make_engine, cold):
    engine = make_engine(graph="trace", schedule=Schedule(pad_tokens=1, pad_rows=2))
    requests = requests_with_rules(temperature=0.9)
    results = run(engine, requests)
    assert all(results[request.request_id] == cold(request) for request in requests)
