"""Sum, norm, product and gated activation in one launch: the bits of each by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels.triton import linear, normed_linear, rows
from samebit.kernels.triton.launch import num_launches
from samebit.kernels.triton.linear import BLOCK_K
from tests.kernels.cases import normal
from tests.kernels.triton.compiling import told

EPS = 1e-6
FEW = normed_linear.MOST_ROWS


def operands(device, activation, num_rows, num_out, width, seed=1, *, is_first=False):
    """Two terms of rows, of which the second is an activation and the first, if it is the ``first`` of a model, too; a gain; a packed weight."""
    x = normal(seed, num_rows, width).to(device, activation if is_first else torch.float32)
    y = normal(seed + 1, num_rows, width).to(device, activation)
    weight = linear.pack_linear(normal(seed + 2, num_out, width).to(device) / width**0.5, activation)
    return x, y, normal(seed + 3, width).to(device), weight


def at_once(activation, x, y, gain, weight, *, is_gated, library=False):
    return normed_linear.normed_linear(activation, x, y, gain, EPS, weight, weight.shape[0], library, is_gated, 1)


def by_themselves(activation, x, y, gain, weight, *, is_gated):
    total, normed = rows.add_norm(activation, x, y, gain, EPS, 1)
    product = linear.linear(activation, normed, weight, weight.shape[0], False, 1)
    return total, rows.swiglu(activation, product, 1) if is_gated else product


@settings(max_examples=40)
@given(
    num_rows=st.integers(1, FEW + 2),
    columns=st.integers(1, 150),
    steps=st.integers(1, 4),
    is_gated=st.booleans(),
    is_first=st.booleans(),
    activation=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_bits_are_those_of_separate_launches(
    device, num_rows, columns, steps, is_gated, is_first, activation, seed
):
    num_out = 2 * columns if is_gated else columns
    given_to = operands(device, activation, num_rows, num_out, steps * BLOCK_K[activation], seed, is_first=is_first)
    found = at_once(activation, *given_to, is_gated=is_gated)
    for one, wanted in zip(found, by_themselves(activation, *given_to, is_gated=is_gated), strict=True):
        assert one.dtype is wanted.dtype
        assert torch.equal(one, wanted)


@pytest.mark.parametrize(("num_out", "width", "is_gated"), [(768, 256, False), (1152, 256, True), (100, 192, True)])
def test_a_row_does_not_know_its_company(device, activation, num_out, width, is_gated):
    """Nor whether there are so few that one launch does it all."""
    x, y, gain, weight = operands(device, activation, FEW + 3, num_out, width)
    together = at_once(activation, x, y, gain, weight, is_gated=is_gated)
    for part in (slice(1), slice(3, 4), slice(2, 2 + FEW)):
        alone = at_once(activation, x[part], y[part], gain, weight, is_gated=is_gated)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one, all_of_them[part])


def launches_of(activation, *given_to):
    before = num_launches()
    found = at_once(activation, *given_to, is_gated=True)
    launches = num_launches() - before
    for one, wanted in zip(found, by_themselves(activation, *given_to, is_gated=True), strict=True):
        assert torch.equal(one, wanted)
    return launches


@pytest.mark.parametrize(
    ("num_rows", "width", "launches"),
    [(FEW, normed_linear.MOST_COLUMNS, 1), (FEW + 1, 64, 3), (1, normed_linear.MOST_COLUMNS + 64, 3), (1, 80, 3)],
)
def test_few_short_rows_of_whole_steps_take_one_launch(device, activation, num_rows, width, launches):
    assert launches_of(activation, *operands(device, activation, num_rows, 60, width)) == launches


def test_rows_that_a_norm_of_their_own_lays_out_otherwise_are_normed_by_it(device, activation):
    """A second term that is no activation, terms whose rows lie apart, and terms that are not aligned."""
    x, y, gain, weight = operands(device, activation, 3, 60, 64)
    other = torch.float32 if activation is torch.bfloat16 else torch.bfloat16
    apart, shifted = y.new_zeros(3, 72)[:, :64].copy_(y), y.new_zeros(3 * 64 + 1)[1:].view(3, 64).copy_(y)
    assert launches_of(activation, x, y, gain, weight) == 1
    for term in (y.to(other), apart, shifted):
        assert launches_of(activation, x, term, gain, weight) == 3
    for term in (torch.cat([x, x], dim=1)[:, :64], torch.cat([x.flatten(), x[0]])[1 : 3 * 64 + 1].view(3, 64)):
        assert launches_of(activation, term, y, gain, weight) == 3


def test_rows_that_are_not_there_are_left_alone(device, activation):
    x, y, gain, weight = operands(device, activation, 5, 96, 64)
    wanted = at_once(activation, x[:3].clone(), y[:3].clone(), gain, weight, is_gated=True)
    x[3:], y[3:] = torch.nan, torch.nan
    found = at_once(activation, x[:3], y[:3], gain, weight, is_gated=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_norm_lies_over_threads_as_it_does_alone(tmp_path):
    """Of which the order of its sum follows. Rows are more in one tile, so only the layout along a row is compared."""
    for with_product, alone in told("norm_layouts", tmp_path, "products"):
        assert len(with_product) == len(alone) == 1
        assert with_product[0].split(" ", 1)[1] == alone[0].split(" ", 1)[1]
