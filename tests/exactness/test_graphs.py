"""Recorded and replayed steps give the bits of eager ones, and a recording that cannot be trusted is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from samebit.core.config import Schedule
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.device import buckets_of
from samebit.models.hidden import Hidden
from tests.driving import make_request, run, run_alone
from tests.exactness.test_small_model import pools, schedules, traffic


@settings(max_examples=settings.default.max_examples // 4)
@given(traffic=traffic(), schedule=schedules, pools=pools)
def test_replayed_steps_give_the_bits_of_a_cold_solo_eager_run(make_engine, cold, traffic, schedule, pools):
    requests, arrivals = traffic
    engine = make_engine(graph="trace", schedule=schedule, max_num_batched_tokens=20, **pools)
    for _ in range(2):
        results = run(engine, requests, arrivals)
        for request in requests:
            assert results[request.request_id] == cold(request)
    assert engine.scheduler.counters.num_refused_checkpoints == 0


@pytest.mark.parametrize("pad", range(6))
def test_no_amount_of_padding_changes_a_bit(make_engine, cold, pad):
    request = make_request("r", list(range(30, 30 + 9)), max_tokens=5, temperature=0.9)
    engine = make_engine(graph="trace", schedule=Schedule(pad_tokens=pad, pad_rows=pad))
    assert run_alone(engine, request) == cold(request)


def test_a_step_is_recorded_once_for_its_sizes(make_engine):
    engine = make_engine(graph="trace", enable_prefix_caching=False)
    run_alone(engine, make_request("a", list(range(7)), max_tokens=40))
    num_programs = len(engine._runner._programs)
    run_alone(engine, make_request("b", list(range(8)), max_tokens=40))
    assert len(engine._runner._programs) == num_programs
    assert num_programs < 10


EXTRAS = {
    "logprobs": {"logprobs": 5},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {3: 2.0, 7: -100.0}, "logprobs": 20},
    "bans": {"min_tokens": 6, "stop_token_ids": list(range(100))},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{2,12}")},
}


def requests_with_extras():
    return [
        make_request(name, list(range(number, number + 9)), max_tokens=10, temperature=0.7, **extra)
        for number, (name, extra) in enumerate(EXTRAS.items())
    ]


@pytest.mark.parametrize("when", ["start", "use"])
def test_steps_with_edits_masks_and_logprobs_are_replayed_in_buckets_with_room_for_them(make_engine, cold, when):
    """Captured as on a GPU."""
    engine = make_engine(graph="trace", max_num_seqs=6, max_num_batched_tokens=24)
    runner = engine._runner
    buckets = buckets_of(engine._config, engine._loaded, engine.pools.geometry)
    runner.prepare(buckets)
    for bucket in buckets if when == "start" else []:
        runner.capture(bucket)
    requests = requests_with_extras()
    results = run(engine, requests, [0, 0, 1, 3, 4])
    for request in requests:
        assert results[request.request_id] == cold(request), request.request_id
    assert not runner._programs, "no step was of other sizes"
    many = make_request("many", list(range(40)), max_tokens=2, prompt_logprobs=1, logit_bias={3: 1.0})
    assert run_alone(engine, many) == cold(many)


def test_inert_inputs_change_no_pool_outside_the_sinks(make_engine):
    engine = make_engine(graph="trace")
    run_alone(engine, make_request("a", list(range(30)), max_tokens=3))
    pools = engine._runner._pools
    live = {
        "rows": [pool.rows[2:] for pool in pools.conv],
        "row tags": [pools.row_tags[:, 2:]],
        "pages": [t[1:] for group in pools.kv for pool in group for t in (pool.k, pool.v)],
        "page tags": [tags[:, 1:] for tags in pools.page_tags],
        "tables": [t[1:] for t in (pools.tables.length, pools.tables.ring_tags, *pools.tables.page_stamps)],
    }
    before = {name: [tensor.clone() for tensor in tensors] for name, tensors in live.items()}
    engine._runner._programs.clear()
    from samebit.inputs import Bucket

    with torch.inference_mode():
        engine._runner._program(Bucket(tokens=16, rows=4, samples=4, edits=2, entries=4, drafts=2, deltas=4, top=2))
    for name, tensors in live.items():
        for tensor, copy in zip(tensors, before[name], strict=True):
            assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0)), name


class Spoiled:
    """A model whose forward is followed by something that a recording cannot hold."""

    def __init__(self, model, extra):
        self._model, self._extra = model, extra

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, index, pools):
        hidden = self._model.forward(index, pools).final
        return Hidden(self._extra(hidden, index))


def truth_test(hidden, index):
    return hidden + 1 if index.num_tokens > 3 else hidden


def host_read(hidden, index):
    return hidden * int(index.num_tokens)


def boolean_index(hidden, index):
    hidden[index.positions > 2] = 0
    return hidden


def a_branch_on_a_shape_that_values_decide(hidden, index):
    return hidden[: len(torch.nonzero(index.positions))]


@pytest.mark.parametrize("extra", [truth_test, host_read, boolean_index, a_branch_on_a_shape_that_values_decide])
def test_a_step_that_reads_a_value_is_not_recorded(make_engine, extra):
    engine = make_engine(graph="trace")
    runner = engine._runner
    runner._place = replace(runner._place, model=Spoiled(runner._place.model, extra))
    result = run_alone(engine, make_request("r", list(range(9))))
    assert result.finish_reason == "error"
    assert "GraphError" in result.error
    assert "frozen into the recording" in result.error


def test_a_branch_that_was_not_taken_when_recording_is_found_by_the_manifest(make_engine):
    """The second fault of a prefix cache that lost its convolution state: a Python `if`, false at capture."""
    engine = make_engine(graph="trace")
    runner = engine._runner
    live = []

    def track(hidden, index):
        # What a host-side flag does: it is off while inert inputs are recorded, and on for a real request.
        return hidden + 0 if live else hidden

    runner._place = replace(runner._place, model=Spoiled(runner._place.model, track))
    original = runner._program

    def record_then_go_live(bucket):
        live.clear()
        program = original(bucket)
        live.append(True)
        return program

    runner._program = record_then_go_live
    result = run_alone(engine, make_request("r", list(range(9))))
    assert result.finish_reason == "error"
    assert "aten::add.Tensor" in result.error


def test_a_buffer_that_has_moved_is_not_replayed(make_engine):
    engine = make_engine(graph="trace", enable_prefix_caching=False)
    assert run_alone(engine, make_request("a", list(range(8)), max_tokens=6)).finish_reason == "length"
    table = engine._runner._pools.tables.length
    with torch.inference_mode():
        table.set_(table.clone())
    result = run_alone(engine, make_request("b", list(range(8)), max_tokens=6))
    assert result.finish_reason == "error"
    assert "has moved since it was recorded" in result.error


def test_a_native_kernel_that_the_dispatcher_does_not_see_is_refused(make_engine):
    engine = make_engine(graph="trace")
    runner = engine._runner
    kernels = runner._place.kernels
    if not kernels.name.startswith("native"):
        pytest.skip(f"{kernels.name} kernels are not in C")  # the fault is a call of C that torch does not see
    import ctypes

    from samebit.kernels.native.build import load_library

    swiglu = load_library(kernels.name.removeprefix("native-")).functions.swiglu

    def call_c_directly(hidden, index):
        out = torch.empty(hidden.shape[0], hidden.shape[1] // 2)
        swiglu(*(ctypes.c_void_p(t.data_ptr()) for t in (hidden, out)), hidden.shape[0], hidden.shape[1] // 2, 1)
        return hidden

    runner._place = replace(runner._place, model=Spoiled(runner._place.model, call_c_directly))
    result = run_alone(engine, make_request("r", list(range(9))))
    assert result.finish_reason == "error"
    assert "left no trace" in result.error
