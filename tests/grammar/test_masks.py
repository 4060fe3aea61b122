"""Masks of allowed tokens on the device: what is not allowed is not drawn, and everything else is as it was."""

import numpy as np
import pytest
import torch

from samebit.core.plan import DRAW, BatchPlan, LogitEdits, PlanSample
from samebit.inputs import Bucket, InputBuffer
from samebit.kernels.selection import torch_kernels
from samebit.kernels.values import SampleColumns
from samebit.runner.step import _draw_edited

VOCAB = 70  # three words, the last not full


def mask(*token_ids):
    bits = np.zeros(96, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def drawn(edits, logits, first=0, round_up=True):
    samples = [PlanSample(0, 0, DRAW, 0.0, 0, 1.0, 0.0, 0, 0, 0, item) for item in edits]
    plan = BatchPlan(step=1, rows=[], samples=samples, entries=[], page_deltas=[])
    bucket = Bucket.of(plan).rounded_up() if round_up else Bucket.of(plan)
    inputs = InputBuffer(bucket, torch.device("cpu")).fill(plan)
    rows = logits.shape[0]
    whole, real = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
    columns = SampleColumns(real, whole, real + 1, real, whole.long(), whole, whole.long(), whole - 1)
    return _draw_edited(torch_kernels(1), logits, inputs, columns, first).target.tolist()


def falling(rows):
    """Logits of which lower ids have larger ones."""
    return -torch.arange(VOCAB, dtype=torch.float32).expand(rows, VOCAB).contiguous()


@pytest.mark.parametrize("round_up", [False, True])
@pytest.mark.parametrize("token", [0, 31, 32, 63, 64, 69])
def test_the_likeliest_of_the_allowed_tokens_is_drawn_and_neighbours_are_left_alone(token, round_up):
    allowed = LogitEdits(allowed=mask(token, 69))
    assert drawn([LogitEdits(), allowed, LogitEdits()], falling(3), round_up=round_up) == [0, token, 0]


def test_a_slice_of_logits_takes_the_masks_of_its_own_rows():
    rows = [LogitEdits(), LogitEdits(allowed=mask(5)), LogitEdits(allowed=mask(40))]
    assert drawn(rows, falling(2), first=1) == [5, 40]
    assert drawn(rows, falling(2), first=0) == [0, 5]


def test_an_edit_moves_a_token_among_the_allowed_and_frees_none():
    biased = LogitEdits([7, 9], [1.0, 1.0], [100.0, 100.0], mask(3, 9, 20))
    assert drawn([biased], falling(1)) == [9]


def test_logits_are_not_changed_by_a_mask():
    logits = falling(2)
    drawn([LogitEdits(allowed=mask(3))] * 2, logits)
    assert torch.equal(logits, falling(2))
