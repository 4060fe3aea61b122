"""All results of a step come to the host at once, as they are, and nothing is read from the device before."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from samebit.core.config import EngineConfig, SpeculativeConfig
from samebit.engine.engine import Engine
from samebit.inputs import InputBuffer
from samebit.kernels.selection import torch_kernels
from samebit.runner.graphs import FROZEN
from samebit.runner.readback import Results
from samebit.runner.step import StepTensors
from tests.driving import make_request, run_alone
from tests.random_checkpoint import write_checkpoint

DTYPES = [torch.bool, torch.int32, torch.int64, torch.float32]
NAMES = [field.name for field in fields(StepTensors)]
shapes = st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(0, 7)))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=len(NAMES), max_size=len(NAMES)), st.booleans())
def test_fields_of_any_size_and_dtype_come_back_as_they_are(kinds, is_strided):
    def some(dtype, shape):
        is_apart = is_strided and min(shape) > 1
        whole = torch.randint(-9, 9, (*shape, 2) if is_apart else shape).to(dtype)
        return whole[..., 0] if is_apart else whole

    given = {name: some(dtype, shape) for name, (dtype, shape) in zip(NAMES, kinds, strict=True)}
    results = Results(torch_kernels(1))
    found = results.copy(results.pack(StepTensors(**given)))()
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.numpy().dtype, name
        assert found[name].tolist() == tensor.tolist(), name


def test_results_of_two_steps_can_wait_at_once():
    results = Results(torch_kernels(1))

    def begin(word):
        given = {name: torch.full((3, 2), word + place) for place, name in enumerate(NAMES)}
        return results.copy(results.pack(StepTensors(**given)))

    reads = [begin(10)]
    for step in range(1, 6):
        reads.append(begin(10 + step))
        found = reads[step - 1]()
        assert [found[name][0, 0] for name in NAMES] == [9 + step + place for place in range(len(NAMES))]


class Watch(TorchDispatchMode):
    """Notes operations by name while `is_on`."""

    def __init__(self):
        super().__init__()
        self.is_on, self.seen = False, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_on:
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("small"), depths=3))


@pytest.mark.parametrize("graph", ["eager", "trace"])
@pytest.mark.parametrize("method", [None, "mtp"])
def test_between_fill_and_readback_no_value_is_read(model, graph, method, monkeypatch):
    wanted = method and SpeculativeConfig(method=method)
    engine = Engine(EngineConfig(model=model, graph=graph, num_threads=1, page_size=4, speculative_config=wanted))
    watch, fill, copy = Watch(), InputBuffer.fill, Results.copy
    counts = {"fills": 0, "reads": 0}

    def fill_then_watch(self, plan):
        view = fill(self, plan)
        counts["fills"] += 1
        watch.is_on = True
        return view

    def copy_unwatched(self, packed):
        watch.is_on = False
        counts["reads"] += 1
        return copy(self, packed)

    monkeypatch.setattr(InputBuffer, "fill", fill_then_watch)
    monkeypatch.setattr(Results, "copy", copy_unwatched)
    request = make_request("r", list(range(9)), max_tokens=12, logprobs=2)
    params = msgspec.structs.replace(request.params, logit_bias={3: 1.0}, frequency_penalty=0.5)
    with watch:
        result = run_alone(engine, msgspec.structs.replace(request, params=params))
    assert result.error is None
    assert counts["reads"] > 3
    # A recording takes inert inputs once more for each of its buckets.
    assert counts["fills"] == counts["reads"] + (len(engine._runner._programs) if graph == "trace" else 0)
    assert any(name.startswith("samebit::joined_bytes") for name in watch.seen), "steps were watched"
    assert not FROZEN.intersection(watch.seen)
