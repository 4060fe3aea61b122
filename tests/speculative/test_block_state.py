"""A block drafter's state goes wherever the target's goes, and neither it nor its guesses touch an answer."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from samebit import EngineConfig
from samebit.core.config import Schedule, SpeculativeConfig
from samebit.engine.engine import Engine
from tests.driving import make_request, run, run_after_the_body
from tests.random_checkpoint import SMALL, write_checkpoint
from tests.speculative.block_checkpoint import DFLASH, DSPARK, changed, write_drafter
from tests.speculative.recording import recorded

SETTINGS = {
    "num_threads": 1,
    "page_size": 4,
    "checkpoint_interval": 8,
    "max_num_seqs": 4,
    "num_pages": 200,
    "num_window_pages": 200,
    "num_checkpoints": 40,
    "poison": True,
}
TEXT = [(7 * i * i + 3 * i) % 251 for i in range(60)]
RAW = {"dflash": DFLASH, "dspark": changed(DSPARK, markov_head_type="rnn")}
METHODS = tuple(RAW)
LONGEST = SMALL["model_max_length"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    for method, raw in RAW.items():
        write_drafter(base / method, raw)
    write_checkpoint(base / "target")
    return base


@pytest.fixture(scope="module")
def make_engine(folders, kernel_kind):
    def make(method: str | None, **changes) -> Engine:
        wanted = None
        if method is not None:
            wanted = SpeculativeConfig(method=method, model=str(folders / method), token_cost=0)
        fixed = {"model": str(folders / "target"), "kernels": kernel_kind, "speculative_config": wanted}
        return Engine(EngineConfig(**{**fixed, **SETTINGS, **changes}))

    return make


def proposals(engine, prompt, **params):
    """What is guessed behind so many tokens of a request that runs alone, and its answer as key 0."""
    given = {"temperature": 0.8, "seed": 3, "max_tokens": 8, "ignore_eos": True, **params}
    with recorded(engine) as found:
        result = run(engine, [make_request("r", prompt, **given)])["r"]
    return {0: result.token_ids, **found.of["r"]}


@pytest.mark.parametrize("graph", ["eager", "trace"])
@pytest.mark.parametrize("method", METHODS)
def test_guesses_behind_a_hit_at_any_residue_are_those_of_a_cold_run(make_engine, kernel_kind, method, graph):
    cold_engine = make_engine(method, enable_prefix_caching=False)
    warm = make_engine(method, graph=graph)
    for length in range(1, 30, 5 if kernel_kind == "torch" else 1):
        cold = proposals(cold_engine, TEXT[:length])
        assert len(cold) > 3
        for _ in range(2):
            assert proposals(warm, TEXT[:length]) == cold
    assert warm.stats()["num_published"] > 0
    assert warm.stats()["num_refused_checkpoints"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_step_may_be_taken_in_after_its_draws_as_well_as_before_them(make_engine, method, monkeypatch):
    """On a GPU it is taken in beside them."""
    with_work_first = proposals(make_engine(method), TEXT[:21], max_tokens=20)
    calls = run_after_the_body(monkeypatch)
    assert proposals(make_engine(method), TEXT[:21], max_tokens=20) == with_work_first
    assert calls


@pytest.mark.parametrize("method", METHODS)
def test_requests_that_do_not_speculate_leave_what_later_ones_draft_from(make_engine, method):
    cold = proposals(make_engine(method, enable_prefix_caching=False), TEXT[:27])
    engine = make_engine(method)
    assert proposals(engine, TEXT[:24], speculation=False, max_tokens=4).keys() == {0}
    with recorded(engine) as found:
        result = run(engine, [make_request("r", TEXT[:27], temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)])[
            "r"
        ]
    assert result.num_cached_tokens > 0
    assert {0: result.token_ids, **found.of["r"]} == cold


@pytest.mark.parametrize("graph", ["eager", "trace"])
@pytest.mark.parametrize("method", METHODS)
def test_guesses_in_a_busy_batch_are_those_of_a_request_alone(make_engine, method, graph):
    schedule = Schedule(
        seed=5, chunk_sizes=(3, 7), preempt_percent=25, pad_tokens=2, pad_rows=1, shuffle_rows=True, spoil_percent=30
    )
    requests = [
        make_request(str(i), TEXT[i : 12 + 5 * i], temperature=0.5 * i, seed=i, max_tokens=14, ignore_eos=True)
        for i in range(6)
    ]
    alone = make_engine(method, enable_prefix_caching=False)
    busy = make_engine(
        method, schedule=schedule, graph=graph, num_pages=30, num_window_pages=24, max_num_batched_tokens=24
    )
    with recorded(busy) as found:
        results = run(busy, requests, [0, 0, 1, 3, 5, 8])
    assert sum(result.num_preemptions for result in results.values()) > 0
    num_compared = 0
    for request in requests:
        with recorded(alone) as wanted:
            assert run(alone, [request])[request.request_id] == results[request.request_id]
        mine, other = found.of[request.request_id], wanted.of[request.request_id]
        common = mine.keys() & other.keys()
        num_compared += len(common)
        assert {n: mine[n] for n in common} == {n: other[n] for n in common}
    assert num_compared > 20


@pytest.mark.parametrize("method", METHODS)
def test_threads_change_no_guess(make_engine, method):
    one, three = (make_engine(method, num_threads=threads, enable_prefix_caching=False) for threads in (1, 3))
    assert proposals(one, TEXT[:33], max_tokens=12) == proposals(three, TEXT[:33], max_tokens=12)


@pytest.mark.parametrize("graph", ["eager", "trace"])
@pytest.mark.parametrize("method", METHODS)
def test_blocks_that_reach_beyond_the_longest_sequence_change_nothing(make_engine, cold_engine, method, graph):
    prompt = [token % 251 for token in range(LONGEST - 8)]
    request = make_request("r", prompt, temperature=0.0, max_tokens=8, ignore_eos=True)
    engine = make_engine(method, graph=graph)
    with recorded(engine) as found:
        result = run(engine, [request])["r"]
    assert len(result.token_ids) == 8
    assert max(found.of["r"]) + RAW[method]["block_size"] > LONGEST
    assert result == run(cold_engine, [request])["r"]
    assert engine.stats()["failed_steps"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_gives_no_numbers_changes_nothing(folders, make_engine, cold_engine, method, tmp_path):
    shutil.copytree(folders / method, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["layers.1.mlp.down_proj.weight"].fill_(3e38)  # its products are infinite
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = SpeculativeConfig(method=method, model=str(tmp_path))
    request = make_request("r", TEXT[:13], temperature=0.8, max_tokens=12, ignore_eos=True)
    assert run(make_engine(method, speculative_config=wanted), [request]) == run(cold_engine, [request])


schedules = st.builds(
    Schedule,
    seed=st.integers(0, 1 << 16),
    chunk_sizes=st.lists(st.integers(1, 30), max_size=3).map(tuple),
    preempt_percent=st.sampled_from([0, 0, 10, 40]),
    pad_tokens=st.sampled_from([0, 1, 5]),
    spoil_percent=st.sampled_from([0, 50]),
    shuffle_rows=st.booleans(),
)


@settings(max_examples=settings.default.max_examples // 4)
@given(
    method=st.sampled_from(METHODS),
    schedule=schedules,
    budget=st.sampled_from([8, 20, 256]),
    pages=st.sampled_from([{}, {"num_pages": 24, "num_window_pages": 12, "num_checkpoints": 5}]),
    wanted=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 20), st.sampled_from([0.0, 0.8, 2.0]), st.integers(0, 8)),
        min_size=1,
        max_size=4,
    ),
)
def test_any_mixture_of_recorded_steps_with_a_drafter_gives_the_bits_of_a_cold_solo_run_without(
    make_engine, cold_engine, method, schedule, budget, pages, wanted
):
    requests = [
        make_request(str(i), [*TEXT[:shared], i, *TEXT[40 - own : 40]], temperature=temperature, seed=i, top_p=0.9)
        for i, (shared, own, temperature, _) in enumerate(wanted)
    ]
    engine = make_engine(method, schedule=schedule, graph="trace", max_num_batched_tokens=budget, **pages)
    cold = {request.request_id: run(cold_engine, [request])[request.request_id] for request in requests}
    for _ in range(2):  # the second time the cache is warm
        assert run(engine, requests, [arrival for *_, arrival in wanted]) == cold
    assert engine.stats()["num_refused_checkpoints"] == 0


@pytest.fixture(scope="module")
def cold_engine(make_engine):
    return make_engine(None, enable_prefix_caching=False)
