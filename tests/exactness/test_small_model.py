"""The promise on a small random model: whatever the engine does around a request, not one bit of its answer changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.core.config import Schedule, SpeculativeConfig
from tests.driving import make_request, run, run_alone

tokens = st.integers(0, 255)
schedules = st.builds(
    Schedule,
    seed=st.integers(0, 1 << 16),
    chunk_sizes=st.lists(st.integers(1, 30), max_size=3).map(tuple),
    preempt_percent=st.sampled_from([0, 0, 10, 40]),
    max_rows=st.sampled_from([0, 0, 2]),
    pad_tokens=st.sampled_from([0, 0, 1, 5]),
    pad_rows=st.sampled_from([0, 0, 1, 3]),
    spoil_percent=st.sampled_from([0, 0, 50]),
    shuffle_rows=st.booleans(),
)
pools = st.sampled_from(
    [
        {},
        {"num_pages": 24, "num_window_pages": 12, "num_checkpoints": 5},
        {"num_pages": 30, "num_window_pages": 8, "num_checkpoints": 1},
    ]
)
sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "max_tokens": st.integers(1, 16),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "logit_bias": st.sampled_from([None, None, {3: 5.0, 7: -100.0}]),
        "prompt_logprobs": st.sampled_from([None, None, 2]),
        "seed": st.integers(0, (1 << 63) - 1),
    }
)


@st.composite
def traffic(draw):
    """Up to five requests whose prompts share prefixes of one text, and the steps at which they arrive."""
    text = draw(st.lists(tokens, min_size=40, max_size=40))
    requests, arrivals = [], []
    for number in range(draw(st.integers(1, 5))):
        prompt = text[: draw(st.integers(0, 40))] + draw(st.lists(tokens, min_size=1, max_size=20))
        requests.append(make_request(str(number), prompt, **draw(sampling)))
        arrivals.append(draw(st.integers(0, 8)))
    return requests, arrivals


@settings(max_examples=settings.default.max_examples // 2)
@given(
    traffic=traffic(),
    schedule=schedules,
    pools=pools,
    budget=st.sampled_from([8, 20, 256]),
    speculation=st.sampled_from([None, None, "ngram", "mtp", "dflash", "dspark"]),
    is_async=st.booleans(),
)
def test_any_mixture_gives_the_bits_of_a_cold_solo_run(
    make_engine, drafters, cold, traffic, schedule, pools, budget, speculation, is_async
):
    requests, arrivals = traffic
    who = {"method": speculation, "model": drafters.get(speculation), "prompt_lookup_min": 1}
    engine = make_engine(
        schedule=schedule,
        max_num_batched_tokens=budget,
        speculative_config=SpeculativeConfig(**who) if speculation else None,
        async_scheduling=is_async,
        **pools,
    )
    for _ in range(2):  # the second time the cache is warm
        results = run(engine, requests, arrivals)
        for request in requests:
            assert results[request.request_id] == cold(request)
    assert engine.scheduler.counters.num_refused_checkpoints == 0
    assert engine.scheduler.counters.num_damaged_resumes == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 20])
def test_the_cut_of_a_prompt_into_chunks_changes_nothing(make_engine, cold, size):
    request = make_request("r", list(range(1, 22)), prompt_logprobs=1)
    for caching in (True, False):
        engine = make_engine(schedule=Schedule(chunk_sizes=(size,)), enable_prefix_caching=caching)
        assert run_alone(engine, request) == cold(request)


def test_a_hit_at_every_boundary_and_residue_equals_a_cold_run(make_engine, cold):
    text = [(7 * i * i + 3 * i) % 251 for i in range(60)]
    num_hits = 0
    for length in range(1, 34):
        engine = make_engine(max_num_batched_tokens=256)
        run_alone(engine, make_request("first", text[:length], max_tokens=3))
        # The same text, then text that leaves it, so that the hit is at the end, at a fork and on the grid.
        for tail in ([], [9], text[length : length + 5], [1, 2, 3, 4, 5, 6, 7]):
            request = make_request("second", text[:length] + tail, max_tokens=4)
            result = run_alone(engine, request)
            assert result == cold(request), (length, tail, result.num_cached_tokens)
            num_hits += result.num_cached_tokens > 0
    assert num_hits > 90


def test_a_prompt_that_repeats_is_computed_from_its_last_possible_boundary(make_engine):
    engine = make_engine()
    prompt = list(range(40, 71))
    assert run_alone(engine, make_request("a", prompt)).num_cached_tokens == 0
    assert run_alone(engine, make_request("b", [*prompt, 5, 6])).num_cached_tokens == 28


def test_the_next_turn_hits_the_page_floor_of_the_response_before_it(make_engine):
    engine = make_engine()
    prompt = list(range(40, 61))
    answer = run_alone(engine, make_request("a", prompt, max_tokens=10, ignore_eos=True))
    turn = [*prompt, *answer.token_ids, 7, 8, 9]
    # The last sampled token has no state: 21 + 10 - 1 = 30 tokens have one.
    assert run_alone(engine, make_request("b", turn)).num_cached_tokens == 28


def test_a_fork_inside_a_page_hits_for_the_third_sibling(make_engine, cold):
    engine = make_engine(checkpoint_interval=64)
    trunk = list(range(100, 122))
    hits = []
    for number, tail in enumerate(([1] * 9, [2] * 9, [3] * 9)):
        request = make_request(str(number), [*trunk, *tail], max_tokens=1)
        result = run_alone(engine, request)
        assert result == cold(request)
        hits.append(result.num_cached_tokens)
    assert hits == [0, 0, 20]


def test_salts_do_not_share_a_prefix(make_engine, cold):
    engine = make_engine()
    prompt = list(range(30))
    run_alone(engine, make_request("a", prompt, salt="one"))
    other = run_alone(engine, make_request("b", prompt, salt="two"))
    same = run_alone(engine, make_request("c", prompt, salt="two"))
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 28)
    assert other == same == cold(make_request("d", prompt))


def test_prompt_logprobs_resume_no_deeper_than_the_first_scored_token(make_engine, cold):
    engine = make_engine()
    request = make_request("a", list(range(50, 80)), prompt_logprobs=2)
    run_alone(engine, request)
    again = run_alone(engine, request)
    assert again.num_cached_tokens == 0
    assert again == cold(request)
    assert len(again.prompt_logprobs) == 29


def test_two_threads_give_the_bits_of_one(make_engine, cold):
    engine = make_engine(num_threads=2)
    requests = [make_request(str(n), [n, *range(20 + n)], temperature=0.8, seed=n) for n in range(5)]
    results = run(engine, requests)
    assert all(results[request.request_id] == cold(request) for request in requests)


def test_bf16_weights_are_as_exact_as_fp32_ones(make_engine, tmp_path):
    import torch

    from tests.random_checkpoint import write_checkpoint

    model = str(write_checkpoint(tmp_path / "half", dtype=torch.bfloat16))
    alone = make_engine(model=model, enable_prefix_caching=False)
    engine = make_engine(model=model, schedule=Schedule(chunk_sizes=(3, 5)))
    requests = [make_request(str(n), list(range(n, n + 23)), temperature=1.0, seed=n) for n in range(4)]
    for _ in range(2):
        results = run(engine, requests)
        assert all(results[request.request_id] == run_alone(alone, request) for request in requests)


def test_an_abort_leaves_the_others_alone_and_holds_nothing(make_engine, cold):
    engine = make_engine(max_num_batched_tokens=16)
    kept = make_request("kept", list(range(33)), max_tokens=10)
    for step in range(8):
        doomed = make_request(f"doomed-{step}", list(range(50, 90)), max_tokens=20)
        engine.add(doomed)
        engine.add(kept)
        outputs = [output for _ in range(step) for output in engine.step()]
        assert engine.abort(doomed.request_id)
        assert not engine.abort(doomed.request_id)
        while engine.has_work:
            outputs += engine.step()
            engine.scheduler.check()
        mine = [output for output in outputs if output.request_id == "kept"]
        assert [t for output in mine for t in output.token_ids] == cold(kept).token_ids
        assert engine.manager.slots.num_used == 0


def test_siblings_wait_for_the_prefix_that_the_first_of_them_computes(make_engine, cold):
    engine = make_engine(max_num_batched_tokens=16)
    prompt = list(range(60, 91))
    requests = [make_request(str(n), prompt, seed=n, temperature=0.9) for n in range(4)]
    stranger = make_request("stranger", [1, 2, 3])
    results = run(engine, [*requests, stranger])
    assert [results[request.request_id].num_cached_tokens for request in requests] == [0, 28, 28, 28]
    assert all(results[request.request_id] == cold(request) for request in [*requests, stranger])
