"""Edits of logits on the device: the formula of docs/sampling.md, for the rows that a slice of logits holds."""

import pytest
import torch

from samebit.core.plan import DRAW, BatchPlan, LogitEdits, PlanSample
from samebit.inputs import Bucket, InputBuffer
from samebit.kernels.selection import torch_kernels
from samebit.kernels.values import SampleColumns
from samebit.runner.step import _draw_edited

LOGITS = torch.tensor([[2.0, 1.5, -1.0, -1.5], [2.0, 1.5, -1.0, -1.5]])


def drawn(edits, logits=LOGITS, first=0):
    """Greedy tokens of two logits rows with `edits` each, of which `logits` holds those from `first` on."""
    samples = [PlanSample(0, 0, DRAW, 0.0, 0, 1.0, 0.0, 0, 0, 0, item) for item in edits]
    plan = BatchPlan(step=1, rows=[], samples=samples, entries=[], page_deltas=[])
    inputs = InputBuffer(Bucket.of(plan).rounded_up(), torch.device("cpu")).fill(plan)
    rows = logits.shape[0]
    whole, real = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
    columns = SampleColumns(real, whole, real + 1, real, whole.long(), whole, whole.long(), whole - 1)
    return _draw_edited(torch_kernels(1), logits, inputs, columns, first).target.tolist()


@pytest.mark.parametrize(
    ("edits", "token"),
    [
        (LogitEdits([0], [2.0], [0.0]), 1),  # a likely token becomes less so by division
        (LogitEdits([0, 1, 2], [8.0, 8.0, 0.01], [-9.0, -9.0, 0.0]), 2),
        (LogitEdits([0, 1, 2], [1.0, 1.0, 4.0], [-9.0, -9.0, 0.0]), 3),  # an unlikely one by multiplication
        (LogitEdits([3], [1.0], [4.0]), 3),
        (LogitEdits([0, 1, 3], [1.0] * 3, [-1e30] * 3), 2),
    ],
)
def test_a_row_is_drawn_by_the_formula_and_its_neighbour_as_it_is(edits, token):
    assert drawn([edits, LogitEdits()]) == [token, 0]
    assert drawn([LogitEdits(), edits]) == [0, token]


def test_a_slice_of_logits_takes_the_edits_of_its_own_rows():
    ban = LogitEdits([0], [1.0], [-1e30])
    assert drawn([ban, LogitEdits()], LOGITS[1:], first=1) == [0]
    assert drawn([LogitEdits(), ban], LOGITS[1:], first=1) == [1]
    assert drawn([LogitEdits(), ban], LOGITS[:1], first=0) == [0]


def test_the_logits_themselves_do_not_change():
    before = LOGITS.clone()
    drawn([LogitEdits([0], [2.0], [1.0]), LogitEdits([1], [3.0], [1.0])])
    assert torch.equal(LOGITS, before)


def test_edits_and_masks_are_those_of_their_logits_rows_behind_samples_that_stand_for_several():
    ban, only = LogitEdits([5, 6], [1.0] * 2, [-1e30] * 2), LogitEdits(allowed=b"\x01\0\0\0")
    wanted = [(LogitEdits(), 3), (ban, 1), (LogitEdits(), 2), (only, 1), (ban, 1)]
    samples = [PlanSample(0, 0, DRAW, 0.0, 0, 1.0, 0.0, 0, 0, 0, edits, count) for edits, count in wanted]
    plan = BatchPlan(step=1, rows=[], samples=samples, entries=[], page_deltas=[])
    inputs = InputBuffer(Bucket.of(plan), torch.device("cpu")).fill(plan)
    assert inputs.edit_samples.tolist() == [3, 3, 7, 7]
    assert inputs.mask_samples.tolist() == [6]
