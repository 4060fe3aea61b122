"""Keys and values convolved on their way into pages: the bits of a convolution and of a write by themselves."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels import torch_set
from samebit.kernels.composed import composed
from samebit.kernels.triton import conv_heads
from samebit.kernels.triton.launch import num_launches
from samebit.kernels.triton.set import implementations
from samebit.kernels.values import ConvIndex
from tests.kernels.cases import normal
from tests.kernels.triton import conv_steps
from tests.kernels.triton.compiling import told
from tests.kernels.triton.conv_steps import TAPS, kept, programs_in_order

# Query heads, heads of keys and values, columns of a head, tokens of a page.
SHAPES = [(4, 2, 64, 16), (5, 3, 128, 4), (1, 8, 128, 1), (4, 16, 64, 4), (1, 1, 256, 4), (9, 33, 8, 4)]


def heads_case(device, dtype, shape, step, seed=0):
    """Operands of ``conv_heads`` for a random step: queries, keys and values are columns of one wider tensor.

    Padding has no slot; of other tokens, some have none either. Pages hold sevens.
    """
    (heads, kv_heads, width, page), (ix, sources, num_rows) = shape, step
    tokens, live, channels = ix.write_rows.shape[0], int(ix.query_start[-1]), 2 * kv_heads * width
    fused = normal(seed, tokens, heads * width + channels + 8)
    fused[live:] = torch.nan
    q, kv, _ = fused.to(device, dtype).split([heads * width, channels, 8], 1)
    values, tags = conv_steps.pool(channels, num_rows)
    read = torch.tensor(sorted(sources - {0}), dtype=torch.long)
    values[read] = kept(normal(seed + 1, len(read), channels), dtype)
    generator, num_pages = torch.Generator().manual_seed(seed), tokens // page + 2
    slots = torch.randperm(num_pages * page - 1, generator=generator)[:tokens] + 1
    slots[torch.rand(tokens, generator=generator) < 0.2], slots[live:] = 0, 0
    # A page is stamped by one token at most: which of several is the last is not said.
    stamps = torch.where(torch.rand(tokens, generator=generator) < 0.5, slots // page, 0)
    stamps[[n for n in range(tokens) if int(stamps[n]) in stamps[:n].tolist()]] = 0
    pages = torch.full((num_pages, kv_heads, page, width), 7.0, dtype=dtype, device=device)
    index = [getattr(ix, name) for name in ConvIndex.__slots__]
    taps, *gains = (
        normal(seed + n, *size).to(device) for n, size in ((2, (TAPS, channels)), (3, (width,)), (4, (width,)))
    )
    return (
        q, kv, taps, values.to(device, dtype), tags.to(device), *(x.to(device) for x in index), *gains, 1e-6, pages,
        pages.clone(), torch.zeros(num_pages, dtype=torch.int64, device=device), slots.to(device, torch.int32),
        stamps.to(device, torch.int32), (slots * 3 + 2**40).to(device),
    )  # fmt: skip


def run_heads(convolve, operands):
    """Queries of live tokens, pool, tags, pages and stamps that a step leaves; it works on copies of what it changes."""
    changed = (3, 4, 19, 20, 21)
    operands = [x.clone() if n in changed else x for n, x in enumerate(operands)]
    q = convolve(*operands, 1)
    return [x.cpu().nan_to_num(9.0) for x in (q[: int(operands[5][-1])], *(operands[n] for n in changed))]


def in_two_launches(dtype):
    """The same operator of the launches that it is otherwise made of."""
    kernels = implementations(dtype)

    def convolve(q, kv, *others):
        *conv, q_gain, k_gain, eps, k_pages, v_pages, page_tags, slots, stamped, stamps, threads = others
        k, v = kernels["short_conv"](kv, *conv, None, threads).chunk(2, 1)
        pages = k_pages, v_pages, page_tags, slots, stamped, stamps
        return kernels["write_heads"](q, k, v, q_gain, k_gain, eps, *pages, None, None, None, threads)

    return convolve


def both_ways(device, dtype, shape, step, seed=0):
    """What one launch leaves, and what two do."""
    operands = heads_case(device, dtype, shape, step, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_heads, "is_written_at_once", lambda *_: True)
        before = num_launches()
        found = run_heads(conv_heads.conv_heads, operands)
        assert num_launches() == before + 1
    return found, run_heads(in_two_launches(dtype), operands)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 8),
    max_count=st.integers(1, 9),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_queries_pages_stamps_rows_and_tags_are_those_of_two_launches(device, seed, num_rows, max_count, shape, dtype):
    step = conv_steps.random_step(random.Random(seed), max_count, num_rows)
    with programs_in_order(seed):
        found, wanted = both_ways(device, dtype, shape, step, seed)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", [0, 20, 35])  # an entry is copied from a row's history, which the step overwrites
def test_the_tags_of_a_row_are_left_to_one_block_of_channels(device, seed):
    step = conv_steps.random_step(random.Random(seed), 14, 1)
    with programs_in_order(seed):
        found, wanted = both_ways(device, torch.float32, (1, 8, 128, 1), step, seed)
    assert all(map(torch.equal, found, wanted))


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), shape=st.sampled_from(SHAPES))
def test_rows_of_many_tokens_are_those_of_two_launches(device, seed, shape):
    found, wanted = both_ways(device, torch.float32, shape, conv_steps.random_step(random.Random(seed)), seed)
    assert all(map(torch.equal, found, wanted))


def test_heads_agree_with_the_twin(device):
    operands = heads_case(device, torch.float32, SHAPES[0], conv_steps.random_step(random.Random(3), 9, 3))
    found = run_heads(conv_heads.conv_heads, operands)
    wanted = run_heads(
        composed(torch_set.IMPLEMENTATIONS)["conv_heads"], [x.cpu() if torch.is_tensor(x) else x for x in operands]
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("warps", "width", "num_launched"), [(120, 64, 1), (8, 64, 2), (1056, 48, 2), (1056, 4, 2)])
def test_many_tokens_and_heads_of_other_widths_are_two_launches(device, monkeypatch, warps, width, num_launched):
    monkeypatch.setattr(conv_heads, "NORMED_WARPS", warps)
    step = conv_steps.random_step(random.Random(1), 3, 1)
    operands = heads_case(device, torch.float32, (4, 2, width, 4), step)
    before = num_launches()
    found = run_heads(conv_heads.conv_heads, operands)
    assert num_launches() == before + num_launched
    assert all(map(torch.equal, found, run_heads(in_two_launches(torch.float32), operands)))


@pytest.mark.parametrize("name", ["taps", "rows"])
def test_operands_whose_loads_or_rounding_would_be_others_than_those_of_two_launches_are_refused(device, name):
    operands = list(heads_case(device, torch.float32, SHAPES[0], conv_steps.random_step(random.Random(1), 3, 1)))
    at = {"taps": 2, "rows": 3}[name]
    operands[at] = operands[at].bfloat16()
    with pytest.raises(AssertionError, match="bfloat16"):
        conv_heads.conv_heads(*operands, 1)


def test_which_steps_have_one_launch_is_a_function_of_sizes():
    window, full, small = (16, 8, 128), (16, 4, 128), (4, 2, 64)
    at_once = conv_heads.is_written_at_once
    assert all(at_once(*step, *heads) for step in [(1, 1), (8, 1), (32, 32)] for heads in (window, full, small))
    assert at_once(64, 8, *full)
    assert at_once(112, 112, *small)
    assert not any(at_once(*step, *heads) for step in [(64, 64), (8192, 1)] for heads in (window, (32, 8, 128)))
    assert not any(at_once(1, 1, 4, 2, width) for width in (4, 48, 100))


def test_heads_behind_a_convolution_lie_over_threads_as_those_that_are_only_written(tmp_path):
    pairs = told("norm_layouts", tmp_path, "heads")
    assert len(pairs) > 1
    for behind, alone in pairs:
        assert len(set(alone)) == 1
        assert set(behind) == set(alone)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 8, 128, 64), (16, 4, 128, 64), (4, 2, 64, 16), (32, 8, 128, 64)])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 32, 100])
@pytest.mark.parametrize("max_count", [1, 8, 27])
def test_heads_of_models_are_those_of_two_launches(device, activation, num_rows, max_count, shape):
    step = conv_steps.random_step(random.Random(num_rows), max_count, num_rows)
    for one, other in zip(*both_ways(device, activation, shape, step), strict=True):
        assert torch.equal(one, other)
