"""The engine driven step by step, with a clock that ticks once a look."""

import itertools

import pytest

from samebit.bench.datasets import Workload, conversations
from samebit.bench.offline import Batch, OfflineSettings, bench_engine
from samebit.bench.texts import counted
from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError
from samebit.core.request import EngineOutput
from samebit.engine.engine import Engine
from tests.random_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = str(write_checkpoint(tmp_path_factory.mktemp("benched")))
    return EngineConfig(
        model=folder,
        num_threads=1,
        page_size=4,
        checkpoint_interval=4,
        max_num_seqs=4,
        num_pages=200,
        num_window_pages=200,
        num_checkpoints=60,
    )


@pytest.fixture
def engine(config):
    return Engine(config)


def plan(engine, **fields):
    return conversations(Workload(**fields), counted(engine.tokenizer))


def ticking():
    return map(float, itertools.count()).__next__


def test_all_requests_are_answered_at_full_length(engine):
    batch = Batch(engine, plan(engine, num_prompts=6, random_input_len=9, random_output_len=5), clock=ticking())
    assert batch.run()
    assert [(row.num_input_tokens, row.num_output_tokens, row.is_complete) for row in batch.rows] == [(9, 5, True)] * 6
    assert {row.planned_s for row in batch.rows} == {0.0}
    assert batch.num_steps >= 10, "six requests of five tokens in four places"
    assert all(row.token_s == sorted(row.token_s) for row in batch.rows)
    # One look at the clock a step, and one at the end.
    assert batch.duration_s == batch.num_steps + 1
    assert batch.engine_totals["generation_tokens"] == 30


def test_a_turn_waits_for_the_one_before_and_finds_it_cached(engine):
    fields = {"multi_turn_system_len": 12, "multi_turn_input_len": 6, "multi_turn_output_len": 6}
    batch = Batch(engine, plan(engine, dataset_name="multi_turn", num_prompts=2, multi_turn_num_turns=3, **fields))
    assert batch.run()
    assert sorted((row.conversation, row.turn, row.num_input_tokens) for row in batch.rows) == [
        (number, turn, 18 + 12 * turn) for number in (0, 1) for turn in range(3)
    ]
    later = [row for row in batch.rows if row.turn]
    assert all(row.num_cached_tokens >= 12 for row in later)
    for row in later:
        before = next(r for r in batch.rows if (r.conversation, r.turn) == (row.conversation, row.turn - 1))
        assert row.planned_s == before.token_s[-1]


def test_an_interrupt_keeps_what_was_measured_and_leaves_nothing_open(engine):
    class Interrupted:
        def __init__(self):
            self.num_steps = 0

        def __getattr__(self, name):
            return getattr(engine, name)

        def step(self):
            self.num_steps += 1
            if self.num_steps == 8:
                raise KeyboardInterrupt
            return engine.step()

    batch = Batch(Interrupted(), plan(engine, num_prompts=9, random_input_len=9, random_output_len=5))
    assert batch.run() is False
    states = {row.is_complete for row in batch.rows}
    assert states == {True, False}
    assert not engine.has_work


def test_a_failed_request_says_why(engine):
    class Failing:
        def __getattr__(self, name):
            return getattr(engine, name)

        def step(self):
            for output in engine.step():
                engine.abort(output.request_id)
            return [EngineOutput(request_id="0-0", finish_reason="error", error="step 1 failed: x")]

    batch = Batch(Failing(), plan(engine, num_prompts=1, random_input_len=9, random_output_len=5))
    assert batch.run()
    assert batch.rows[0].error == "step 1 failed: x"


def test_a_record_holds_each_measured_batch_and_no_warm_up(config):
    ended = []
    record = bench_engine(
        "latency",
        config,
        OfflineSettings(num_iters=3, num_warmups=2, save_detailed=True, label="here"),
        Workload(num_prompts=2, random_input_len=8, random_output_len=4),
        lambda name, num_requests: ended.append((name, num_requests)) or ended.append,
    )
    (run,) = record.runs
    assert (record.kind, record.label, record.is_complete) == ("latency", "here", True)
    assert ended[0] == ("latency", 6)
    assert ended[1:] == run.requests
    assert run.summary["completed"] == 6
    assert run.summary["total_output_tokens"] == 24
    assert run.summary["total_cached_tokens"] == 0, "each batch is of other text"
    assert run.summary["steps"] >= 12
    assert run.summary["ms_per_step"] == pytest.approx(1e3 * run.summary["duration"] / run.summary["steps"])
    assert record.environment["profile"]["device"] == "cpu"


def test_what_does_not_fit_is_said_before_anything_runs(config):
    workload = Workload(num_prompts=1, random_input_len=90_000, random_output_len=10)
    with pytest.raises(ConfigError, match="a prompt of 90000 tokens and 10 of its answer: max_model_len is"):
        bench_engine("throughput", config, OfflineSettings(), workload, lambda *_: lambda _: None)
