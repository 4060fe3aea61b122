"""Runner of one rank: fills the inputs, runs the step function, reads the results back. Knows no request text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from samebit.core.plan import BatchPlan, StepOutput
from samebit.core.request import TokenLogprobs
from samebit.inputs import Bucket
from samebit.kernels.sets import KernelSet
from samebit.models.base import CausalLM
from samebit.runner.cuda_graphs import CudaRecording
from samebit.runner.graphs import Recording, watched
from samebit.runner.ladder import Ladder
from samebit.runner.readback import Results
from samebit.runner.step import Speculation, StepBuffers, run_step
from samebit.state.pools import StatePools

_MAX_PROGRAMS = 64
_SAMPLE_COLUMNS = ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs")
_INERT = BatchPlan(step=0, rows=[], samples=[], entries=[], page_deltas=[])

Graph = Literal["eager", "trace", "cuda"]


@dataclass(frozen=True, slots=True)
class _Place:
    """What the steps of all buckets share."""

    model: CausalLM
    kernels: KernelSet
    pools: StatePools
    device: torch.device
    speculation: Speculation | None
    graph_memory: Any  # Any: torch's private handle of the memory that graphs share; None without graphs


class _Program:
    """The step function on the buffers of one bucket; owner of these buffers."""

    def __init__(self, place: _Place, bucket: Bucket) -> None:
        self._pools = place.pools
        self.buffers = StepBuffers(bucket, place.pools, place.device, place.speculation)
        self.results = Results(place.kernels)
        self._step = (place.model, place.kernels, self.buffers, place.pools, bucket, place.speculation)

    def run(self) -> Tensor:
        """Run the step on what the inputs hold; its results as `results` packs them."""
        return self.results.pack(run_step(*self._step))


class _RecordedProgram(_Program):
    """A program that is recorded on inert inputs, compared with its first real step, and replayed from then on."""

    def __init__(self, place: _Place, bucket: Bucket) -> None:
        super().__init__(place, bucket)
        self.buffers.fill(_INERT)
        self._recording = self._record(place, super().run)
        self._is_checked = False

    def _record(self, place: _Place, step: Callable[[], Tensor]) -> Recording | CudaRecording:
        if place.graph_memory is None:
            return Recording(step, place.kernels.num_launches)
        return CudaRecording(step, place.kernels.num_launches, self._addresses, place.graph_memory)

    def _addresses(self) -> tuple[int, ...]:
        return (self.buffers.inputs.token_ids.data_ptr(), *self._pools.addresses())

    def run(self) -> Tensor:
        """Replay the step on what the inputs hold. Raises GraphError if it is not what an eager step does."""
        if self._is_checked:
            return self._recording.replay()
        result, manifest = watched(super().run)
        self._recording.check(manifest)
        self._is_checked = True
        return result


class LocalRunner:
    """Executes plans on one device. Owner of a program for each bucket; shares the pools with the model's kernels.

    `graph` "eager" runs the step function on buckets that fit; "trace" replays recordings, on few sizes of buckets; "cuda" replays
    graphs of the buckets that `prepare` was given, and runs what fits none of them eagerly.
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
        # Torch's threads have no part in what a GPU does.
        self._threads = _one_torch_thread if device.type == "cpu" else nullcontext
        memory = torch.cuda.graph_pool_handle() if graph == "cuda" else None
        self._place = _Place(model, kernels, pools, device, speculation, memory)
        self._programs: OrderedDict[Bucket, _Program] = OrderedDict()
        self._captured: dict[Bucket, _Program] = {}
        self._ladder = Ladder([])

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> Callable[[], StepOutput]:
        """Begin one step, behind those that were begun before; what is returned waits for its results.

        A CPU has run it when this returns. Of the steps that were begun, at most one may be unread. Raises GraphError if a recording
        cannot be trusted.
        """
        bucket = Bucket.of(plan)
        with self._threads():
            self._pools.wipe(plan.retired)
            program = self._captured_program(bucket)
            if program is None:
                program = self._program(bucket if self._graph == "eager" else bucket.rounded_up())
            program.buffers.fill(plan)
            read = program.results.copy(program.run())
        return lambda: _read_back(plan, read())

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Steps that fit one of `buckets` replay its graph from now on; it is captured then, unless it was before."""
        self._ladder = Ladder(buckets)

    @torch.inference_mode()
    def capture(self, bucket: Bucket) -> _Program:
        """The program that replays the graph of a bucket that was prepared."""
        if bucket not in self._captured:
            self._captured[bucket] = _RecordedProgram(self._place, bucket)
        return self._captured[bucket]

    def forget(self) -> None:
        """Let go of all that was recorded or captured: the model has changed in what recordings hold."""
        self._programs.clear()
        self._captured.clear()
        self._ladder = Ladder([])

    @torch.inference_mode()
    def compile(self, buckets: Sequence[Bucket]) -> None:
        """Have the kernels of steps in `buckets` compiled, side by side, if they are compiled at all."""
        # Buffers are made in there, too, so that no step finds in them what was in memory before.
        self._place.kernels.compile_for(lambda: [_Program(self._place, bucket).run() for bucket in buckets])

    @torch.inference_mode()
    def run_inert(self, bucket: Bucket) -> None:
        """Run a step of no rows in `bucket`, eagerly: it takes the memory that any step of these sizes takes."""
        program = _Program(self._place, bucket)
        program.buffers.fill(_INERT)
        program.run()

    def _captured_program(self, bucket: Bucket) -> _Program | None:
        found = self._ladder.first_that_holds(bucket)
        if found is None:
            return None
        if found not in self._captured:
            self.compile([found])
            self.capture(found)
        return self._captured[found]

    def _program(self, bucket: Bucket) -> _Program:
        program = self._programs.pop(bucket, None)
        if program is None:
            make = _RecordedProgram if self._graph == "trace" else _Program
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


def _read_back(plan: BatchPlan, result: dict[str, np.ndarray]) -> StepOutput:
    samples, rows, entries, drafts = plan.num_samples, len(plan.rows), len(plan.entries), len(plan.drafts)
    columns = [result[name][:samples].tolist() for name in _SAMPLE_COLUMNS]
    tops = [sample.num_top for sample in plan.samples]
    if samples > len(tops):
        tops = [sample.num_top for sample in plan.samples for _ in range(sample.count)]
    # Nobody changes a list of results, so one will do for all who asked for no further tokens.
    nothing: list[Any] = []
    return StepOutput(
        plan.step,
        [
            TokenLogprobs(token, logprob, rank, ids[:top] if top else nothing, logprobs[:top] if top else nothing)
            for top, token, logprob, rank, ids, logprobs in zip(tops, *columns, strict=True)
        ],
        result["finite"][:samples].tolist(),
        result["accepted"][:rows].tolist(),
        result["rows_intact"][:rows].tolist(),
        result["pages_intact"][:entries].tolist(),
        result["rows_written"][:entries].tolist(),
        result["drafts"][:drafts].tolist(),
        result["confidence"][:drafts].tolist(),
    )
