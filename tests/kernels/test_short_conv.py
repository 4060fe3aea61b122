"""Short convolution: values, rings, checkpoint entries and tags."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels.values import ConvIndex
from tests.kernels.cases import SINK, ints, longs, normal, ring_index, tag

TAPS, RING = 4, 9


def pool(channels: int, rows: int = 40):
    """A pool of NaN rows but for the zero row, and tags nobody expects."""
    values = torch.full((rows, channels), torch.nan)
    values[0] = 0
    tags = torch.full((rows,), -1, dtype=torch.int64)
    tags[0] = 0
    return values, tags


def by_definition(x, taps, residual):
    """The convolution of a whole sequence in float64."""
    wide = torch.cat([torch.zeros(len(taps) - 1, x.shape[1]), x]).double()
    y = x.double() + residual.double()
    for j in range(len(taps)):
        y = y + taps[j].double() * wide[j : j + len(x)]
    return y


def run_cut(kernels, x, taps, residual, cuts, ring, values, tags):
    """The sequence in steps of the given sizes; outputs put together."""
    out, first = [], 0
    for count in cuts:
        ix = ring_index(ring, first, count, len(taps))
        part = slice(first, first + count)
        out.append(kernels.short_conv(x[part], taps, values, tags, ix, residual[part]))
        first += count
    return torch.cat(out)


@pytest.mark.parametrize(("channels", "taps"), [(1, 4), (63, 4), (64, 3), (100, 2), (257, 4)])
def test_a_convolution_agrees_with_its_definition(kernels, channels, taps):
    x, weights, residual = normal(1, 20, channels), normal(2, taps, channels), normal(3, 20, channels)
    found = run_cut(kernels, x, weights, residual, [20], torch.arange(2, 32), *pool(channels))
    torch.testing.assert_close(found.double(), by_definition(x, weights, residual), rtol=1e-6, atol=2e-6)


@given(seed=st.integers(0, 2**32), channels=st.sampled_from([1, 63, 257]), padding=st.integers(0, 3))
def test_a_norm_behind_a_convolution_is_that_of_its_outputs(kernels, seed, channels, padding):
    count, (*plain, gain) = 12, (normal(seed + i, *shape) for i, shape in enumerate([(TAPS, channels), (channels,)]))
    x, residual = (normal(seed + i, count + padding, channels) for i in (2, 3))
    x[count:] = torch.nan
    ix = ring_index(torch.arange(2, 2 + RING), 4, count, TAPS, padding=padding)
    (values, tags), found = pool(channels), pool(channels)
    values[2:], found[0][2:] = 1.5, 1.5
    y = kernels.short_conv(x, *plain, values, tags, ix, residual)
    both = kernels.short_conv_norm(x, *plain, *found, ix, residual, gain, 1e-6)
    assert torch.equal(both[0], y)
    assert torch.equal(both[1], kernels.rms_norm(y, gain, 1e-6))
    assert torch.equal(found[0].nan_to_num(7.0), values.nan_to_num(7.0))
    assert torch.equal(found[1], tags)


def test_inputs_may_be_columns_of_a_wider_tensor(kernels):
    wide, weights = normal(1, 12, 90), normal(2, TAPS, 33)
    ring, pools = torch.arange(2, 2 + RING), (pool(33), pool(33))
    x, residual = wide[:, 20:53], torch.zeros(12, 33)
    found = [
        run_cut(kernels, part, weights, residual, [7, 5], ring, *place)
        for part, place in zip((x, x.contiguous()), pools, strict=True)
    ]
    assert torch.equal(*found)
    assert torch.equal(pools[0][0][ring], pools[1][0][ring])


@given(cuts=st.lists(st.integers(0, 3 * RING), min_size=1, max_size=6), channels=st.sampled_from([1, 63, 70]))
def test_the_cut_of_a_sequence_changes_neither_outputs_nor_ring(kernels, cuts, channels):
    total = max(1, sum(cuts))
    x, weights, residual = normal(1, total, channels), normal(2, TAPS, channels), normal(3, total, channels)
    ring = torch.arange(2, 2 + RING)
    whole_pool, cut_pool = pool(channels), pool(channels)
    whole = run_cut(kernels, x, weights, residual, [total], ring, *whole_pool)
    cuts = cuts if sum(cuts) else [1]
    found = run_cut(kernels, x, weights, residual, cuts, ring, *cut_pool)
    assert torch.equal(found, whole)
    last = [p for p in range(total - RING, total) if p >= 0]
    rows = ring[[p % RING for p in last]]
    for values, tags in (whole_pool, cut_pool):
        assert torch.equal(values[rows], x[last])
        assert tags[rows].tolist() == [tag(p) for p in last]


@pytest.mark.parametrize("count", range(1, 3 * RING + 1))
def test_a_ring_is_read_before_it_is_written(kernels, count):
    x, weights = normal(1, 5 + count, 33), normal(2, TAPS, 33)
    residual = torch.zeros_like(x)
    whole = run_cut(kernels, x, weights, residual, [5 + count], torch.arange(2, 2 + RING), *pool(33))
    values, tags = pool(33)
    ring = torch.arange(2, 2 + RING)
    run_cut(kernels, x, weights, residual, [5], ring, values, tags)
    entry = ints(20, 21, 22)
    ix = ring_index(ring, 5, count, TAPS, entry=entry)
    y = kernels.short_conv(x[5:], weights, values, tags, ix, residual[5:])
    assert torch.equal(y, whole[5:])
    assert torch.equal(values[entry], x[-3:])
    assert tags[entry].tolist() == [777] * 3


@given(batch=st.lists(st.integers(0, 6), min_size=1, max_size=5), threads=st.integers(1, 3))
def test_a_batch_row_does_not_know_its_company(kernels, batch, threads):
    weights = normal(1, TAPS, 33)
    steps = [normal(10 + i, count, 33) for i, count in enumerate(batch)]
    parts = [ring_index(torch.arange(2 + 7 * i, 9 + 7 * i), 0, n, TAPS) for i, n in enumerate(batch)]
    starts = torch.tensor([0, *batch]).cumsum(0).to(torch.int32)
    joined = {
        name: torch.cat([getattr(p, name) for p in parts]) for name in ConvIndex.__slots__ if name != "query_start"
    }
    values, tags = pool(33)
    x = torch.cat(steps)
    y = replace(kernels, num_threads=threads).short_conv(
        x, weights, values, tags, ConvIndex(query_start=starts, **joined), None
    )
    for i, part in enumerate(parts):
        own, own_tags = pool(33)
        alone = kernels.short_conv(steps[i], weights, own, own_tags, part, None)
        assert torch.equal(y[starts[i] : starts[i + 1]], alone)
        rows = slice(2 + 7 * i, 9 + 7 * i)
        assert torch.equal(values[rows].nan_to_num(), own[rows].nan_to_num())
        assert torch.equal(tags[rows], own_tags[rows])


def test_threads_do_not_change_a_long_convolution(kernels):
    x, weights = normal(1, 600, 400), normal(2, TAPS, 400)
    ix = ring_index(torch.arange(2, 2 + RING), 0, 600, TAPS)
    outputs = []
    for threads in (1, 2):
        values, tags = pool(400)
        outputs.append(replace(kernels, num_threads=threads).short_conv(x, weights, values, tags, ix, None))
        outputs.append(values[2 : 2 + RING])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


def test_padding_gives_zeros_and_touches_no_row(kernels):
    values, tags = pool(20)
    x = normal(1, 7, 20)
    x[4:] = torch.nan
    ix = ring_index(torch.arange(2, 2 + RING), 0, 4, TAPS, padding=3)
    ix.write_rows[4:] = 30
    values[30] = 5
    y = kernels.short_conv(x, normal(2, TAPS, 20), values, tags, ix, torch.full_like(x, 2.0))
    assert torch.equal(y[4:], torch.zeros(3, 20))
    assert y[:4].isfinite().all()
    assert torch.equal(values[30], torch.full((20,), 5.0))
    assert tags[30] == -1
    assert torch.equal(values[0], torch.zeros(20))
    assert tags[0] == 0


def resume_index(read, read_tags, store, entry_source_tags, entry_dest):
    """No tokens: read rows are stored in a ring and make up a checkpoint entry."""
    return ConvIndex(
        query_start=ints(0, 0),
        read_rows=read[None],
        read_tags=read_tags[None],
        store_rows=store[None],
        store_tags=longs(50, 51, 52)[None],
        write_rows=ints(),
        write_tags=longs(),
        entry_sources=-(read + 1)[None],
        entry_source_tags=entry_source_tags[None],
        entry_dest=entry_dest[None],
        entry_tag=longs(900),
    )


def test_a_stale_source_spoils_the_tags_copied_from_it(kernels):
    values, tags = pool(5)
    values[4:7] = normal(1, 3, 5)
    tags[4:7] = longs(11, 12, 13)
    expected = longs(11, 99, 13)
    ix = resume_index(ints(4, 5, 6), expected, ints(7, 8, 9), expected, ints(10, 11, 12))
    kernels.short_conv(normal(2, 0, 5), normal(3, TAPS, 5), values, tags, ix, None)
    assert torch.equal(values[7:10], values[4:7])
    assert torch.equal(values[10:13], values[4:7])
    assert (tags[7:10] == longs(50, 51, 52)).tolist() == [True, False, True]
    assert (tags[10:13] == longs(900, 900, 900)).tolist() == [True, False, True]


def test_entries_and_stored_rows_are_read_before_anything_is_written(kernels):
    values, tags = pool(5)
    values[4:7] = normal(1, 3, 5)
    tags[4:7] = longs(11, 12, 13)
    before = values[4:7].clone()
    ix = resume_index(ints(4, 5, 6), longs(11, 12, 13), ints(5, 6, 4), longs(11, 12, 13), ints(10, 11, 12))
    kernels.short_conv(normal(2, 0, 5), normal(3, TAPS, 5), values, tags, ix, None)
    assert torch.equal(values[[5, 6, 4]], before)
    assert torch.equal(values[10:13], before)
    assert tags[[5, 6, 4]].tolist() == [50, 51, 52]
    assert tags[10:13].tolist() == [900] * 3


def test_a_step_of_inert_rows_changes_nothing_outside_the_sink(kernels):
    values, tags = pool(5)
    sink = ints(SINK, SINK, SINK)
    nothing = longs(0, 0, 0)
    ix = resume_index(ints(0, 0, 0), nothing, sink, nothing, sink)
    before, before_tags = values.clone(), tags.clone()
    kernels.short_conv(normal(2, 0, 5), normal(3, TAPS, 5), values, tags, ix, None)
    keep = [i for i in range(len(tags)) if i != SINK]
    assert torch.equal(values[keep].nan_to_num(7.0), before[keep].nan_to_num(7.0))
    assert torch.equal(tags[keep], before_tags[keep])


@given(cuts=st.lists(st.integers(1, 3 * RING), min_size=1, max_size=6), channels=st.sampled_from([1, 63, 70]))
def test_a_shift_gives_each_token_the_input_before_it_and_keeps_what_a_convolution_keeps(kernels, cuts, channels):
    x = normal(1, sum(cuts), channels)
    ring, entry = torch.arange(2, 2 + RING), torch.arange(20, 20 + TAPS - 1)
    (values, tags), (conv_values, conv_tags) = pool(channels), pool(channels)
    found, first = [], 0
    for count in cuts:
        ix = ring_index(ring, first, count, TAPS, entry=entry, padding=2)
        padded = torch.cat([x[first : first + count], torch.full((2, channels), torch.nan)])
        found.append(kernels.shift(padded, values, tags, ix))
        kernels.short_conv(padded, normal(2, TAPS, channels), conv_values, conv_tags, ix, None)
        assert not found[-1][count:].any()
        found[-1] = found[-1][:count]
        first += count
    assert torch.equal(torch.cat(found), torch.cat([torch.zeros(1, channels), x[:-1]]))
    assert torch.equal(values.nan_to_num(7.0), conv_values.nan_to_num(7.0))
    assert torch.equal(tags, conv_tags)
