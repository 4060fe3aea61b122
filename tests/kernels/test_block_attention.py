"""Attention of blocks of guesses over pages and over themselves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels.values import BlockIndex
from tests.kernels.cases import PagedCache, ints, normal

# heads, KV heads, head width, page size, rows of a block
SHAPES = [(4, 2, 64, 16, 8), (2, 2, 32, 32, 3), (6, 1, 20, 4, 17), (3, 3, 8, 16, 1), (1, 1, 80, 8, 5)]
KINDS = [(0, False), (0, True), (1, True), (4, True), (7, False), (19, True), (300, False)]


def operands(shape, num_blocks, seed=0):
    heads, kv_heads, width, _, rows = shape
    count = num_blocks * rows
    return [normal(seed + 200 + i, count, n * width) for i, n in enumerate((heads, kv_heads, kv_heads))]


def index(cache, lengths, slots=None):
    slots = range(len(lengths)) if slots is None else slots
    return BlockIndex(ints(*lengths), ints(*slots), cache.table)


def by_definition(q, k, v, past_k, past_v, window, is_causal, scale):
    """One block behind keys and values [n, nk, hd], in float64."""
    n, width = len(past_k), past_k.shape[2]
    q, k, v = (x.double().unflatten(1, (-1, width)) for x in (q, k, v))
    k, v = torch.cat([past_k.double(), k]), torch.cat([past_v.double(), v])
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * scale
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    for o in range(len(q)):
        for key in range(len(k)):
            if key < n:
                seen[o, key] = not window or key >= n + o - (window - 1)
            else:
                other = key - n
                seen[o, key] = not (is_causal and other > o) and (not window or abs(other - o) < window)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1)).flatten(1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "is_causal"), KINDS)
def test_block_attention_agrees_with_its_definition(kernels, shape, window, is_causal):
    lengths = [0, 1, 16, 70]
    cache = PagedCache([max(1, n) for n in lengths], shape[3], shape[1], shape[2])
    q, k, v = operands(shape, len(lengths))
    ix = index(cache, lengths)
    found = kernels.block_attention(q, k, v, cache.k_pages, cache.v_pages, ix, window, 0.2, is_causal=is_causal)
    for p, n in enumerate(lengths):
        part = slice(p * shape[4], (p + 1) * shape[4])
        past = (cache.k[p][:n], cache.v[p][:n])
        wanted = by_definition(q[part], k[part], v[part], *past, window, is_causal, 0.2)
        torch.testing.assert_close(found[part].double(), wanted, rtol=1e-5, atol=1e-5)


@given(
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    threads=st.integers(1, 3),
)
def test_a_block_does_not_know_its_company(kernels, shape, kind, lengths, threads):
    window, is_causal = kind
    cache = PagedCache([n + 1 for n in lengths], shape[3], shape[1], shape[2])
    operand, pages = operands(shape, len(lengths)), (cache.k_pages, cache.v_pages)
    threaded = replace(kernels, num_threads=threads)
    together = threaded.block_attention(*operand, *pages, index(cache, lengths), window, 0.2, is_causal=is_causal)
    for p, n in enumerate(lengths):
        part = slice(p * shape[4], (p + 1) * shape[4])
        mine = [x[part] for x in operand]
        alone = kernels.block_attention(*mine, *pages, index(cache, [n], [p]), window, 0.2, is_causal=is_causal)
        assert torch.equal(together[part], alone)


@given(shape=st.sampled_from(SHAPES), window=st.sampled_from([0, 3, 19]), length=st.integers(0, 60))
def test_what_lies_behind_the_length_or_below_the_window_is_not_read(kernels, shape, window, length):
    """Addresses outside any allocation stand there: a read ends the process. What shares a page with a key is NaN."""
    page = shape[3]
    cache = PagedCache([80], page, shape[1], shape[2])
    rest = (cache.k_pages, cache.v_pages, index(cache, [length]), window, 0.2)
    q, k, v = operands(shape, 1)
    clean = kernels.block_attention(q, k, v, *rest, is_causal=False)
    low = max(0, length - window + 1) if window else 0
    for position in (*range(low), *range(length, 80)):
        for pages in rest[:2]:
            pages[cache.table[0, position // page].item(), :, position % page] = torch.nan
    cache.table[0, : low // page] = -(10**6)
    cache.table[0, -(-length // page) :] = -(10**6)
    assert torch.equal(kernels.block_attention(q, k, v, *rest, is_causal=False), clean)


def test_a_place_sees_later_ones_of_its_block_unless_it_is_causal(kernels):
    shape = SHAPES[0]
    cache = PagedCache([20], 16, 2, 64)
    rest = (cache.k_pages, cache.v_pages, index(cache, [20]), 0, 0.2)
    q, k, v = operands(shape, 1)
    changed = k.clone()
    changed[5] += 1
    for is_causal, first in ((True, 5), (False, 0)):
        same = kernels.block_attention(q, k, v, *rest, is_causal=is_causal)
        other = kernels.block_attention(q, changed, v, *rest, is_causal=is_causal)
        assert torch.equal(same[:first], other[:first])
        assert (same[first:] != other[first:]).any(1).all()


def test_operands_may_be_columns_of_one_wider_tensor(kernels):
    shape = SHAPES[0]
    cache = PagedCache([30, 30], 16, 2, 64)
    q, k, v = operands(shape, 2)
    wide = torch.cat([q, k, torch.full((len(q), 7), torch.nan), v], 1)
    parts = wide.split([256, 128, 7, 128], 1)
    rest = (cache.k_pages, cache.v_pages, index(cache, [30, 9]), 0, 0.2)
    found = kernels.block_attention(parts[0], parts[1], parts[3], *rest, is_causal=False)
    assert torch.equal(found, kernels.block_attention(q, k, v, *rest, is_causal=False))
