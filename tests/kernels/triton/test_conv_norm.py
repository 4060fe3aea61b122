"""A norm in the launch of the convolution before it: the bits of both by themselves."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels.triton import conv, rows
from samebit.kernels.triton.launch import num_launches
from samebit.kernels.values import ConvIndex
from tests.kernels.cases import normal
from tests.kernels.triton import conv_steps
from tests.kernels.triton.compiling import told
from tests.kernels.triton.conv_steps import RING, TAPS, kept, programs_in_order

EPS = 1e-6


def both_ways(device, dtype, channels, step):
    """Output, norm, pool and tags of one launch, and of the convolution and the norm by themselves; a step is random."""
    ix, sources, num_rows = step
    tokens = ix.write_rows.shape[0]
    x, residual = normal(1, tokens, channels), normal(2, tokens, channels)
    x[int(ix.query_start[-1]) :] = torch.nan
    taps, gain = normal(3, TAPS, channels), normal(4, channels)
    values, tags = conv_steps.pool(channels, num_rows)
    read = torch.tensor(sorted(sources - {0}), dtype=torch.long)
    values[read] = kept(normal(5, len(read), channels), dtype)
    index = [getattr(ix, name).to(device) for name in ConvIndex.__slots__]
    x, taps, residual, gain = (t.to(device) for t in (x.to(dtype), taps, residual, gain))
    pools = [(values.to(device, dtype, copy=True), tags.to(device, copy=True)) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "is_normed_at_once", lambda *_: True)
        before = num_launches()
        y, normed = conv.short_conv_norm(dtype, x, taps, *pools[0], *index, residual, gain, EPS, 1)
        assert num_launches() == before + 1
    wanted = conv.short_conv(x, taps, *pools[1], *index, residual, 1)
    alone = rows.rms_norm(dtype, wanted, gain, EPS, 1)
    return (y, normed, pools[0][0].nan_to_num(7.0), pools[0][1]), (
        wanted,
        alone,
        pools[1][0].nan_to_num(7.0),
        pools[1][1],
    )


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32),
    channels=st.sampled_from([8, 304, 600]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_outputs_norm_rows_and_tags_are_those_of_two_launches(device, seed, channels, dtype):
    step = conv_steps.random_step(random.Random(seed))
    with programs_in_order(seed):
        found, wanted = both_ways(device, dtype, channels, step)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_many_tokens_have_the_norm_in_a_launch_of_its_own(device, monkeypatch, is_at_once):
    monkeypatch.setattr(conv, "NORMED_WARPS", 20 if is_at_once else 4)
    ix, _, num_rows = conv_steps.random_step(random.Random(0), num_rows=1)
    x, before = normal(1, ix.write_rows.shape[0], 16).to(device), num_launches()
    pool = [t.to(device) for t in conv_steps.pool(16, num_rows, values=1.0)]
    index = [getattr(ix, name).to(device) for name in ConvIndex.__slots__]
    taps, gain = normal(2, TAPS, 16).to(device), normal(3, 16).to(device)
    y, normed = conv.short_conv_norm(torch.float32, x, taps, *pool, *index, x, gain, EPS, 1)
    assert num_launches() == before + (1 if is_at_once else 2)
    assert torch.equal(normed, rows.rms_norm(torch.float32, y, gain, EPS, 1))


def test_operands_whose_loads_would_be_wider_than_those_of_the_norm_are_refused(device):
    ix, _, num_rows = conv_steps.random_step(random.Random(0), num_rows=1)
    x, index = torch.zeros(ix.write_rows.shape[0], 16), [getattr(ix, name).to(device) for name in ConvIndex.__slots__]
    pool = [t.to(device) for t in conv_steps.pool(16, num_rows)]
    x, taps, gain = x.to(device), torch.zeros(TAPS, 16, device=device).bfloat16(), torch.ones(16, device=device)
    with pytest.raises(AssertionError, match="bfloat16"):
        conv.short_conv_norm(torch.float32, x, taps, *pool, *index, x, gain, EPS, 1)


def test_which_steps_have_one_launch_is_a_function_of_sizes():
    def at_once(*sizes):
        return conv.is_normed_at_once(*sizes)

    assert all(
        at_once(*sizes) for sizes in [(1, 1, 2048), (128, 128, 2048), (224, 28, 2048), (64, 64, 4096), (128, 128, 256)]
    )
    assert not any(
        at_once(*sizes) for sizes in [(256, 256, 2048), (8192, 8, 2048), (128, 128, 4096), (1, 1, 8192), (1, 1, 63)]
    )


def test_a_norm_behind_a_convolution_lies_over_threads_as_the_norm_by_itself(tmp_path):
    pairs = told("norm_layouts", tmp_path)
    assert len(pairs) > 1
    for behind, alone in pairs:
        assert len(alone) == 1
        assert set(behind) == set(alone)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [256, 512, 768, 2048, 4096, 1000])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 32, 128, 300])
@pytest.mark.parametrize("max_count", [1, 8, 3 * RING])
def test_rows_of_real_width_are_those_of_two_launches(device, activation, num_rows, channels, max_count):
    step = conv_steps.random_step(random.Random(num_rows), max_count, num_rows)
    for one, other in zip(*both_ways(device, activation, channels, step), strict=True):
        assert torch.equal(one, other)
