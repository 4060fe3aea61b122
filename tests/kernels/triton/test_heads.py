"""Heads that are normed and turned in one launch: the bits of the operators that it takes the place of, for each head alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels import torch_set
from samebit.kernels.composed import composed
from samebit.kernels.triton.heads import turn_heads
from samebit.kernels.triton.launch import num_launches
from tests.kernels.cases import normal

POSITIONS = 90
SHAPES = [(6, 64), (9, 16), (3, 128), (5, 48), (12, 2), (1, 100), (7, 256)]


def case(device, activation, tokens, heads, width, seed=0):
    """Operands of ``turn_heads``; heads are columns of a wider tensor."""
    x = normal(seed, tokens, heads * width + 32).to(device, activation)[:, 16 : 16 + heads * width]
    gains, cos, sin = (
        normal(seed + n, size, width).to(device) for n, size in ((1, heads), (2, POSITIONS), (3, POSITIONS))
    )
    positions = torch.randint(0, POSITIONS, (tokens,), generator=torch.Generator().manual_seed(seed)).to(device)
    return x, gains, 1e-6, positions, cos, sin


def of_tokens(operands, part):
    """The operands of some of the tokens."""
    x, gains, eps, positions, cos, sin = operands
    return x[part], gains, eps, positions[part], cos, sin


@given(tokens=st.integers(1, 30), shape=st.sampled_from(SHAPES), seed=st.integers(0, 99))
def test_heads_have_the_values_of_a_norm_a_product_and_a_turn(device, tokens, shape, seed):
    for activation, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-8)):
        operands = case(device, activation, tokens, *shape, seed)
        before = num_launches()
        found = turn_heads(activation, *operands, 1)
        assert num_launches() == before + 1
        assert found.dtype is activation
        twin = [x.float().cpu() if torch.is_tensor(x) and x.is_floating_point() else x for x in operands]
        twin[3] = operands[3].cpu()
        wanted = composed(torch_set.IMPLEMENTATIONS)["turn_heads"](*twin, 1)
        torch.testing.assert_close(found.float().cpu(), wanted, rtol=bound, atol=bound * 4)


@given(tokens=st.integers(1, 30), first=st.integers(0, 29), shape=st.sampled_from(SHAPES))
def test_heads_do_not_know_their_company(device, tokens, first, shape):
    one = slice(first % tokens, first % tokens + 1)
    for activation in (torch.float32, torch.bfloat16):
        operands = case(device, activation, tokens, *shape)
        alone = turn_heads(activation, *of_tokens(operands, one), 1)
        assert torch.equal(turn_heads(activation, *operands, 1)[one], alone)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width"), [(6, 64), (20, 128), (48, 128)])
def test_heads_of_models_are_pure(device, activation, heads, width):
    operands = case(device, activation, 2048, heads, width)
    whole = turn_heads(activation, *operands, 1)
    for count in (*range(1, 65), 512):
        part = slice(2047 * count % (2048 - count), 2047 * count % (2048 - count) + count)
        assert torch.equal(turn_heads(activation, *of_tokens(operands, part), 1), whole[part])
