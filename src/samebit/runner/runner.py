"""Runner of one rank: fills the inputs, runs the step function, reads the results back. Knows no request text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from samebit.core.plan import BatchPlan, SampleOutput, StepOutput
from samebit.inputs import Bucket
from samebit.kernels.sets import KernelSet
from samebit.models.base import CausalLM
from samebit.runner.graphs import Recording, watched
from samebit.runner.step import Speculation, StepBuffers, StepTensors, run_step
from samebit.state.pools import StatePools

_MAX_PROGRAMS = 64
_INERT = BatchPlan(step=0, rows=[], samples=[], entries=[], page_deltas=[])

Graph = Literal["eager", "trace"]


@dataclass(frozen=True, slots=True)
class _Place:
    """What the steps of all buckets share."""

    model: CausalLM
    kernels: KernelSet
    pools: StatePools
    device: torch.device
    speculation: Speculation | None


class _Program:
    """The step function on the buffers of one bucket; owner of these buffers."""

    def __init__(self, place: _Place, bucket: Bucket) -> None:
        self.buffers = StepBuffers(bucket, place.pools, place.device)
        self._step = (place.model, place.kernels, self.buffers, place.pools, bucket, place.speculation)

    def run(self) -> StepTensors:
        """Run the step on what the inputs hold."""
        return run_step(*self._step)


class _TracedProgram(_Program):
    """A program that is recorded on inert inputs, compared with its first real step, and replayed from then on."""

    def __init__(self, place: _Place, bucket: Bucket) -> None:
        super().__init__(place, bucket)
        self.buffers.fill(_INERT)
        self._recording = Recording(super().run, place.kernels.num_launches)
        self._is_checked = False

    def run(self) -> StepTensors:
        """Replay the step on what the inputs hold. Raises GraphError if it is not what an eager step does."""
        if self._is_checked:
            return self._recording.replay()
        result, manifest = watched(super().run)
        self._recording.check(manifest)
        self._is_checked = True
        return result


class LocalRunner:
    """Executes plans on one device. Owner of a program for each bucket; shares the pools with the model's kernels.

    `graph` "eager" runs the step function on buckets that fit; "trace" replays recordings, on few sizes of buckets.
    """

    def __init__(
        self,
        model: CausalLM,
        kernels: KernelSet,
        pools: StatePools,
        device: torch.device,
        graph: Graph = "eager",
        speculation: Speculation | None = None,
    ) -> None:
        self._pools = pools
        self._graph = graph
        self._place = _Place(model, kernels, pools, device, speculation)
        self._programs: OrderedDict[Bucket, _Program] = OrderedDict()

    @torch.inference_mode()
    def execute(self, plan: BatchPlan) -> StepOutput:
        """Run one step to its end. Raises GraphError if a recording cannot be trusted."""
        bucket = Bucket.of(plan)
        with _one_torch_thread():
            self._pools.wipe(plan.retired)
            program = self._program(bucket if self._graph == "eager" else bucket.rounded_up())
            program.buffers.fill(plan)
            return _read_back(plan, program.run())

    def _program(self, bucket: Bucket) -> _Program:
        program = self._programs.pop(bucket, None)
        if program is None:
            make = _Program if self._graph == "eager" else _TracedProgram
            program = make(self._place, bucket)
        self._programs[bucket] = program
        if len(self._programs) > _MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return program


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Kernels have their own threads; torch's would only wait for them, and its small copies gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_back(plan: BatchPlan, result: StepTensors) -> StepOutput:
    columns = (result.tokens, result.logprobs, result.ranks, result.finite, result.top_ids, result.top_logprobs)
    samples = [
        SampleOutput(token, logprob, rank, bool(finite), ids[: sample.num_top], logprobs[: sample.num_top])
        for sample, token, logprob, rank, finite, ids, logprobs in zip(
            plan.samples, *(column[: len(plan.samples)].tolist() for column in columns), strict=True
        )
    ]
    return StepOutput(
        plan.step,
        samples,
        result.accepted[: len(plan.rows)].tolist(),
        result.rows_intact[: len(plan.rows)].tolist(),
        result.pages_intact[: len(plan.entries)].tolist(),
        result.rows_written[: len(plan.entries)].tolist(),
        result.drafts[: len(plan.drafts)].tolist(),
        result.confidence[: len(plan.drafts)].tolist(),
    )
