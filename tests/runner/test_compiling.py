"""A step is handed to whoever compiles its kernels before it is captured."""

from __future__ import annotations

import pytest

from samebit.core.config import EngineConfig
from samebit.engine.device import buckets_of
from samebit.engine.engine import Engine
from samebit.inputs import Bucket
from samebit.kernels.sets import KernelSet
from samebit.runner import runner as runners
from tests.driving import make_request, run_alone
from tests.random_checkpoint import write_checkpoint


@pytest.fixture
def events(monkeypatch):
    """What happens in order: a bucket that a step runs on, or "compile" and then the buckets of the steps that were handed over."""
    seen, run_step = [], runners.run_step

    def step(model, kernels, buffers, pools, bucket, speculation):
        seen.append(bucket)
        return run_step(model, kernels, buffers, pools, bucket, speculation)

    def compile_for(self, run):
        seen.append("compile")
        run()

    monkeypatch.setattr(runners, "run_step", step)
    monkeypatch.setattr(KernelSet, "compile_for", compile_for)
    return seen


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("small")))


def test_the_kernels_of_a_step_are_compiled_before_it_is_captured(model, events):
    engine = Engine(EngineConfig(model=model, num_threads=1, page_size=4, max_num_seqs=2))
    engine._runner.prepare(buckets_of(engine._config, engine._loaded, engine.pools.geometry))
    assert run_alone(engine, make_request("r", list(range(9)), max_tokens=6)).error is None
    buckets = {event for event in events if event != "compile"}
    assert len(buckets) > 1
    for bucket in buckets:
        first = events.index(bucket)
        assert events[first - 1] == "compile"
        assert bucket in events[first + 1 :], "it was compiled only"
    assert events.count("compile") == len(buckets)


def test_steps_of_many_sizes_are_handed_over_together(model, events):
    engine = Engine(EngineConfig(model=model, num_threads=1, page_size=4))
    buckets = [Bucket(tokens, 1, 1, 0, 0, 0, 0, 0) for tokens in (1, 4, 7)]
    engine._runner.compile(buckets)
    assert events[0] == "compile"
    assert [event for event in events if event != "compile"] == buckets
