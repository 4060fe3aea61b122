"""Steps captured as CUDA graphs give the bits of cold, solo, eager ones; what may not be captured is refused."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from samebit.core.config import Schedule, SpeculativeConfig
from samebit.core.errors import GraphError
from samebit.inputs import Bucket
from tests.driving import make_request, run, run_alone
from tests.exactness.test_graphs import Spoiled, requests_with_extras
from tests.exactness.test_small_model import traffic
from tests.random_checkpoint import write_checkpoint

pytestmark = pytest.mark.gpu
METHODS = [None, "ngram", "mtp", "dflash", "dspark"]


@pytest.fixture(scope="module")
def engines(make_engine, drafters):
    """An engine for each way of guessing; graphs are captured once, and all examples are given to it."""
    made = {}

    def engine(method):
        if method not in made:
            wanted = method and SpeculativeConfig(method=method, model=drafters.get(method))
            made[method] = make_engine(graph="cuda", speculative_config=wanted, max_num_batched_tokens=24)
        return made[method]

    return engine


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=settings.default.max_examples // 2)
@given(traffic=traffic())
def test_replayed_steps_give_the_bits_of_a_cold_solo_eager_run(engines, cold, method, traffic):
    requests, arrivals = traffic
    engine = engines(method)
    for _ in range(2):
        results = run(engine, requests, arrivals)
        for request in requests:
            assert results[request.request_id] == cold(request)
    assert engine.scheduler.counters.num_refused_checkpoints == 0


def test_ordinary_steps_are_replayed_and_others_run_eagerly_with_the_same_bits(make_engine, cold):
    engine = make_engine(graph="cuda", schedule=Schedule(pad_tokens=3, pad_rows=2))
    plain = replace_params(make_request("p", list(range(9)), max_tokens=5), logprobs=0)
    assert run_alone(engine, plain) == cold(plain)
    assert not engine._runner._programs, "no step was eager"
    requests = requests_with_extras()
    results = run(engine, requests, [0, 0, 1, 3, 4])
    for request in requests:
        assert results[request.request_id] == cold(request), request.request_id
    assert not engine._runner._programs, "no step was eager"
    wordy = make_request("w", list(range(30)), max_tokens=5, prompt_logprobs=3)
    assert run_alone(engine, wordy) == cold(wordy)
    assert engine._runner._programs


def replace_params(request, **params):
    import msgspec

    return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, **params))


def capture_with(engine, extra):
    runner = engine._runner
    runner._place = replace(runner._place, model=Spoiled(runner._place.model, extra))
    bucket = Bucket(tokens=4, rows=2, samples=4, edits=0, entries=2, deltas=2, top=0, drafts=0)
    runner.prepare([bucket])
    runner.capture(bucket)


@pytest.mark.parametrize(
    "extra",
    [
        lambda hidden, index: hidden + 1 if index.num_tokens > 3 else hidden,
        lambda hidden, index: hidden * int(index.num_tokens),
        lambda hidden, index: hidden[: len(torch.nonzero(index.positions))],
    ],
    ids=["truth test", "host read", "a shape that values decide"],
)
def test_a_step_that_reads_a_value_is_not_captured(make_engine, extra):
    with pytest.raises(GraphError, match="frozen into the recording"):
        capture_with(make_engine(graph="cuda", max_num_batched_tokens=8), extra)


def test_a_branch_that_was_not_taken_when_capturing_is_found_by_the_manifest(make_engine):
    engine = make_engine(graph="cuda", max_num_batched_tokens=8)
    live = []
    capture_with(engine, lambda hidden, _: hidden + 0 if live else hidden)
    live.append(True)
    result = run_alone(engine, replace_params(make_request("r", [1, 2, 3]), logprobs=0))
    assert result.finish_reason == "error"
    assert "a branch was taken at one time and not at the other" in result.error


def test_a_buffer_that_has_moved_is_not_replayed(make_engine):
    engine = make_engine(graph="cuda", max_num_batched_tokens=8)
    plain = replace_params(make_request("r", [1, 2, 3]), logprobs=0)
    assert run_alone(engine, plain).error is None
    tables = engine.pools.tables
    engine.pools.tables = replace(tables, length=tables.length.clone())
    assert "has moved" in run_alone(engine, plain).error


def test_capturing_changes_no_pool_outside_the_sinks(make_engine):
    engine = make_engine(graph="cuda", max_num_batched_tokens=8)
    run_alone(engine, make_request("a", list(range(30)), max_tokens=3))
    pools = engine.pools
    live = [pool.rows[2:] for pool in pools.conv] + [pools.row_tags[:, 2:]]
    live += [t[1:] for group in pools.kv for pool in group for t in (pool.k, pool.v)]
    live += [t[1:] for t in (pools.tables.length, pools.tables.ring_tags, *pools.tables.page_stamps)]
    before = [tensor.clone() for tensor in live]
    capture_with(engine, lambda hidden, _: hidden)
    for tensor, copy in zip(live, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


@pytest.mark.parametrize("method", [None, "mtp", "dflash"])
def test_graphs_go_on_with_weights_that_take_the_place_of_others(make_engine, drafters, tmp_path, method):
    wanted = method and SpeculativeConfig(method=method, model=drafters.get(method), token_cost=0.0)
    settings = {"graph": "cuda", "max_num_batched_tokens": 16, "speculative_config": wanted}
    engine, other = make_engine(**settings), str(write_checkpoint(tmp_path / "other", seed=3, depths=3))
    requests = [make_request(name, list(range(20)), max_tokens=9) for name in "ab"]
    before = run(engine, requests)
    first = dict(engine._runner._captured)
    engine.use_weights(engine.load_weights(other))
    run(engine, requests)  # other answers may take steps of other sizes
    engine.use_weights(engine.load_weights(engine._config.model))
    assert run(engine, requests) == before
    graphs, allocated = dict(engine._runner._captured), torch.cuda.memory_allocated()
    assert first.items() <= graphs.items()
    engine.use_weights(engine.load_weights(other))
    after = run(engine, requests)
    assert engine._runner._captured == graphs
    assert torch.cuda.memory_allocated() <= allocated
    assert after == run(make_engine(model=other, **settings), requests)
    assert after != before


# That it is a prototype, which does not find every wait.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_waits_for_the_device_once_and_copies_its_results_once(make_engine, monkeypatch):
    engine = make_engine(graph="cuda", max_num_batched_tokens=8, poison=False)
    plain = replace_params(make_request("r", list(range(20)), max_tokens=9), logprobs=0)
    answer = run_alone(engine, plain)  # from here on every graph has been compared with an eager step
    waits, copies = [], []
    wait, copy = torch.cuda.Event.synchronize, torch.Tensor.copy_
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (waits.append(1), wait(event))[1])

    def counted(to, source, non_blocking=False):
        copies.append((source.device.type, to.device.type)) if source.device != to.device else None
        return copy(to, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    num_steps = count_steps(engine, monkeypatch)
    engine.flush_cache()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run_alone(engine, replace_id(plain, "again")).token_ids == answer.token_ids
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Once for the inputs of the step before, which the device has taken by then, and once for the results.
    assert num_steps[0] < len(waits) <= 2 * num_steps[0] > 10
    assert copies.count(("cuda", "cpu")) == copies.count(("cpu", "cuda")) == num_steps[0]


def count_steps(engine, monkeypatch):
    count, launch = [0], engine._runner.launch

    def counted(plan):
        count[0] += 1
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", counted)
    return count


def replace_id(request, name):
    import msgspec

    return msgspec.structs.replace(request, request_id=name)


def test_an_engine_that_nobody_holds_does_not_end_the_capture_of_another(make_engine):
    engine = make_engine(graph="cuda", max_num_batched_tokens=8)
    engine._runner.itself = engine._runner  # only the collector frees it
    del engine
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        make_engine(graph="cuda", max_num_batched_tokens=8)
    finally:
        gc.set_threshold(*thresholds)
