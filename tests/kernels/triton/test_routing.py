"""Routing on a device: a token's experts and weights, an expert's tokens, and that few tokens get them in one launch."""

import pytest
import torch

from samebit.kernels import torch_set
from samebit.kernels.composed import in_order
from samebit.kernels.triton.experts import apply_experts
from samebit.kernels.triton.launch import launch, num_launches
from samebit.kernels.triton.routing import Choice, assign, group, group_kernel, route, ungrouped
from tests.kernels.cases import ints, normal

MOST_CHOSEN = 2  # tokens that are tried without groups
NEAR_TIE = 1e-5  # scores closer than this may be ordered otherwise by another exponential
SIZES = [(8, 2, 2), (13, 0, 6), (64, 2, 6), (1, 1, 1), (130, 3, 9)]  # experts, shared ones, experts of a token


@pytest.mark.parametrize(("num_experts", "shared", "top_k"), SIZES)
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
    launch(group_kernel, (5,), ids.to(device), ints(7).to(device), pairs, bounds, SLOTS=3, BLOCK=block)
    assert torch.equal(pairs[:21].cpu(), live.sort(stable=True).indices.int())
    assert (pairs[21:] == -1).all()
    counts = live.bincount(minlength=5)
    assert torch.equal(bounds.cpu(), torch.stack([counts.cumsum(0) - counts, counts.cumsum(0)], 1).int())


def assigned(logits, bias, top_k, shared, scale, num_tokens):
    """What ``assign`` gives."""
    return assign(Choice(logits, bias, top_k, shared, scale), num_tokens)


def chosen(logits, bias, top_k, shared, scale):
    """Experts and weights of tokens that are not grouped: what the experts' first product leaves behind."""
    choice = Choice(logits, bias, top_k, shared, scale)
    groups, weights = ungrouped(choice)
    x = torch.ones(logits.shape[1], 16, device=logits.device)
    w13, w2 = (torch.ones(choice.num_experts, *shape, device=x.device) for shape in ((32, 16), (16, 16)))
    apply_experts(x, groups, weights, ints(len(x)).to(x.device), w13, w2, 16)
    return groups.ids, weights


def parts(groups):
    """The pairs of each expert."""
    return [groups.pairs[start:stop].tolist() for start, stop in groups.bounds.tolist()]


def check_assignment(logits, bias, top_k, shared, live):
    """``assigned`` has the groups and the bits of ``route`` and ``group``, and ``chosen`` its experts and bits."""
    num_tokens = ints(live).to(logits.device)
    ids, wanted = route(logits, bias, top_k, shared, 2.5, 1)
    groups, weights = assigned(logits[None], bias, top_k, shared, 2.5, num_tokens)
    assert parts(groups) == parts(group(ids, num_tokens, len(bias) + shared))
    assert torch.equal(weights[:live], wanted[:live])
    if len(logits) <= MOST_CHOSEN:
        own_ids, own_weights = chosen(logits[None], bias, top_k, shared, 2.5)
        assert torch.equal(own_ids, ids)
        assert torch.equal(own_weights, wanted)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize(("num_experts", "shared", "top_k"), SIZES)
def test_few_tokens_are_routed_and_grouped_alike_in_one_launch(device, tokens, num_experts, shared, top_k):
    fused = normal(1, tokens, num_experts + shared + 9).to(device) * 3
    logits, bias = fused[:, 5 : 5 + num_experts + shared], normal(2, num_experts).to(device) / 10
    for live in {tokens, tokens // 2}:
        check_assignment(logits, bias, top_k, shared, live)
    before = num_launches()
    assign(Choice(logits[None], bias, top_k, shared, 2.5), ints(tokens).to(device))
    assert num_launches() == before + 1


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize(("num_experts", "shared", "top_k"), SIZES)
def test_logits_are_added_up_in_order_by_who_needs_them(device, tokens, num_experts, shared, top_k):
    addends, bias = normal(1, 5, tokens, num_experts + shared).to(device), normal(2, num_experts).to(device) / 10
    addends[0] *= 1e4
    addends[1] -= addends[0]  # any other order gives other bits
    num_tokens = ints(tokens).to(device)
    groups, weights = assigned(addends, bias, top_k, shared, 2.5, num_tokens)
    wanted_groups, wanted = assigned(in_order(addends)[None], bias, top_k, shared, 2.5, num_tokens)
    assert parts(groups) == parts(wanted_groups)
    assert torch.equal(weights, wanted)
    if tokens <= MOST_CHOSEN:
        ids, own = chosen(addends, bias, top_k, shared, 2.5)
        assert torch.equal(own, wanted)
        assert torch.equal(ids, route(in_order(addends), bias, top_k, shared, 2.5, 1)[0])


def test_ties_among_few_tokens_go_to_the_lower_expert(device):
    logits = torch.randint(-1, 2, (50, 18), generator=torch.Generator().manual_seed(0)).float().to(device)
    check_assignment(logits, torch.zeros(16, device=device), 6, 2, 50)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_few_tokens_that_are_not_finite_have_the_experts_that_many_would_have(device, bad):
    logits, bias = normal(1, 6, 12).to(device), normal(2, 10).to(device)
    logits[2] = bad
    logits[4, 5] = bad
    num_tokens = ints(6).to(device)
    ids, wanted = route(logits, bias, 4, 2, 1.0, 1)
    groups, weights = assigned(logits[None], bias, 4, 2, 1.0, num_tokens)
    assert parts(groups) == parts(group(ids, num_tokens, 12))
    assert torch.equal(weights.nan_to_num(-1), wanted.nan_to_num(-1))
    for tokens in (slice(2, 3), slice(4, 6)):
        own_ids, weights = chosen(logits[None, tokens], bias, 4, 2, 1.0)
        assert torch.equal(own_ids, ids[tokens])
        assert torch.equal(weights.nan_to_num(-1), wanted[tokens].nan_to_num(-1))


def test_experts_of_padding_are_nobodys(device):
    logits, bias = normal(1, 6, 12).to(device), normal(2, 10).to(device)
    clean, weights = assigned(logits[None, :4], bias, 4, 2, 1.0, ints(4).to(device))
    logits[4:] = torch.nan
    groups, padded = assigned(logits[None], bias, 4, 2, 1.0, ints(4).to(device))
    assert parts(groups) == parts(clean)
    assert torch.equal(padded[:4], weights)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("num_experts", "top_k"), [(64, 6), (256, 6)])
def test_every_few_tokens_are_routed_alike_in_one_launch(device, num_experts, top_k):
    logits, bias = normal(1, 64, num_experts + 2).to(device) * 2, normal(2, num_experts).to(device) / 10
    for tokens in range(1, 65):
        check_assignment(logits[:tokens], bias, top_k, 2, tokens)
