"""Runner of one rank: fills the inputs, runs the step function, reads the results back. Knows no request text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samebit.core.plan import BatchPlan, SampleOutput, StepOutput
from samebit.indexing import IndexBuffer
from samebit.inputs import Bucket, InputBuffer
from samebit.kernels.sets import KernelSet
from samebit.models.base import CausalLM
from samebit.runner.step import StepTensors, run_step
from samebit.state.pools import StatePools

_MAX_BUFFERS = 64


class LocalRunner:
    """Executes plans on one device, eagerly. Owner of the input buffers; shares the pools with the model's kernels."""

    def __init__(self, model: CausalLM, kernels: KernelSet, pools: StatePools, device: torch.device) -> None:
        self._model = model
        self._kernels = kernels
        self._pools = pools
        self._device = device
        self._buffers: OrderedDict[Bucket, tuple[InputBuffer, IndexBuffer]] = OrderedDict()

    @torch.inference_mode()
    def execute(self, plan: BatchPlan) -> StepOutput:
        """Run one step to its end."""
        bucket = Bucket.of(plan)
        with _one_torch_thread():
            self._pools.wipe(plan.retired)
            buffer, addresses = self._buffers_of(bucket)
            inputs = buffer.fill(plan)
            return _read_back(plan, run_step(self._model, self._kernels, inputs, addresses, self._pools, bucket))

    def _buffers_of(self, bucket: Bucket) -> tuple[InputBuffer, IndexBuffer]:
        found = self._buffers.pop(bucket, None)
        if found is None:
            inputs = InputBuffer(bucket, self._device)
            found = inputs, IndexBuffer(inputs.view, self._pools)
        self._buffers[bucket] = found
        if len(self._buffers) > _MAX_BUFFERS:
            self._buffers.popitem(last=False)
        return found


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
        result.rows_intact[: len(plan.rows)].tolist(),
        result.pages_intact.tolist(),
        result.rows_written.tolist(),
    )
