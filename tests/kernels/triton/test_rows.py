"""Norm, gated activation and embedding on a device: the twin's values, and rows that know nothing of each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels import torch_set
from samebit.kernels.triton.launch import IS_INTERPRETED, num_launches
from samebit.kernels.triton.rows import implementations
from samebit.kernels.triton.set import LIMITS
from tests.kernels.cases import normal

WIDTHS = [1, 7, 63, 64, 100, 257]
# fp32: another order of sums, and a short exponential. bf16: one rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


def close(found, wanted):
    assert found.dtype in TOLERANCE
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.cpu().float(), wanted.float(), rtol=bound, atol=bound * 1e-3)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_norm_agrees_with_the_twin(device, activation, width):
    x, gain = (normal(1, 9, 3 * width) * 3).to(activation), normal(2, width)
    found = implementations(activation)["rms_norm"](x.to(device), gain.to(device), 1e-6, 1)
    assert found.dtype is activation
    close(found, torch_set.rms_norm(x.float(), gain, 1e-6, 1))


def test_there_is_a_norm_for_the_widest_rows_that_a_model_may_have(device, activation):
    width = LIMITS["columns of a norm"]
    x, gain = normal(1, 2, width).to(activation), normal(2, width)
    found = implementations(activation)["rms_norm"](x.to(device), gain.to(device), 1e-6, 1)
    close(found, torch_set.rms_norm(x.float(), gain, 1e-6, 1))


def test_the_norm_of_wide_values_gives_activations(device, activation):
    x, gain = normal(1, 9, 70) * 1e4, normal(2, 70)
    found = implementations(activation)["rms_norm"](x.to(device), gain.to(device), 1e-6, 1)
    assert found.dtype is activation
    close(found, torch_set.rms_norm(x, gain, 1e-6, 1))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_norm_treats_each_run_of_columns_by_itself(device, activation, width):
    norm = implementations(activation)["rms_norm"]
    wide, gain = normal(1, 9, 5 * width).to(device, activation), normal(2, width).to(device)
    x = wide[:, width : 4 * width]
    alone = norm(x.reshape(27, width), gain, 1e-6, 1)
    assert torch.equal(norm(x, gain, 1e-6, 1), alone.view(9, 3 * width))


@given(width=st.sampled_from(WIDTHS), rows=st.integers(1, 30), first=st.integers(0, 29), mixed=st.booleans())
def test_one_launch_gives_a_sum_and_its_norm(device, width, rows, first, mixed):
    for activation in TOLERANCE:
        kernels = implementations(activation)
        wide = normal(1, rows, 2 * width + 3).to(device, torch.float32 if mixed else activation)
        x, y, gain = wide[:, 3 : 3 + width], normal(2, rows, width).to(device, activation), normal(3, width).to(device)
        before = num_launches()
        total, normed = kernels["add_norm"](x, y, gain, 1e-6, 1)
        assert num_launches() == before + 1
        assert (total.dtype, normed.dtype) == (torch.float32, activation)
        assert torch.equal(total, x.float() + y)
        close(normed, torch_set.rms_norm(total.cpu(), gain.cpu(), 1e-6, 1))
        if IS_INTERPRETED:
            assert torch.equal(normed, kernels["rms_norm"](total, gain, 1e-6, 1))
        one = slice(first % rows, first % rows + 1)
        assert torch.equal(normed[one], kernels["add_norm"](x[one], y[one], gain, 1e-6, 1)[1])


@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu_agrees_with_the_twin(device, activation, width):
    z = (normal(1, 9, 2 * width) * 8).to(activation)
    found = implementations(activation)["swiglu"](z.to(device), 1)
    assert found.dtype is activation
    close(found, torch_set.swiglu(z.float(), 1))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy says so where kernels are interpreted
def test_swiglu_stays_finite_for_large_gates_and_keeps_nan(device):
    gate = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4, torch.nan])
    out = implementations(torch.float32)["swiglu"](torch.cat([gate, torch.ones(6)])[None].to(device), 1).cpu()[0]
    assert out[:2].abs().max() < 1e-30
    assert torch.equal(out[2:5], gate[2:5])
    assert out[5].isnan()


@given(width=st.sampled_from(WIDTHS), rows=st.integers(1, 30), first=st.integers(0, 29))
def test_a_row_does_not_know_its_company(device, width, rows, first):
    for activation in TOLERANCE:
        kernels = implementations(activation)
        x, gain = normal(1, rows, 2 * width).to(device, activation), normal(2, 2 * width).to(device)
        one = slice(first % rows, first % rows + 1)
        assert torch.equal(kernels["rms_norm"](x, gain, 1e-6, 1)[one], kernels["rms_norm"](x[one], gain, 1e-6, 1))
        assert torch.equal(kernels["swiglu"](x, 1)[one], kernels["swiglu"](x[one], 1))


def test_a_row_of_nan_disturbs_nobody(device):
    kernels = implementations(torch.float32)
    x, gain = normal(1, 3, 40).to(device), normal(2, 40).to(device)
    clean = kernels["rms_norm"](x, gain, 1e-6, 1), kernels["swiglu"](x, 1)
    x[1] = torch.nan
    for before, after in zip(clean, (kernels["rms_norm"](x, gain, 1e-6, 1), kernels["swiglu"](x, 1)), strict=True):
        assert torch.equal(before[::2], after[::2])
        assert after[1].isnan().all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 63, 100, 1100])
def test_an_embedding_is_its_row_of_the_table(device, activation, stored, width):
    table, ids = normal(1, 50, width).to(stored), torch.tensor([0, 49, 7, 7, 0], dtype=torch.int32)
    found = implementations(activation)["embedding"](ids.to(device), table.to(device), 1)
    assert found.dtype is activation
    if stored is activation or activation is torch.float32:
        assert torch.equal(found.cpu(), table[ids].to(activation))
    close(found, table[ids])


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "parts"), [(128, 16), (256, 1), (2048, 1), (4096, 1), (48, 5), (63, 3)])
def test_rows_of_models_are_pure_and_agree_with_the_twin(device, activation, width, parts):
    kernels = implementations(activation)
    fused = normal(1, 8192, parts * width + 64).to(device, activation)
    x, gain = fused[:, 16 : 16 + parts * width], normal(2, width).to(device)
    whole = kernels["rms_norm"](x, gain, 1e-6, 1)
    close(whole[:300], torch_set.rms_norm(x[:300].cpu().float(), gain.cpu(), 1e-6, 1))
    gated = kernels["swiglu"](fused, 1)
    for count in (*range(1, 301), 512, 2048):
        first = 8191 * count % (8192 - count)
        part = slice(first, first + count)
        assert torch.equal(kernels["rms_norm"](x[part], gain, 1e-6, 1), whole[part])
        assert torch.equal(kernels["swiglu"](fused[part], 1), gated[part])
    # The same rows where nothing lies between them.
    assert torch.equal(kernels["rms_norm"](x.contiguous(), gain, 1e-6, 1), whole)
