"""Paged attention and K/V writes."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels.values import KvIndex, Turn
from tests.kernels.cases import PagedCache, ints, longs, normal, ring_index

# heads, KV heads, head width, d_rel, extent, page size
SHAPES = [
    (4, 2, 64, 16, 32, 16),
    (2, 2, 32, 4, 7, 32),
    (6, 1, 20, 3, 100, 4),
    (3, 3, 8, 1, 1, 16),
    (1, 1, 80, 5, 33, 8),
]


def operands(shape, tokens, seed=0):
    heads, _, width, d_rel, extent, _ = shape
    q, rel = normal(seed + 100, tokens, heads * width), normal(seed + 101, tokens, heads * d_rel)
    return q, rel, normal(seed + 102, d_rel, extent), torch.linspace(0.5, 1.5, tokens)


def by_definition(q, rel, rel_proj, tau, k, v, window, scale):
    """All queries of one sequence over all its keys in float64."""
    q, rel, rel_proj, tau, k, v = (x.double() for x in (q, rel, rel_proj, tau, k, v))
    q, rel = q.unflatten(1, (-1, k.shape[2])), rel.unflatten(1, (-1, len(rel_proj)))
    group, extent = q.shape[1] // k.shape[1], rel_proj.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    bias = torch.einsum("ihd,de->hie", rel, rel_proj)
    bias = bias.gather(2, distance.clamp(0, extent - 1).expand(q.shape[1], -1, -1))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale + torch.where(distance < extent, bias, 0.0)
    seen = (distance >= 0) & ((distance < window) if window else True)
    weights = (scores * tau[:, None]).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 1, 19])
def test_attention_agrees_with_its_definition(kernels, shape, window):
    cache = PagedCache([70], shape[5], shape[1], shape[2])
    q, rel, rel_proj, tau = operands(shape, 70)
    found = kernels.attention(
        q, rel, rel_proj, tau, cache.k_pages, cache.v_pages, cache.index([(0, 0, 70)]), window, 0.2
    )
    wanted = by_definition(q, rel, rel_proj, tau, cache.k[0], cache.v[0], window, 0.2)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@given(
    shape=st.sampled_from(SHAPES),
    window=st.sampled_from([0, 1, 5, 19, 64]),
    cuts=st.lists(st.integers(0, 80), max_size=5),
    threads=st.integers(1, 3),
)
def test_the_cut_of_a_sequence_does_not_change_attention(kernels, shape, window, cuts, threads):
    cache = PagedCache([80], shape[5], shape[1], shape[2])
    q, rel, rel_proj, tau = operands(shape, 80)
    pages = (cache.k_pages, cache.v_pages)
    whole = kernels.attention(q, rel, rel_proj, tau, *pages, cache.index([(0, 0, 80)]), window, 0.2)
    bounds = sorted({0, 80, *cuts})
    cut = replace(kernels, num_threads=threads)
    for begin, end in itertools.pairwise(bounds):
        part = slice(begin, end)
        ix = cache.index([(0, begin, end - begin)])
        found = cut.attention(q[part], rel[part], rel_proj, tau[part], *pages, ix, window, 0.2)
        assert torch.equal(found, whole[part])


@pytest.mark.parametrize("window", [0, 19])
def test_decode_chunks_and_prefill_give_the_same_bits(kernels, window):
    shape = SHAPES[0]
    cache = PagedCache([300], 16, 2, 64)
    q, rel, rel_proj, tau = operands(shape, 300)
    pages = (cache.k_pages, cache.v_pages)
    whole = kernels.attention(q, rel, rel_proj, tau, *pages, cache.index([(0, 0, 300)]), window, 0.2)
    for size in (1, 7, 128):
        for begin in range(0 if size > 1 else 270, 300, size):
            part = slice(begin, min(begin + size, 300))
            ix = cache.index([(0, begin, part.stop - begin)])
            found = kernels.attention(q[part], rel[part], rel_proj, tau[part], *pages, ix, window, 0.2)
            assert torch.equal(found, whole[part])


@given(
    shape=st.sampled_from(SHAPES[:3]),
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=5),
    padding=st.integers(0, 3),
    window=st.sampled_from([0, 11]),
)
def test_a_batch_row_does_not_know_its_company(kernels, shape, rows, padding, window):
    cache = PagedCache([first + count + 1 for first, count in rows], shape[5], shape[1], shape[2])
    tokens = sum(count for _, count in rows)
    q, rel, rel_proj, tau = operands(shape, tokens + padding)
    q[tokens:], rel[tokens:], tau[tokens:] = torch.nan, torch.nan, torch.nan
    batch = [(slot, first, count) for slot, (first, count) in enumerate(rows)]
    pages = (cache.k_pages, cache.v_pages)
    together = kernels.attention(q, rel, rel_proj, tau, *pages, cache.index(batch), window, 0.2)
    assert torch.equal(together[tokens:], torch.zeros(padding, shape[0] * shape[2]))
    at = 0
    for row in batch:
        part = slice(at, at + row[2])
        at += row[2]
        alone = kernels.attention(q[part], rel[part], rel_proj, tau[part], *pages, cache.index([row]), window, 0.2)
        assert torch.equal(together[part], alone)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]])
def test_pages_below_the_window_and_beyond_the_sequence_are_not_read(kernels, shape):
    """Addresses outside any allocation stand there: a read ends the process."""
    page = shape[5]
    cache = PagedCache([96], page, shape[1], shape[2])
    q, rel, rel_proj, tau = operands(shape, 2)
    ix = cache.index([(0, 78, 2)])
    arguments = (q, rel, rel_proj, tau, cache.k_pages, cache.v_pages, ix, 20, 0.2)
    clean = kernels.attention(*arguments)
    ix.page_table[0, : 59 // page] = -(10**6)
    ix.page_table[0, 80 // page :] = -(10**6)
    assert torch.equal(kernels.attention(*arguments), clean)


def test_a_key_that_is_not_finite_reaches_only_the_queries_that_see_it(native):
    shape, window = SHAPES[0], 3
    cache = PagedCache([14], 16, 2, 64)
    q, rel, rel_proj, tau = operands(shape, 14)
    pages, ix = (cache.k_pages, cache.v_pages), cache.index([(0, 0, 14)])
    clean = native.attention(q, rel, rel_proj, tau, *pages, ix, window, 0.2)
    for page in pages:
        page[cache.table[0, 0].item(), :, 6] = torch.nan
    spoiled = native.attention(q, rel, rel_proj, tau, *pages, ix, window, 0.2)
    others = [*range(6), *range(9, 14)]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[6:9].isnan().all()


def test_queries_may_be_columns_of_a_wider_tensor(kernels):
    shape = SHAPES[0]
    cache = PagedCache([30], 16, 2, 64)
    q, rel, rel_proj, tau = operands(shape, 30)
    wide = torch.cat([rel, torch.full((30, 7), torch.nan), q], 1)
    rest = (rel_proj, tau, cache.k_pages, cache.v_pages, cache.index([(0, 0, 30)]), 0, 0.2)
    found = kernels.attention(wide[:, -q.shape[1] :], wide[:, : rel.shape[1]], *rest)
    assert torch.equal(found, kernels.attention(q, rel, *rest))


def test_threads_do_not_change_attention(kernels):
    shape = SHAPES[0]
    cache = PagedCache([150, 150], 16, 2, 64)
    q, rel, rel_proj, tau = operands(shape, 300)
    ix = cache.index([(0, 0, 150), (1, 0, 150)])
    arguments = (q, rel, rel_proj, tau, cache.k_pages, cache.v_pages, ix, 0, 0.2)
    single = replace(kernels, num_threads=1).attention(*arguments)
    for threads in (2, 3):
        assert torch.equal(replace(kernels, num_threads=threads).attention(*arguments), single)


def test_normed_keys_and_values_land_in_their_slots_and_pages_are_stamped(kernels):
    fused, gains = normal(1, 4, 20 + 3 * 10 + 3), (normal(2, 5), normal(3, 5))
    q, k, v = fused[:, :20], fused[:, 20:30], fused[:, 31:41]
    pages, page_tags = [torch.full((4, 2, 4, 5), torch.nan) for _ in range(2)], longs(0, 0, 0, 0)
    ix = KvIndex(ints(14, 15, 4, 0), ints(0, 3, 0, 0), longs(5, 6, 7, 8))
    normed = kernels.write_heads(q, k, v, gains, 1e-6, *pages, page_tags, ix)
    assert torch.equal(normed, kernels.rms_norm(q, gains[0], 1e-6))
    for written, rows in zip(pages, (kernels.rms_norm(k, gains[1], 1e-6), v), strict=True):
        slots = written.transpose(1, 2).flatten(0, 1).flatten(1)
        assert torch.equal(slots[[14, 15, 4]], rows[:3])
        untouched = [i for i in range(16) if i not in (14, 15, 4)]
        assert slots[untouched].isnan().all()
    assert page_tags.tolist() == [0, 0, 0, 6]


@given(seed=st.integers(0, 2**32), width=st.sampled_from([5, 16]), padding=st.integers(0, 3))
def test_heads_behind_a_convolution_are_those_of_its_outputs(kernels, seed, width, padding):
    count, channels, ring = 9, 4 * width, torch.arange(2, 12)
    fused, taps = normal(seed, count + padding, 10 * width + 3), normal(seed + 1, 4, channels)
    fused[count:], gains = torch.nan, (normal(seed + 2, width), normal(seed + 3, width))
    q, kv, ix = fused[:, : 6 * width], fused[:, -channels:], ring_index(ring, 4, count, 4, padding=padding)
    slots = torch.randperm(15, generator=torch.Generator().manual_seed(seed))[: count + padding].int() + 1
    slots[count:] = 0
    kv_ix = KvIndex(slots, torch.where(slots == 7, 1, 0).int(), slots.long())
    left = []
    for apart in (False, True):
        rows, tags = torch.full((12, channels), 1.5), torch.zeros(12, dtype=torch.int64)
        pages = [torch.full((4, 2, 4, width), 7.0), torch.full((4, 2, 4, width), 7.0), longs(0, 0, 0, 0)]
        if apart:
            k, v = kernels.short_conv(kv, taps, rows, tags, ix, None).chunk(2, 1)
            normed = kernels.write_heads(q, k, v, gains, 1e-6, *pages, kv_ix)
        else:
            normed = kernels.conv_heads(q, kv, taps, rows, tags, ix, gains, 1e-6, *pages, kv_ix)
        left.append((normed[:count], rows, tags, *pages))
    assert all(map(torch.equal, *left))


def test_turned_heads_are_normed_then_turned_by_their_positions(kernels):
    """Keys in pages, keys of a block and queries, by the formula of a rotation of complex numbers."""
    width, positions = 6, torch.tensor([0, 3, 11, 7])
    fused, gains = normal(1, 4, 5 * width + 1), (normal(2, width), normal(3, width))
    angles = torch.arange(12.0)[:, None] * 10.0 ** -torch.arange(3.0)
    tables = torch.cat([angles.cos()] * 2, 1), torch.cat([-angles.sin(), angles.sin()], 1)
    q, k, v = fused[:, : 2 * width], fused[:, 2 * width : 3 * width], fused[:, -width:]
    pages = [torch.zeros(3, 1, 4, width), torch.zeros(3, 1, 4, width), longs(0, 0, 0)]
    ix, turn = KvIndex(ints(4, 5, 6, 0), ints(0, 0, 0, 0), longs(0, 0, 0, 0)), Turn(positions, *tables)
    both = kernels.write_heads(q, k, v, gains, 1e-6, *pages, ix, turn)
    dense = kernels.turn_heads(fused[:, : 3 * width], torch.stack([gains[0], gains[0], gains[1]]), 1e-6, turn)
    normed = torch.cat([kernels.rms_norm(q, gains[0], 1e-6), kernels.rms_norm(k, gains[1], 1e-6)], 1).view(4, 3, 2, 3)
    wanted = torch.complex(normed[:, :, 0], normed[:, :, 1]) * torch.polar(torch.ones(()), angles)[positions][:, None]
    torch.testing.assert_close(dense, torch.cat([wanted.real, wanted.imag], 2).flatten(1), rtol=1e-5, atol=1e-6)
    assert torch.equal(both, dense[:, : 2 * width])
    assert torch.equal(pages[0][1, 0, :3], dense[:3, 2 * width :])
    assert torch.equal(pages[1][1, 0, :3], v[:3])
    assert not pages[0][[0, 2]].any()
    nothing = kernels.write_heads(q[:, :0], k, v, gains, 1e-6, *pages, ix, turn)
    assert nothing.shape == (4, 0)
    assert torch.equal(pages[0][1, 0, :3], dense[:3, 2 * width :])
