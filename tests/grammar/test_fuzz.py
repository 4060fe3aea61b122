"""Random schemas under every drafter: finished answers are valid, and what guesses has no part in them."""

import json
import random

import jsonschema
import pytest

from samebit.core.config import EngineConfig, Schedule, SpeculativeConfig
from samebit.core.request import Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.chat_template import load_chat_template
from samebit.engine.engine import Engine
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from tests.driving import run, run_alone
from tests.grammar.schemas import schema_of
from tests.speculative.fitted_drafters import fitted_drafters

POOLS = {"num_pages": 600, "num_window_pages": 600, "num_checkpoints": 64, "max_num_seqs": 16, "num_threads": 1}
MAX_TOKENS = 100
# What an engine does to requests besides guessing; no bit of an answer may know of it.
CIRCUMSTANCES = {
    "ngram": {"schedule": Schedule(chunk_sizes=(7, 3), shuffle_rows=True, spoil_percent=20)},
    "mtp": {"graph": "trace"},
    "dflash": {"schedule": Schedule(preempt_percent=10, pad_rows=1)},
    "dspark": {"schedule": Schedule(preempt_percent=5, spoil_percent=10), "enable_prefix_caching": False},
}


def settings_of(rng):
    """Fields that change what is drawn, here and there."""
    fields = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2},
        {"temperature": 1.0, "presence_penalty": 1.5, "logit_bias": {"300": 2.0, "40": -5.0}},
        {"temperature": 0.7, "top_k": 3, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_tokens": 20},
        {"temperature": 1.0, "ignore_eos": True},
    ]
    chosen = dict(rng.choice(fields))
    if "logit_bias" in chosen:
        chosen["logit_bias"] = {int(key): value for key, value in chosen["logit_bias"].items()}
    return chosen


def requests_of(seeds):
    folder = resolve_model("nano")
    tokenizer = Tokenizer(folder)
    template = load_chat_template(folder, tokenizer)
    return [request_of(seed, template) for seed in seeds]


def request_of(seed, template):
    rng, schema = random.Random(seed), schema_of(seed)
    asked = f"Answer with JSON like this schema: {json.dumps(schema, ensure_ascii=False)[:300]}"
    prompt = template.render(
        [{"role": "user", "content": asked}],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={"reasoning_effort": rng.choice(("none", "high"))},
    )
    wanted = StructuredOutputsParams(json=schema)
    params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=2, structured_outputs=wanted, **settings_of(rng))
    return Request(request_id=str(seed), prompt_token_ids=prompt, params=params, seed=seed << 20, eos_token_ids=(6,))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    found = fitted_drafters("nano", tmp_path_factory.mktemp("drafters"))
    return {name: SpeculativeConfig(method=who.method, model=who.model, token_cost=0.0) for name, who in found.items()}


@pytest.fixture(scope="module")
def cold():
    """Answers of an engine that has one request, no cache and no drafter; each is asked for once."""
    engine = Engine(EngineConfig(model="nano", enable_prefix_caching=False, **POOLS))
    answers = {}

    def answer(request):
        if request.request_id not in answers:
            answers[request.request_id] = run_alone(engine, request)
        return answers[request.request_id]

    return answer


def text_of(result):
    """What of a reply in the message format is no thinking: behind its last content mark."""
    tokenizer = Tokenizer(resolve_model("nano"))
    marks = [place for place, token in enumerate(result.token_ids) if token in tokenizer.special_ids]
    last = next(
        place for place in reversed(marks) if tokenizer.token_text(result.token_ids[place]).startswith("<|content_text")
    )
    return tokenizer.decode(result.token_ids[last:])


def check(method, drafters, cold, seeds):
    engine = Engine(EngineConfig(model="nano", speculative_config=drafters[method], **POOLS, **CIRCUMSTANCES[method]))
    requests = requests_of(seeds)
    results = run(engine, requests, arrivals=[3 * (place // 4) for place in range(len(requests))])
    again = run(engine, requests[:2])
    assert all(again[request.request_id] == results[request.request_id] for request in requests[:2])
    is_caching = CIRCUMSTANCES[method].get("enable_prefix_caching", True)
    assert all((result.num_cached_tokens > 0) == is_caching for result in again.values())
    num_finished = 0
    for request in requests:
        result = results[request.request_id]
        assert result == cold(request), request.request_id
        assert result.error is None
        if result.finish_reason == "stop":
            num_finished += 1
            value = json.loads(text_of(result))
            jsonschema.Draft202012Validator(request.params.structured_outputs.json).validate(value)
    assert num_finished > 0.5 * len(requests)
    assert engine.scheduler.counters.num_draft_tokens > 0
    return num_finished, engine


METHODS = ["ngram", "mtp", "dflash", "dspark"]


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_valid_and_the_same_under_every_drafter(method, drafters, cold):
    check(method, drafters, cold, range(5))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_answers_to_many_schemas_are_valid_and_the_same_under_every_drafter(method, drafters, cold):
    check(method, drafters, cold, range(200))
