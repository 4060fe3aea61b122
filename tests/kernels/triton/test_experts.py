"""Experts on a device: that a token's bits depend on neither its company nor the tile."""

from dataclasses import replace

import pytest
import torch

from samebit.kernels.composed import in_order
from samebit.kernels.triton import experts, token_experts
from samebit.kernels.triton.experts import DEEP, MOST_AT_ONCE, TILES, is_ungrouped, mixture, moe, tiles_of
from samebit.kernels.triton.last import counters
from samebit.kernels.triton.launch import num_launches
from samebit.kernels.triton.linear import pack_linear
from samebit.kernels.triton.routing import route
from samebit.kernels.triton.token_experts import columns_of, tile_of
from tests.kernels.cases import ints, normal

BF16_ERROR = 2e-2  # of a row's largest value: two roundings of inputs of a sum, and one of the result
EVERY_TILE = [(dtype, tiles) for dtype, table in TILES.items() for _, tiles in table]
EVERY_TILE_OF_FEW = [(dtype, tile) for dtype, tiles in token_experts.TILES.items() for tile in tiles]
ANY_PAIRS = 1 << 20
"""More pairs than any case has."""
EVERY_TILE += [(dtype, replace(TILES[dtype][-1][1], gate_up=tile)) for dtype, tile in DEEP.items()]


def routing(tokens, num_experts, shared, top_k, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)])
    ids = torch.cat([ids, torch.arange(num_experts, num_experts + shared).expand(tokens, -1)], 1)
    return ids.to(torch.int32), torch.rand(ids.shape, generator=generator)


class Case:
    """Weights of ``routed + shared`` experts, tokens, and who computes them."""

    def __init__(self, device, dtype, tokens, hidden, inner, *, routed=5, shared=2, top_k=2, seed=0):
        total = routed + shared
        self.w13 = pack_linear(normal(seed + 1, total, 2 * inner, hidden).to(device) / hidden**0.5, dtype)
        self.w2 = pack_linear(normal(seed + 2, total, hidden, inner).to(device) / inner**0.5, dtype)
        self.x = normal(seed + 3, tokens, hidden).to(device, dtype)
        self.ids, self.weights = (y.to(device) for y in routing(tokens, routed, shared, top_k, seed))
        self.inner = inner

    def __call__(self, rows=slice(None), live=None):
        x, ids, weights = self.x[rows], self.ids[rows], self.weights[rows]
        num_tokens = ints(len(x) if live is None else live).to(x.device)
        return moe(x, ids, weights, num_tokens, self.w13, self.w2, self.inner, 1)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (63, 17), (100, 65)])
def test_experts_agree_with_their_definition(device, activation, hidden, inner):
    case = Case(device, activation, 12, hidden, inner)
    x, wanted = case.x.double(), torch.zeros(12, hidden, dtype=torch.float64, device=device)
    for slot in range(4):
        gate, up = torch.einsum("th,tih->ti", x, case.w13.double()[case.ids[:, slot]]).chunk(2, -1)
        out = torch.einsum("ti,thi->th", gate / (1 + (-gate).exp()) * up, case.w2.double()[case.ids[:, slot]])
        wanted += case.weights[:, slot, None].double() * out
    found = case()
    assert found.dtype == activation
    allowed = 1e-5 if activation is torch.float32 else BF16_ERROR
    assert ((found.double() - wanted).abs().amax(-1) <= allowed * wanted.abs().amax(-1)).all()


def test_a_token_of_experts_does_not_know_its_company(device, activation):
    case = Case(device, activation, 70, 36, 33, routed=2, shared=1, top_k=1)
    together = case()
    for rows in (slice(0, 1), slice(69, 70), slice(5, 20), slice(0, 40)):
        assert torch.equal(case(rows), together[rows])


