"""The shadow audit: sound engines pass it, faults are found and named, and nobody else notices it."""

import logging
import random
import re

import msgspec
import pytest

from samebit import LLM, SamplingParams
from samebit.core.config import EngineConfig, Schedule, SpeculativeConfig
from samebit.core.errors import ConfigError
from samebit.core.request import TokenLogprobs
from samebit.core.structured import StructuredOutputsParams
from samebit.engine import shadow
from samebit.engine.engine import Engine
from samebit.engine.metrics import ServerMetrics
from samebit.engine.shadow import KINDS, ShadowAudit, is_chosen
from samebit.scheduler.sequence import Progress
from samebit.workloads import document
from tests.driving import make_request, run
from tests.mutants.changes import after_index, normalise_the_batch, read_zeros
from tests.mutants.edits import wrap
from tests.random_checkpoint import write_checkpoint

NANO = {"num_pages": 400, "num_window_pages": 400, "num_checkpoints": 48, "max_num_seqs": 8, "num_threads": 1}
SMALL = {"num_threads": 1, "cache_bytes": 20_000_000, "checkpoint_interval": 16, "audit_rate": 1.0}
PROMPT = list(range(1, 40))
EXTRAS = (
    {},
    {"top_p": 0.9, "logprobs": 5},
    {"stop": [" ", "e"], "logprobs": None},
    {"frequency_penalty": 0.6, "repetition_penalty": 1.2, "logit_bias": {50: 3.0}},
    {"prompt_logprobs": 2},
    {"structured_outputs": StructuredOutputsParams(regex="[a-f]{2,12}")},
    {"min_tokens": 4, "stop_token_ids": list(range(0, 900, 2))},
    {"speculation": False, "top_k": 20, "min_p": 0.01, "logprobs": 0},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for seed, folder in enumerate(folders):
        write_checkpoint(folder, seed=seed)
    return [str(folder) for folder in folders]


@pytest.fixture(scope="module")
def model(models):
    return models[0]


def small_engine(model, **settings):
    return Engine(EngineConfig(model=model, **(SMALL | settings)))


def nano_engine(**settings):
    return Engine(EngineConfig(model="nano", audit_rate=1.0, **(NANO | settings)))


def mixed_requests(engine, count, seed=0):
    """Prompts with common beginnings, every kind of sampling, and samples that share a seed."""
    rng = random.Random(seed)
    texts = [engine.tokenizer.encode(document(number, 900), allow_special=False)[:150] for number in range(3)]
    for number in range(count):
        extra = EXTRAS[number % len(EXTRAS)]
        params = {"max_tokens": rng.randrange(1, 20), "temperature": rng.choice((0.0, 0.8, 1.3))} | extra
        params["max_tokens"] = max(params["max_tokens"], params.get("min_tokens", 0))
        text = rng.choice(texts)
        request = make_request(f"mixed-{number}", text[: rng.randrange(1, len(text))], seed=number // 2, **params)
        yield msgspec.structs.replace(request, sample_index=number % 2, prompt_logprobs_start=1 + number % 3)


def waves(requests, size):
    requests = list(requests)
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def audited(engine, requests, wave=40):
    """All answers to `requests`, which come in waves, with their second runs behind each."""
    results = {}
    for group in waves(requests, wave):
        arrivals = [number // 3 for number in range(len(group))]
        results |= run(engine, group, arrivals)
        finish(engine)
    return results


def finish(engine):
    while engine.has_work or engine.has_audits:
        assert not [output for output in engine.step() if output.request_id.startswith("\0")]
        engine.scheduler.check()


def counts(engine):
    stats = engine.stats()
    return tuple(stats[f"audits_{result}"] for result in ("match", "mismatch", "skipped"))


@pytest.mark.parametrize("method", [None, "ngram", "mtp"])
def test_a_sound_engine_has_no_mismatch(method):
    speculation = None if method is None else SpeculativeConfig(method=method, token_cost=0.0)
    engine = nano_engine(speculative_config=speculation)
    requests = list(mixed_requests(engine, 40))
    results = audited(engine, requests)
    assert counts(engine) == (40, 0, 0)
    num_scored = sum(len(result.prompt_logprobs) for result in results.values())
    assert engine.stats()["audited_tokens"] == num_scored + sum(len(result.token_ids) for result in results.values())
    assert engine.scheduler.counters.num_published
    assert any(result.num_cached_tokens for result in results.values()), "nothing was hit"
    assert {result.finish_reason for result in results.values()} == {"stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "mtp"])
def test_500_requests_have_no_mismatch(method):
    speculation = None if method is None else SpeculativeConfig(method=method)
    engine = nano_engine(speculative_config=speculation)
    audited(engine, mixed_requests(engine, 500))
    assert counts(engine) == (500, 0, 0)


def test_disturbed_and_planned_ahead_shadows_match(model):
    schedule = Schedule(seed=3, preempt_percent=30, chunk_sizes=(5, 3), shuffle_rows=True)
    for settings in ({"schedule": schedule, "num_pages": 24}, {"async_scheduling": True}):
        engine = small_engine(model, max_num_seqs=3, **settings)
        requests = [make_request(str(n), PROMPT[: 5 + n], seed=n, temperature=0.9) for n in range(12)]
        run(engine, requests, arrivals=[2 * n for n in range(12)])
        finish(engine)
        assert counts(engine) == (12, 0, 0)


FAULTS = {
    "a hit starts from zeros whose tags are right": after_index(read_zeros),
    "a kernel whose bits depend on the batch": wrap("kernels.sets:KernelSet.rms_norm", normalise_the_batch),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_within_50_requests_and_named(name, monkeypatch, caplog):
    FAULTS[name](monkeypatch)
    engine = nano_engine(kernels="torch")
    num_requests = 0
    for group in waves(mixed_requests(engine, 48), 8):
        run(engine, group)
        finish(engine)
        num_requests += len(group)
        if counts(engine)[1]:
            break
    metrics = ServerMetrics("nano")
    metrics.set_engine_stats(engine.stats(), 1.0)
    told = metrics.render().decode()
    _, found, _ = counts(engine)
    assert found, f"not found in {num_requests} requests"
    assert f'samebit:audit_requests_total{{model_name="nano",result="mismatch"}} {found:.1f}' in told
    assert f'samebit:audit_mismatches_total{{model_name="nano"}} {found:.1f}' in told
    assert engine.stats()["audit_last_mismatch_s"] > 1.7e9
    assert sum(engine.stats()[f"audit_differences_{kind}"] for kind in KINDS) == found
    assert any("is not what a cold run gives" in message and "mixed-" in message for message in caplog.messages)


def changed(tokens, place, **fields):
    """`tokens` with the token at `place` changed, if it is there."""
    if place >= len(tokens):
        return tokens
    return [*tokens[:place], msgspec.structs.replace(tokens[place], **fields), *tokens[place + 1 :]]


def last_bit(value: float) -> float:
    return float.fromhex(value.hex()) * (1 + 2**-52)


DELIVERIES = {
    "token": ("tokens", lambda a: {"tokens": changed(a.tokens, 2, token_id=a.tokens[2].token_id ^ 1)}),
    "logprob": ("logprobs", lambda a: {"tokens": changed(a.tokens, 2, logprob=last_bit(a.tokens[2].logprob))}),
    "rank": ("logprobs", lambda a: {"tokens": changed(a.tokens, 2, rank=a.tokens[2].rank + 1)}),
    "top logprobs": (
        "logprobs",
        lambda a: {"tokens": changed(a.tokens, 2, top_logprobs=[last_bit(v) for v in a.tokens[2].top_logprobs])},
    ),
    "top tokens": ("logprobs", lambda a: {"tokens": changed(a.tokens, 2, top_ids=a.tokens[2].top_ids[::-1])}),
    "logprob of the prompt": (
        "prompt_logprobs",
        lambda a: {"prompt": changed(a.prompt, 3, logprob=last_bit(a.prompt[3].logprob))},
    ),
    "missing logprob of the prompt": ("prompt_logprobs", lambda a: {"prompt": a.prompt[:-1]}),
    "further logprob of the prompt": ("prompt_logprobs", lambda a: {"prompt": [*a.prompt, a.prompt[0]]}),
    "missing token": ("endings", lambda a: {"tokens": a.tokens[:-1]}),
    "further token": ("endings", lambda a: {"tokens": [*a.tokens, TokenLogprobs(1, -1.0, 1, [], [])]}),
    "stop": ("endings", lambda _: {"ending": ("stop", 7)}),
}


# The prompt has 39 tokens, of which all but the first have a logprob; the answer has 8.
PLACES = dict.fromkeys(DELIVERIES, 39 + 2) | {
    "logprob of the prompt": 1 + 3,
    "missing logprob of the prompt": 38,
    "further logprob of the prompt": 39,
    "missing token": 39 + 7,
    "further token": 39 + 8,
    "stop": 39 + 8,
}


@pytest.mark.parametrize("name", DELIVERIES)
def test_what_differs_is_told_by_its_kind_and_place(model, name, monkeypatch, caplog):
    kind, change = DELIVERIES[name]

    def delivered_wrongly(audit, request_id):
        answer = audit._open.get(request_id)
        for field, value in change(answer).items() if answer else ():
            setattr(answer, field, value)
        ended(audit, request_id)

    ended = ShadowAudit.ended
    monkeypatch.setattr(ShadowAudit, "ended", delivered_wrongly)
    engine = small_engine(model)
    run(engine, [make_request("wrong", PROMPT, max_tokens=8, prompt_logprobs=1)])
    finish(engine)
    assert counts(engine) == (0, 1, 0)
    assert {found for found in KINDS if engine.stats()[f"audit_differences_{found}"]} == {kind}
    (message,) = (message for message in caplog.messages if "audit" in message)
    assert "request wrong is not" in message
    place = re.search(r"at position (\d+) \(the prompt has 39\)", message)
    assert int(place[1]) == PLACES[name]


def test_answers_that_were_cut_off_are_compared_up_to_there(model):
    engine = small_engine(model)
    plain = run(engine, [make_request("plain", PROMPT, max_tokens=12)])["plain"]
    stop = engine.tokenizer.token_text(plain.token_ids[4])
    engine.add(make_request("left", PROMPT, max_tokens=30))
    for _ in range(4):
        engine.step()
    assert engine.abort("left")
    (cut,) = run(engine, [make_request("cut", PROMPT, max_tokens=12, stop=[stop])]).values()
    assert cut.finish_reason == "stop"
    finish(engine)
    assert counts(engine) == (3, 0, 0)
    assert engine.stats()["audited_tokens"] == 12 + 4 + len(cut.token_ids)


def test_an_answer_cut_off_in_its_last_step_is_compared_up_to_there(model):
    """Guesses may end a request by its length in the very step in which a stop string has ended its answer."""
    engine = small_engine(model)
    full = run(engine, [make_request("a", PROMPT, max_tokens=6, stop_token_ids=[])])["a"]
    finish(engine)
    items = [
        TokenLogprobs(*item[:1], float.fromhex(item[1]), item[2], [*item[3]], [*map(float.fromhex, item[4])])
        for item in full.logprobs
    ]
    engine._audit.opened(make_request("b", PROMPT, max_tokens=6))
    engine._audit.delivered(Progress(request_id="b", tokens=items, finish_reason="length"), 4, is_over=True)
    finish(engine)
    assert counts(engine) == (2, 0, 0)
    assert engine.stats()["audited_tokens"] == 6 + 4


def test_nobody_guesses_for_a_shadow(model):
    speculation = SpeculativeConfig(method="ngram", prompt_lookup_min=1, token_cost=0.0)
    engine = small_engine(model, speculative_config=speculation)
    run(engine, [make_request("a", PROMPT[:6] * 4, max_tokens=30)])
    before = engine.stats()["num_draft_tokens"]
    finish(engine)
    assert engine.stats()["num_draft_tokens"] == before > 0
    assert counts(engine) == (1, 0, 0)


def test_an_answer_without_a_token_is_skipped(model):
    engine = small_engine(model)
    engine.add(make_request("gone", PROMPT))
    engine.abort("gone")
    finish(engine)
    assert counts(engine) == (0, 0, 1)


def test_requests_whose_step_failed_are_compared_and_a_failed_shadow_is_skipped(model, monkeypatch):
    engine = small_engine(model)
    engine.add(make_request("a", PROMPT))
    for _ in range(3):
        engine.step()
    launch = engine._runner.launch
    monkeypatch.setattr(logging.getLogger("samebit.engine.engine"), "disabled", True)

    def fail(plan):
        raise RuntimeError("no")

    engine._runner.launch = fail
    (output,) = engine.step()
    assert output.finish_reason == "error"
    assert engine.has_audits
    engine._runner.launch = launch
    finish(engine)
    assert counts(engine) == (1, 0, 0)
    run(engine, [make_request("b", PROMPT)])
    engine._runner.launch = fail
    assert engine.step() == []
    assert counts(engine) == (1, 0, 1)
    assert not engine.has_audits


def test_whatever_keeps_a_shadow_from_beginning_it_is_skipped(model, monkeypatch):
    engine = small_engine(model)
    run(engine, [make_request("a", PROMPT)])
    add = engine.scheduler.add

    def fail(request):
        if request.is_shadow:
            raise RuntimeError("no")
        add(request)

    monkeypatch.setattr(engine.scheduler, "add", fail)
    engine.add(make_request("b", PROMPT))
    finish(engine)
    assert counts(engine)[2] == 2


def test_nobody_notices_shadows(model):
    """Answers, what is cached, and all that is counted of requests are as without them."""
    seen = []
    for rate in (0.0, 1.0):
        engine = small_engine(model, audit_rate=rate, max_num_seqs=3)
        requests = [make_request(str(n), PROMPT[: 8 + 3 * n], seed=n, temperature=0.9) for n in range(10)]
        results = run(engine, requests[:5])
        finish(engine)
        results |= run(engine, requests[5:])
        finish(engine)
        stats = engine.stats()
        kept = [(c.boundary, c.kind, c.node.key) for c in engine.manager.tree.checkpoints]
        cached = {name: result.num_cached_tokens for name, result in results.items()}
        same = ("num_running", "num_waiting", "generation_tokens", "num_published", "num_preemptions", "evicted_tokens")
        counted = {name: stats[name] for name in stats if name in same or name.startswith("misses_")}
        times = len(engine.take_admitted())
        seen.append((results, cached, kept, counted, times, engine.has_work))
    assert seen[0] == seen[1]
    assert counts(engine) == (10, 0, 0)


def test_a_shadow_is_no_request_while_it_runs(model):
    engine = small_engine(model)
    run(engine, [make_request("a", PROMPT)])
    assert engine.has_audits
    engine.step()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"], engine.has_work) == (0, 0, False)
    assert engine.manager.slots.num_used == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_shadow_makes_way_for_a_request_that_waits(model, is_async):
    engine = small_engine(model, max_num_seqs=1, async_scheduling=is_async)
    run(engine, [make_request("a", PROMPT, max_tokens=40)])
    for _ in range(5):
        engine.step()
    assert engine.manager.slots.num_used == 1
    engine.add(make_request("b", PROMPT[::-1], max_tokens=1))
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_steps <= 3 + is_async
    assert counts(engine) == (0, 0, 0)
    finish(engine)
    assert counts(engine) == (2, 0, 0)


def test_no_shadow_begins_while_requests_fill_the_engine(model):
    engine = small_engine(model, max_num_seqs=2)
    run(engine, [make_request("a", PROMPT)])
    for name in ("b", "c"):
        engine.add(make_request(name, PROMPT, max_tokens=20))
    while engine.scheduler.num_running + engine.scheduler.num_waiting > 1:
        engine.step()
        assert not engine._audit.is_running
    finish(engine)
    assert counts(engine) == (3, 0, 0)


def test_a_shadow_is_the_first_to_lose_its_pages(model):
    engine = small_engine(model, num_pages=10, num_window_pages=40, num_checkpoints=2, enable_prefix_caching=False)
    run(engine, [make_request("a", PROMPT, max_tokens=60)])
    for _ in range(30):
        engine.step()
    (shadowing,) = engine.scheduler._running
    engine.add(make_request("b", PROMPT, max_tokens=60))
    while engine.has_work:
        engine.step()
        assert engine.stats()["num_preemptions"] == 0
        assert not engine.stats()["num_waiting"]
    assert shadowing.num_preemptions, "pages ran short"
    finish(engine)
    assert counts(engine) == (2, 0, 0)


def test_the_oldest_answers_are_skipped_where_too_many_wait(model, monkeypatch):
    monkeypatch.setattr(shadow, "MAX_PENDING", 3)
    engine = small_engine(model, max_num_seqs=8)
    requests = [make_request(str(n), PROMPT, max_tokens=3) for n in range(8)]
    run(engine, requests)
    # Three wait, and one has begun.
    assert counts(engine) == (0, 0, 4)
    assert engine._audit.is_running
    monkeypatch.setattr(shadow, "MAX_PENDING_TOKENS", 2 * (len(PROMPT) + 3))
    run(engine, [make_request("last", PROMPT, max_tokens=3)])
    finish(engine)
    # There was room for the tokens of two beside the one that had begun, so one more had to go.
    assert counts(engine) == (4, 0, 5)


@pytest.mark.parametrize("is_async", [False, True])
def test_answers_of_other_weights_are_skipped(models, is_async):
    old, new = models
    engine = small_engine(old, async_scheduling=is_async)
    run(engine, [make_request(name, PROMPT) for name in ("a", "b")])
    engine.step()
    assert engine._audit.is_running
    engine.use_weights(engine.load_weights(new))
    assert counts(engine) == (0, 0, 2)
    assert not engine.scheduler.has_work
    run(engine, [make_request("c", PROMPT)])
    finish(engine)
    assert counts(engine) == (1, 0, 2)


def test_the_choice_is_a_share_of_all_names_and_always_the_same():
    names = [f"chatcmpl-{number}" for number in range(20_000)]
    for rate in (0.001, 0.25, 0.9):
        chosen = [is_chosen(name, rate, 0) for name in names]
        assert chosen == [is_chosen(name, rate, 0) for name in names]
        assert sum(chosen) == pytest.approx(rate * len(names), rel=0.5 if rate < 0.01 else 0.03)
    assert all(is_chosen(name, 1.0, 0) for name in names)
    assert not any(is_chosen(name, 0.0, 0) for name in names)
    assert [is_chosen(name, 0.5, 0) for name in names] != [is_chosen(name, 0.5, 1) for name in names]


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(ConfigError, match="audit_rate"):
        EngineConfig(audit_rate=rate).validate()


def test_a_program_can_wait_for_its_audits(model):
    llm = LLM(model, **SMALL)
    llm.generate([PROMPT, PROMPT[:9]], SamplingParams(max_tokens=4, n=2, temperature=1.0))
    assert llm.stats()["audits_match"] < 4
    llm.finish_audits()
    assert llm.stats()["audits_match"] == 4


def test_without_a_rate_nothing_is_kept(model):
    engine = small_engine(model, audit_rate=0.0)
    run(engine, [make_request("a", PROMPT)])
    assert not engine.has_audits
    assert counts(engine) == (0, 0, 0)


def test_a_shadow_is_cold_whatever_is_cached_under_its_salt(model):
    engine = small_engine(model)
    run(engine, [make_request("a", PROMPT, salt=shadow._SHADOWS)])
    finish(engine)
    assert counts(engine) == (1, 0, 0)
    assert engine.manager.tree.checkpoints
    assert not any(checkpoint.num_hits for checkpoint in engine.manager.tree.checkpoints)
