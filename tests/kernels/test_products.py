"""Linear maps, experts and embeddings."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels.certify import certify
from samebit.kernels.composed import in_order
from tests.kernels.cases import ints, normal

SIZES = [(1, 1), (63, 100), (64, 257), (100, 63), (257, 600), (1, 1000)]


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_a_product_agrees_with_float64(kernels, num_out, num_in):
    weight, x = normal(1, num_out, num_in), normal(2, 7, num_in)
    wanted = x.double() @ weight.double().T
    bound = 4e-6 * (x.abs().double() @ weight.abs().double().T)
    found = kernels.linear(x, kernels.pack_linear(weight))
    assert found.dtype == torch.float32
    assert ((found - wanted).abs() <= bound).all()


@given(
    shape=st.sampled_from(SIZES),
    rows=st.integers(1, 130),
    first=st.integers(0, 129),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_a_row_of_a_product_does_not_know_its_company(kernels, shape, rows, first, threads, seed):
    weight = normal(seed, *shape)
    x = normal(seed + 1, rows, shape[1])
    packed = kernels.pack_linear(weight)
    row = x[first % rows][None]
    alone = replace(kernels, num_threads=1).linear(row, packed)
    together = replace(kernels, num_threads=threads).linear(x, packed)
    assert torch.equal(together[first % rows], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_product(kernels, dtype):
    weight, x = normal(1, 1500, 300).to(dtype), normal(2, 121, 300)
    packed = kernels.pack_linear(weight)
    single = replace(kernels, num_threads=1).linear(x, packed)
    for threads in (2, 3, 5):
        assert torch.equal(replace(kernels, num_threads=threads).linear(x, packed), single)
    assert torch.equal(kernels.linear(x.flip(0), packed).flip(0), single)


def test_bfloat16_weights_give_the_bits_of_their_float32_copy(kernels):
    weight, x = normal(1, 100, 63).bfloat16(), normal(2, 17, 63)
    half, full = kernels.pack_linear(weight), kernels.pack_linear(weight.float())
    assert torch.equal(kernels.linear(x, half), kernels.linear(x, full))


def test_native_bfloat16_weights_stay_two_bytes_an_element(native):
    packed = native.pack_linear(normal(1, 128, 64).bfloat16())
    assert packed.data.dtype == torch.bfloat16
    assert packed.data.numel() == 128 * 64


def test_a_row_that_is_not_finite_spoils_no_other(kernels):
    packed, x = kernels.pack_linear(normal(1, 100, 63)), normal(2, 9, 63)
    clean = kernels.linear(x, packed)
    x[4] = torch.nan
    x[7, 3] = torch.inf
    spoiled = kernels.linear(x, packed)
    assert spoiled[4].isnan().all()
    assert not spoiled[7].isfinite().any()
    rest = [0, 1, 2, 3, 5, 6, 8]
    assert torch.equal(spoiled[rest], clean[rest])


def test_a_strided_input_gives_the_bits_of_its_dense_copy(kernels):
    packed, x = kernels.pack_linear(normal(1, 65, 63)), normal(2, 5, 126)
    assert torch.equal(kernels.linear(x[:, ::2], packed), kernels.linear(x[:, ::2].contiguous(), packed))


def test_addends_are_those_of_the_wide_product(kernels):
    packed, x = kernels.pack_linear(normal(1, 66, 1024), wide=True), normal(2, 5, 1024)
    assert torch.equal(in_order(kernels.addends(x, packed)), kernels.linear(x, packed))


def mixture(kernels, x, logits, live, packed):
    """Each token computed by two experts of five, and by the shared ones."""
    return kernels.mixture(x, logits[None], torch.arange(5) / 50, 2, logits.shape[1] - 5, 1.5, ints(live), packed)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 128), (63, 17), (100, 257)])
def test_experts_agree_with_their_definition(kernels, hidden, inner):
    w13, w2 = normal(1, 7, 2 * inner, hidden) / hidden**0.5, normal(2, 7, hidden, inner) / inner**0.5
    x, logits = normal(3, 60, hidden), normal(4, 60, 7)
    ids, weights = kernels.route(logits, torch.arange(5) / 50, 2, 2, 1.5)
    wanted = torch.zeros(60, hidden, dtype=torch.float64)
    for slot in range(4):
        gate, up = torch.einsum("th,tih->ti", x.double(), w13.double()[ids[:, slot]]).chunk(2, -1)
        out = torch.einsum("ti,thi->th", gate / (1 + (-gate).exp()) * up, w2.double()[ids[:, slot]])
        wanted += weights[:, slot, None].double() * out
    found = mixture(kernels, x, logits, 60, kernels.pack_experts(w13, w2))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@given(tokens=st.integers(1, 120), first=st.integers(0, 119), threads=st.integers(1, 3))
def test_a_token_of_experts_does_not_know_its_company(kernels, tokens, first, threads):
    packed = kernels.pack_experts(normal(1, 7, 66, 36), normal(2, 7, 36, 33))
    x, logits = normal(3, tokens, 36), normal(tokens, tokens, 7)
    one = slice(first % tokens, first % tokens + 1)
    alone = mixture(kernels, x[one], logits[one], 1, packed)
    together = mixture(replace(kernels, num_threads=threads), x, logits, tokens, packed)
    assert torch.equal(together[one], alone)


def test_threads_do_not_change_experts(kernels):
    packed = kernels.pack_experts(normal(1, 6, 256, 96), normal(2, 6, 96, 128))
    x, logits = normal(3, 90, 96), normal(4, 90, 6)
    single = mixture(replace(kernels, num_threads=1), x, logits, 90, packed)
    assert torch.equal(mixture(kernels, x, logits, 90, packed), single)


def test_padding_tokens_run_no_expert_and_give_zeros(kernels):
    packed = kernels.pack_experts(normal(1, 6, 34, 20), normal(2, 6, 20, 17))
    x, logits = normal(3, 8, 20), normal(4, 8, 6)
    clean = mixture(kernels, x[:5], logits[:5], 5, packed)
    x[5:] = torch.nan
    logits[5:] = torch.nan
    padded = mixture(kernels, x, logits, 5, packed)
    assert torch.equal(padded[:5], clean)
    assert torch.equal(padded[5:], torch.zeros(3, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_is_the_row_of_the_table(kernels, dtype):
    table = normal(1, 100, 63).to(dtype)
    ids = ints(0, 99, 5, 5)
    assert torch.equal(kernels.embedding(ids, table), table.float()[ids.long()])


def test_a_native_embedding_refuses_ids_outside_the_table(native):
    for bad in (-1, 10):
        with pytest.raises(ValueError, match=r"outside 0\.\.9"):
            native.embedding(ints(0, bad), normal(1, 10, 4))


def test_every_set_is_certified_on_this_host(kernels):
    assert certify(kernels, [(65, 100), (300, 257)], budget_seconds=60) == []


def test_certification_finds_a_product_that_knows_its_company(twin):
    ops = type(twin._ops)(**vars(twin._ops))
    honest = ops.linear

    def impure(x, *rest):
        return honest(x, *rest) * (1 + 1e-6 * (x.shape[0] == 17))

    ops.linear = impure
    (failure,) = certify(replace(twin, _ops=ops), [(8, 16)])
    assert (failure.num_out, failure.num_in, failure.rows) == (8, 16, 17)


def test_certification_finds_a_product_that_knows_its_company_before_it_is_rounded(twin):
    ops = type(twin._ops)(**vars(twin._ops))
    honest = ops.linear

    def impure(x, weight, num_out, wide, *rest):
        found = honest(x, weight, num_out, True, *rest) * (1 + 1e-6 * (x.shape[0] == 17))
        return found if wide else found.bfloat16()

    ops.linear = impure
    (failure,) = certify(replace(twin, _ops=ops, element="bfloat16"), [(8, 16)])
    assert (failure.num_out, failure.num_in, failure.rows) == (8, 16, 17)


def test_certification_finds_addends_whose_sum_knows_its_company(twin):
    ops = type(twin._ops)(**vars(twin._ops))
    honest = ops.linear

    def in_two(x, weight, num_out, *rest):
        whole = honest(x, weight, num_out, True, *rest)
        return torch.stack([whole / 2, whole / 2 * (1 + 1e-6 * (x.shape[0] == 17))])

    ops.addends = in_two
    (failure,) = certify(replace(twin, _ops=ops), [(8, 16)])
    assert (failure.num_out, failure.num_in, failure.rows) == (8, 16, 17)


def test_a_shape_that_failed_is_left_to_the_torch_set(native, twin):
    weight, x = normal(1, 65, 100), normal(2, 3, 100)
    without = native.without([(65, 100)])
    assert torch.equal(without.linear(x, without.pack_linear(weight)), twin.linear(x, twin.pack_linear(weight)))
    assert without.describe()["torch_shapes"] == "65x100"
    other = normal(3, 66, 100)
    assert torch.equal(without.linear(x, without.pack_linear(other)), native.linear(x, native.pack_linear(other)))


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_product_of_norms_is_the_product_of_each_by_itself(kernels, is_gated):
    x, y, gain = normal(1, 5, 24), normal(2, 5, 24), normal(3, 24)
    packed = kernels.pack_linear(normal(4, 14, 24))
    total, out = kernels.normed_linear(x, y, gain, 1e-6, packed, is_gated=is_gated)
    wanted_total, normed = kernels.add_norm(x, y, gain, 1e-6)
    wanted = kernels.linear(normed, packed)
    assert torch.equal(total, wanted_total)
    assert torch.equal(out, kernels.swiglu(wanted) if is_gated else wanted)
