"""Experts on a device: routing, grouping, and that a token's bits depend on neither its company nor the tile."""

import pytest
import torch

from samebit.kernels import torch_set
from samebit.kernels.triton import experts
from samebit.kernels.triton.experts import TILES, moe, route
from samebit.kernels.triton.launch import launch
from samebit.kernels.triton.linear import pack_linear
from tests.kernels.cases import ints, normal

NEAR_TIE = 1e-5  # scores closer than this may be ordered otherwise by another exponential
BF16_ERROR = 2e-2  # of a row's largest value: two roundings of inputs of a sum, and one of the result
EVERY_TILE = [(dtype, tiles) for dtype, table in TILES.items() for _, tiles in table]


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


@pytest.mark.parametrize(("num_experts", "shared", "top_k"), [(8, 2, 2), (13, 0, 6), (64, 2, 6), (1, 1, 1)])
def test_routing_agrees_with_the_twin(device, num_experts, shared, top_k):
    logits, bias = normal(1, 40, num_experts + shared) * 3, normal(2, num_experts) / 10
    scores = (torch.sigmoid(logits[:, :num_experts]) + bias).sort(-1).values
    is_clear = (scores.diff() > NEAR_TIE).all(-1)
    assert is_clear.sum() > 20
    wanted_ids, wanted_weights = torch_set.route(logits, bias, top_k, shared, 2.5, 1)
    ids, weights = (y.cpu() for y in route(logits.to(device), bias.to(device), top_k, shared, 2.5, 1))
    assert torch.equal(ids[is_clear], wanted_ids[is_clear])
    torch.testing.assert_close(weights[is_clear], wanted_weights[is_clear], rtol=2e-6, atol=0)


def test_ties_go_to_the_lower_expert(device):
    logits = torch.randint(-1, 2, (50, 18), generator=torch.Generator().manual_seed(0)).float()
    wanted, _ = torch_set.route(logits, torch.zeros(16), 6, 2, 1.0, 1)
    ids, _ = route(logits.to(device), torch.zeros(16, device=device), 6, 2, 1.0, 1)
    assert torch.equal(ids.cpu(), wanted)


def test_the_route_of_a_token_does_not_know_its_company(device):
    fused, bias = normal(1, 33, 40).to(device), normal(2, 12).to(device)
    together = route(fused[:, 7:21], bias, 3, 2, 1.5, 1)
    for token in (0, 17, 32):
        alone = route(fused[token : token + 1, 7:21].contiguous(), bias, 3, 2, 1.5, 1)
        assert all(torch.equal(a[0], b[token]) for a, b in zip(alone, together, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_gets_experts_that_exist(device, bad):
    logits, bias = normal(1, 6, 12).to(device), normal(2, 10).to(device)
    clean_ids, clean_weights = route(logits, bias, 4, 2, 1.0, 1)
    logits[2] = bad
    logits[4, 5] = bad
    ids, weights = route(logits, bias, 4, 2, 1.0, 1)
    for row in (2, 4):
        assert len(ids[row].unique()) == 6
        assert ids[row, :4].min() >= 0
        assert ids[row, :4].max() < 10
        assert ids[row, 4:].tolist() == [10, 11]
    rest = [0, 1, 3, 5]
    assert torch.equal(ids[rest], clean_ids[rest])
    assert torch.equal(weights[rest], clean_weights[rest])


@pytest.mark.parametrize("block", [1, 4, 64])
def test_pairs_are_grouped_by_expert_in_their_order(device, block):
    ids = torch.randint(0, 5, (9, 3), generator=torch.Generator().manual_seed(1)).int()
    ids[ids == 2] = 3  # nobody chose expert 2
    live = ids[:7].flatten()
    ids[7:] = torch.tensor([0, -(2**31), 2**31 - 1])
    pairs, bounds = torch.full((27,), -1).int().to(device), torch.full((5, 2), -1).int().to(device)
    launch(experts.group_kernel, (5,), ids.to(device), ints(7).to(device), pairs, bounds, SLOTS=3, BLOCK=block)
    assert torch.equal(pairs[:21].cpu(), live.sort(stable=True).indices.int())
    assert (pairs[21:] == -1).all()
    counts = live.bincount(minlength=5)
    assert torch.equal(bounds.cpu(), torch.stack([counts.cumsum(0) - counts, counts.cumsum(0)], 1).int())


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
    assert torch.equal(case(), expected)


@pytest.mark.parametrize("programs", [1, 5])
def test_the_number_of_programs_does_not_change_experts(device, monkeypatch, activation, programs):
    case = Case(device, activation, 20, 36, 33)
    expected = case()
    monkeypatch.setattr(experts, "num_programs", lambda *_: programs)
    assert torch.equal(case(), expected)


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


def test_padding_tokens_run_no_expert_and_give_zeros(device, activation):
    case = Case(device, activation, 8, 20, 17, routed=2, shared=1, top_k=1)
    clean = case(slice(5))
    case.x[5:] = torch.nan
    case.weights[5:] = torch.nan
    case.ids[5:] = -(2**31)
    padded = case(live=5)
    assert torch.equal(padded[:5], clean)
    assert torch.equal(padded[5:], torch.zeros_like(padded[5:]))
    assert not case(live=0).any()


def test_a_token_that_is_not_finite_spoils_no_other_in_its_experts(device, activation):
    case = Case(device, activation, 9, 36, 20, routed=2, shared=1, top_k=1)
    clean = case()
    case.x[4, 3] = torch.nan
    spoiled = case()
    assert spoiled[4].isnan().all()
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[rest], clean[rest])


def test_tokens_may_be_rows_of_a_wider_tensor(device, activation):
    case = Case(device, activation, 7, 36, 20)
    dense = case()
    fused = torch.full((7, 80), torch.nan, dtype=activation, device=device)
    fused[:, 8:44] = case.x
    case.x = fused[:, 8:44]
    assert torch.equal(case(), dense)


MODELS = {"bench-8b": (2048, 768, 64, 6), "inkling": (4096, 2048, 32, 6), "odd": (200, 100, 7, 2)}


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_many_tokens_are_routed_as_the_twin_routes_them(device):
    logits, bias = normal(1, 8192, 258) * 2, normal(2, 256) / 10
    scores = (torch.sigmoid(logits[:, :256]) + bias).sort(-1, descending=True).values
    is_clear = (scores[:, :7].diff().abs() > NEAR_TIE).all(-1)
    assert is_clear.sum() > 4000
    wanted, _ = torch_set.route(logits, bias, 6, 2, 1.0, 1)
    ids, _ = route(logits.to(device), bias.to(device), 6, 2, 1.0, 1)
    assert torch.equal(ids.cpu()[is_clear], wanted[is_clear])