@pytest.mark.parametrize(("dtype", "tile"), EVERY_TILE)
def test_a_tile_does_not_change_experts(device, monkeypatch, dtype, tile):
    case = Case(device, dtype, 20, 256, 64, routed=2, shared=1, top_k=1)
    expected = case()
    monkeypatch.setattr(experts, "tiles_of", lambda *_: tile)
    monkeypatch.setattr(experts, "is_ungrouped", lambda tokens, *_: tokens == 1)
    assert torch.equal(case(), expected)
    for tokens in (1, MOST_AT_ONCE):
        assert torch.equal(case(slice(tokens)), expected[:tokens])


@pytest.mark.parametrize(("dtype", "tile"), EVERY_TILE_OF_FEW)
@pytest.mark.parametrize(("shared", "top_k"), [(0, 1), (2, 4), pytest.param(4, 5, marks=pytest.mark.slow), (12, 5)])
def test_a_tile_does_not_change_few_tokens(device, monkeypatch, dtype, tile, shared, top_k):
    # Slots that are no power of two, and more than the narrowest product has tokens; no tile's columns divide 67.
    case = Case(device, dtype, 5, 67, 64, shared=shared, top_k=top_k)
    with monkeypatch.context() as grouping:
        grouping.setattr(experts, "is_ungrouped", lambda *_: False)
        together = case()
    monkeypatch.setattr(token_experts, "tile_of", lambda *_: tile)
    monkeypatch.setattr(experts, "is_ungrouped", lambda *_: True)
    for rows in (slice(4, 5), slice(1, 3)):
        assert torch.equal(case(rows), together[rows])


def test_few_tokens_have_large_tiles_where_they_make_enough_programs():
    large, small = token_experts.TILES[torch.bfloat16]
    assert tile_of(1, 2048, 8, torch.bfloat16) == tile_of(1, 4096, 8, torch.bfloat16) == large
    assert tile_of(1, 256, 4, torch.bfloat16) == tile_of(8, 256, 4, torch.bfloat16) == small
    assert tile_of(16, 256, 4, torch.bfloat16) == large
    assert [columns_of(large, slots) for slots in (1, 6, 8, 9, 200)] == [128, 16, 16, 8, 1]


def test_tokens_are_not_grouped_where_each_tile_has_a_multiprocessor_of_its_own():
    assert [is_ungrouped(tokens, 4, 112) for tokens in (0, 1, 8, 12, 13)] == [True] * 4 + [False]
    assert [is_ungrouped(tokens, 8, 768) for tokens in (1, 2)] == [True, False]
    assert is_ungrouped(1, 8, 4096)


def test_tiles_are_deep_where_each_has_a_multiprocessor_of_its_own():
    deep, usual = DEEP[torch.bfloat16], TILES[torch.bfloat16][-1][1]
    assert tiles_of(8, 66, 768, torch.bfloat16) == replace(usual, gate_up=deep)
    assert tiles_of(16, 66, 768, torch.bfloat16) == tiles_of(8, 66, 1024, torch.bfloat16) == usual
    assert tiles_of(8, 66, 64, torch.float32) == TILES[torch.float32][-1][1]


@pytest.mark.parametrize("programs", [1, 5, 1000])
def test_the_number_of_programs_does_not_change_experts(device, monkeypatch, activation, programs):
    case = Case(device, activation, 20, 36, 33)
    expected = case()
    monkeypatch.setattr(experts, "num_programs", lambda *_: programs)
    # Programs of few tokens choose, too; the last of a thousand have no tile.
    few = 3
    logits, bias = normal(7, 1, few, 7).to(device), normal(8, 5).to(device) / 10
    live, operands = ints(few).to(device), (case.w13, case.w2, case.inner, 1)
    wanted = moe(case.x[:few], *route(logits[0], bias, 2, 2, 1.5, 1), live, *operands)
    assert torch.equal(mixture(case.x[:few], logits, bias, 2, 2, 1.5, live, *operands), wanted)
    monkeypatch.setattr(experts, "is_ungrouped", lambda tokens, *_: tokens == 1)
    assert torch.equal(case(), expected)
    for tokens in (1, MOST_AT_ONCE):
        assert torch.equal(case(slice(tokens)), expected[:tokens])


