"""Runs a model over one sequence without a scheduler: plans made by hand, one slot, pages 1 .. n."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from samebit.core.plan import BatchPlan, PageDelta, PageId, PlanRow, SlotId
from samebit.indexing import IndexBuffer, StepIndex
from samebit.inputs import Bucket, InputBuffer
from samebit.kernels.selection import torch_kernels
from samebit.models.base import CausalLM
from samebit.state.layout import StateGeometry
from samebit.state.pools import StatePools

PAGE_SIZE = 4
CPU = torch.device("cpu")


class Sequence:
    """One sequence in slot 1 of poisoned pools of its own."""

    def __init__(self, model: CausalLM, max_length: int, page_size: int = PAGE_SIZE) -> None:
        layout = model.state_layout()
        num_pages = -(-max_length // page_size)
        geometry = StateGeometry(
            layout=layout,
            page_size=page_size,
            num_slots=1,
            num_snapshots=1,
            num_pages=(num_pages,) * len(layout.groups),
            max_length=max_length,
        )
        self._model = model
        self.pools = StatePools(geometry, CPU, poison=True)
        self._kernels = torch_kernels(1)
        self._length = 0
        self._step = 0

    def advance(self, token_ids: list[int], pad_tokens: int = 0) -> Tensor:
        """Run one step over the next tokens; the logits after each of them, [len(token_ids), V]."""
        hidden = self._model.forward(self.next_index(token_ids, pad_tokens), self.pools.whole).final
        return self._model.logits(hidden[: len(token_ids)])

    def next_index(self, token_ids: list[int], pad_tokens: int = 0) -> StepIndex:
        """Addresses of a step over the next tokens, which count as computed from here on."""
        geometry = self.pools.geometry
        start, end = self._length, self._length + len(token_ids)
        first, last = -(-start // geometry.page_size), -(-end // geometry.page_size)
        self._step += 1
        self._length = end
        plan = BatchPlan(
            step=self._step,
            rows=[PlanRow("r", SlotId(1), 1, start, len(token_ids), token_ids)],
            samples=[],
            entries=[],
            page_deltas=[
                PageDelta(group, SlotId(1), index, PageId(index + 1))
                for group in range(len(geometry.layout.groups))
                for index in range(first, last)
            ],
            pad_tokens=pad_tokens,
        )
        bucket = Bucket.of(plan)
        inputs = InputBuffer(bucket, CPU).fill(plan)
        return IndexBuffer(inputs, self.pools, bucket.longest).fill(self._kernels)


def chunked_logits(model: CausalLM, token_ids: list[int], chunks: Iterable[int], pad_tokens: int = 0) -> Tensor:
    """Logits after every token, the sequence cut into `chunks` (the last one takes what is left)."""
    sequence = Sequence(model, len(token_ids))
    parts: list[Tensor] = []
    done = 0
    for size in [*chunks, len(token_ids)]:
        if done < len(token_ids):
            parts.append(sequence.advance(token_ids[done : done + size], pad_tokens))
            done += size
    return torch.cat(parts)
