"""Norm, gated activation and routing: kernels that read one row."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.cases import normal

WIDTHS = [1, 7, 63, 64, 100, 257]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_norm_agrees_with_its_formula(kernels, width):
    x, gain = normal(1, 9, width) * 3, normal(2, width)
    wide = x.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    torch.testing.assert_close(kernels.rms_norm(x, gain, 1e-6).double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_norm_treats_each_run_of_columns_by_itself(kernels, width):
    wide, gain = normal(1, 9, 5 * width), normal(2, width)
    x = wide[:, width : 4 * width]
    alone = kernels.rms_norm(x.reshape(27, width), gain, 1e-6)
    assert torch.equal(kernels.rms_norm(x, gain, 1e-6), alone.view(9, 3 * width))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_and_its_norm_are_those_of_two_operators(kernels, width):
    x, y, gain = normal(1, 9, 3 * width)[:, width : 2 * width], normal(2, 9, width), normal(3, width)
    total, normed = kernels.add_norm(x, y, gain, 1e-6)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, kernels.rms_norm(x + y, gain, 1e-6))


@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu_agrees_with_its_formula(kernels, width):
    z = normal(1, 9, 2 * width) * 8
    gate, up = z.double().chunk(2, -1)
    torch.testing.assert_close(kernels.swiglu(z).double(), gate / (1 + (-gate).exp()) * up, rtol=2e-6, atol=1e-7)


def test_swiglu_stays_finite_for_large_gates_and_keeps_nan(kernels):
    gate = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4, torch.nan])
    out = kernels.swiglu(torch.cat([gate, torch.ones(6)])[None])[0]
    assert out[:2].abs().max() < 1e-30
    assert torch.equal(out[2:5], gate[2:5])
    assert out[5].isnan()


@given(width=st.sampled_from(WIDTHS), rows=st.integers(1, 70), first=st.integers(0, 69))
def test_a_row_does_not_know_its_company(kernels, width, rows, first):
    x, gain = normal(1, rows, 2 * width), normal(2, 2 * width)
    one = slice(first % rows, first % rows + 1)
    assert torch.equal(kernels.rms_norm(x, gain, 1e-6)[one], kernels.rms_norm(x[one], gain, 1e-6))
    assert torch.equal(kernels.swiglu(x)[one], kernels.swiglu(x[one]))


def test_threads_do_not_change_rows(kernels):
    x, gain = normal(1, 700, 300), normal(2, 300)
    alone = replace(kernels, num_threads=1)
    assert torch.equal(kernels.rms_norm(x, gain, 1e-6), alone.rms_norm(x, gain, 1e-6))
    x = normal(1, 700, 600)
    assert torch.equal(kernels.swiglu(x), alone.swiglu(x))


@pytest.mark.parametrize(("experts", "shared", "top_k"), [(8, 2, 2), (5, 0, 5), (100, 1, 6), (1, 1, 1)])
def test_routing_agrees_with_its_formula(kernels, experts, shared, top_k):
    logits, bias = normal(1, 40, experts + shared) * 4, normal(2, experts)
    ids, weights = kernels.route(logits, bias, top_k, shared, 2.5)
    scores = logits[:, :experts].double().sigmoid() + bias.double()
    assert torch.equal(ids[:, :top_k].long(), scores.topk(top_k).indices)
    assert (ids[:, top_k:] == torch.arange(experts, experts + shared)).all()
    chosen = logits.double().gather(1, ids.long()).sigmoid()
    wanted = chosen / chosen.sum(-1, keepdim=True) * 2.5
    torch.testing.assert_close(weights.double(), wanted, rtol=3e-6, atol=1e-8)


def test_equal_scores_go_to_the_lowest_expert(kernels):
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 9.0]])
    ids, _ = kernels.route(logits, torch.zeros(5), 4, 1, 1.0)
    assert ids.tolist() == [[1, 2, 4, 0, 5]]


def test_very_negative_gates_still_have_weights_that_sum_to_the_scale(kernels):
    _, weights = kernels.route(torch.full((1, 4), -80.0), torch.zeros(3), 2, 1, 6.0)
    torch.testing.assert_close(weights, torch.full((1, 3), 2.0))


def test_a_row_of_nan_routes_somewhere_and_disturbs_nobody(kernels):
    logits, bias = normal(1, 3, 6), torch.zeros(5)
    clean = kernels.route(logits, bias, 2, 1, 1.0)
    logits[1] = torch.nan
    ids, weights = kernels.route(logits, bias, 2, 1, 1.0)
    assert ((ids >= 0) & (ids < 6)).all()
    assert len(set(ids[1].tolist())) == 3
    assert torch.equal(ids[::2], clean[0][::2])
    assert torch.equal(weights[::2], clean[1][::2])