def test_bfloat16_experts_give_the_bits_of_their_float32_copy(device):
    case = Case(device, torch.float32, 9, 63, 17)
    case.w13, case.w2 = case.w13.bfloat16(), case.w2.bfloat16()
    half = case()
    case.w13, case.w2 = case.w13.float(), case.w2.float()
    assert torch.equal(half, case())


def test_everybody_may_choose_the_same_experts(device, activation):
    case = Case(device, activation, 40, 36, 20, routed=2, shared=0, top_k=2)
    case.ids[:] = ints(1, 1).to(device)
    together = case()
    assert torch.equal(case(slice(7, 8)), together[7:8])
    assert together.abs().amax(-1).min() > 0


@pytest.mark.parametrize("is_grouped", [True, False])
def test_padding_tokens_give_zeros_whatever_they_hold(device, activation, monkeypatch, is_grouped):
    monkeypatch.setattr(experts, "is_ungrouped", lambda *_: not is_grouped)
    case = Case(device, activation, 8, 20, 17, routed=2, shared=1, top_k=1)
    clean = case(slice(5))
    case.x[5:] = torch.nan
    case.weights[5:] = torch.nan
    case.ids[5:] = -(2**31)
    padded = case(live=5)
    assert torch.equal(padded[:5], clean)
    assert torch.equal(padded[5:], torch.zeros_like(padded[5:]))
    assert not case(live=0).any()
    for rows in (slice(1), slice(5, 6)):
        assert not case(rows, live=0).any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(("shared", "top_k"), [(2, 2), (1, 1), (0, 5)])
def test_a_token_alone_has_the_bits_that_it_has_among_many(device, activation, monkeypatch, shared, top_k):
    monkeypatch.setattr(experts, "is_ungrouped", lambda tokens, *_: tokens == 1)
    case = Case(device, activation, 20, 100, 33, shared=shared)
    logits, bias = normal(7, 1, 20, 5 + shared).to(device), normal(8, 5).to(device) / 10

    def found(rows, live):
        operands = (top_k, shared, 1.5, ints(live).to(device), case.w13, case.w2, case.inner, 1)
        return mixture(case.x[rows], logits[:, rows], bias, *operands)

    together = found(slice(None), 20)
    for token in (0, 7, 19):
        rows = slice(token, token + 1)
        assert torch.equal(found(rows, 1), together[rows])
        assert not found(rows, 0).any()
    case.x[7], logits[:, 7] = torch.nan, torch.nan
    assert not found(slice(7, 8), 0).any()


def test_a_token_that_is_not_finite_spoils_no_other_in_its_experts(device, activation):
    case = Case(device, activation, 9, 36, 20, routed=2, shared=1, top_k=1)
    clean = case()
    case.x[4, 3] = torch.nan
    spoiled = case()
    assert spoiled[4].isnan().all()
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[rest], clean[rest])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_slot_that_is_not_finite_spoils_no_product_of_another(device, activation, tokens):
    case = Case(device, activation, tokens, 36, 20, routed=3, shared=1, top_k=3)
    case.x[:], case.weights[:], case.ids[:] = 1.0, 1.0, ints(2, 0, 1, 3).to(device)
    # Infinity from one expert, numbers below zero from the others: times each other's weights they would not be numbers.
    case.w13[:], case.w2[:] = 1.0, -1.0
    case.w13[0], case.w2[0] = 1e38, 1.0
    assert (case() == torch.inf).all()


def test_tokens_may_be_rows_of_a_wider_tensor(device, activation):
    case = Case(device, activation, 7, 36, 20)
    dense = case()
    fused = torch.full((7, 80), torch.nan, dtype=activation, device=device)
    fused[:, 8:44] = case.x
    case.x = fused[:, 8:44]
    assert torch.equal(case(), dense)


@pytest.mark.parametrize(("tokens", "live"), [(1, 1), (4, 3), (3, 0), (20, 20)])
def test_few_tokens_take_fewer_launches_and_have_the_same_bits(device, activation, tokens, live, monkeypatch):
    """Routed, grouped and added up by themselves; routed and grouped at once; added up at once; both; and not grouped at all."""
    case = Case(device, activation, tokens, 100, 33)
    logits, bias = normal(7, tokens, 7).to(device), normal(8, 5).to(device) / 10
    ids, weights = route(logits, bias, 2, 2, 1.5, 1)
    num_tokens, operands = ints(live).to(device), (case.w13, case.w2, case.inner, 1)
    found = []
    ways = [
        (0, 0, False), (ANY_PAIRS, 0, False), (0, MOST_AT_ONCE, False), (ANY_PAIRS, MOST_AT_ONCE, False),
        (0, 0, True), (ANY_PAIRS, 0, True),
    ]  # fmt: skip
    for pairs, rows, is_free in ways if tokens <= MOST_AT_ONCE else ways[:4]:
        monkeypatch.setattr(experts, "FEW_PAIRS", pairs)
        monkeypatch.setattr(experts, "MOST_AT_ONCE", rows)
        monkeypatch.setattr(experts, "is_ungrouped", lambda *_, is_free=is_free: is_free)
        before = num_launches()
        found.append(mixture(case.x, logits[None], bias, 2, 2, 1.5, num_tokens, *operands))
        routing = {0: 2, ANY_PAIRS: 1}[pairs] - is_free
        assert num_launches() - before == routing + 2 + (tokens > rows and not is_free)
    assert all(torch.equal(other, found[0]) for other in found)
    assert torch.equal(found[0], moe(case.x, ids, weights, num_tokens, *operands))
    assert (found[0][:live] != 0).any(-1).all()
    assert not found[0][live:].any()
    assert not counters(device).any()


def test_addends_of_logits_give_the_mixture_of_their_sum(device, activation, monkeypatch):
    case, bias = Case(device, activation, 4, 100, 33), normal(8, 5).to(device) / 10
    addends, num_tokens = normal(7, 3, 4, 7).to(device), ints(4).to(device)
    ids, weights = route(in_order(addends), bias, 2, 2, 1.5, 1)
    wanted = moe(case.x, ids, weights, num_tokens, case.w13, case.w2, case.inner, 1)
    for pairs in (0, ANY_PAIRS):
        monkeypatch.setattr(experts, "FEW_PAIRS", pairs)
        found = mixture(case.x, addends, bias, 2, 2, 1.5, num_tokens, case.w13, case.w2, case.inner, 1)
        assert torch.equal(found, wanted)


MODELS = {
    "bench-8b": (2048, 768, 64, 6),
    "inkling": (4096, 2048, 32, 6),
    "odd": (200, 100, 7, 2),
    "nano": (256, 128, 16, 2),
    "nine": (330, 64, 16, 7),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_every_number_of_tokens_gives_the_same_bits(device, model):
    hidden, inner, routed, top_k = MODELS[model]
    case = Case(device, torch.bfloat16, 4096, hidden, inner, routed=routed, top_k=top_k)
    everything = case()
    for tokens in [*range(1, 41), 64, 100, 129, 300, 512, 1024, 2047, 2048, 4095]:
        assert torch.equal(case(slice(tokens)), everything[:tokens]), tokens
        assert torch.equal(case(slice(4096 - tokens, 4096)), everything[4096 - tokens :]), tokens
        padded = case(slice(min(4096, 2 * tokens)), live=tokens)
        assert torch.equal(padded[:tokens], everything[:tokens]), tokens
        assert not padded[tokens:].any()
