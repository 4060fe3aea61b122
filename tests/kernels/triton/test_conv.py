"""Short convolution and shift on a device: the twin's bits, and steps of any cut in any company.

Sums are taken in the twin's order and without fused operations, so they are equal to its, not close.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.kernels import torch_set
from samebit.kernels.triton import conv
from samebit.kernels.triton.launch import IS_INTERPRETED, num_launches
from samebit.kernels.values import ConvIndex
from tests.kernels.cases import SINK, ints, longs, normal, ring_index, tag
from tests.kernels.triton.conv_steps import HISTORY, RING, TAPS, kept, pool, programs_in_order, random_step

TILES = (conv.Tile(16, 2, 1, 64), conv.Tile(128, 16, 1, 128), conv.Tile(512, 1, 8, 64))


def run(device, dtype, x, taps, values, tags, ix, residual=None):
    """The output of a step on a pool of ``dtype``; ``values`` and ``tags`` become what the pool then has."""
    rows, row_tags = values.to(device, dtype), tags.to(device)
    index = [getattr(ix, name).to(device) for name in ConvIndex.__slots__]
    if taps is None:
        y = conv.shift(x.to(device), rows, row_tags, *index, 1)
    else:
        extra = None if residual is None else residual.to(device)
        y = conv.short_conv(x.to(device), taps.to(device), rows, row_tags, *index, extra, 1)
    values.copy_(rows)
    tags.copy_(row_tags)
    return y.cpu()


def twin(x, taps, values, tags, ix, residual=None):
    index = [getattr(ix, name) for name in ConvIndex.__slots__]
    if taps is None:
        return torch_set.shift(x, values, tags, *index, 1)
    return torch_set.short_conv(x, taps, values, tags, *index, residual, 1)


def use_tile(patch, tile):
    """Have steps run in this tile; in the one that is chosen for them if None."""
    if tile is not None:
        patch.setattr(conv, "tile_of", lambda *_: tile)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    channels=st.sampled_from([1, 63, 300]),
    has_residual=st.booleans(),
    is_shift=st.booleans(),
    is_wide=st.booleans(),
    tile=st.sampled_from([None, *TILES]),
)
def test_outputs_rows_and_tags_are_those_of_the_twin_in_any_tile(
    device, seed, channels, has_residual, is_shift, is_wide, tile
):
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    ix, sources, num_rows = random_step(random.Random(seed))
    live, tokens = int(ix.query_start[-1]), ix.write_rows.shape[0]
    x, taps, residual = normal(seed, tokens, channels), normal(2, TAPS, channels), normal(3, tokens, channels)
    x = x if is_wide else x.to(dtype)
    x[live:] = torch.nan
    values, tags = pool(channels, num_rows)
    read = torch.tensor(sorted(sources - {0}), dtype=torch.long)
    values[read] = kept(normal(4, len(read), channels), torch.bfloat16)
    taps, residual = None if is_shift else taps, residual if has_residual and not is_shift else None
    expected, expected_tags = values.clone(), tags.clone()
    with pytest.MonkeyPatch.context() as patch, programs_in_order(seed):
        use_tile(patch, tile)
        y = run(device, dtype, x, taps, values, tags, ix, residual)
    wanted = twin(kept(x.float(), dtype), taps, expected, expected_tags, ix, residual)
    assert y.dtype is (dtype if residual is None else torch.float32)
    assert torch.equal(y.float(), kept(wanted, y.dtype))
    assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(tags, expected_tags)


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("is_shift", [False, True])
def test_more_rows_entries_and_tokens_than_are_searched_at_once(device, monkeypatch, is_shift, order):
    monkeypatch.setattr(conv, "SCAN", 8)
    monkeypatch.setattr(conv, "ROW_BLOCK", 4)
    ix, sources, num_rows = random_step(random.Random(5), 40, 9)
    assert ix.entry_sources.numel() > 2 * 8
    assert int(ix.query_start.diff().max()) > conv.MANY.tokens + 2 * 8
    x, taps = normal(1, ix.write_rows.shape[0], 5), None if is_shift else normal(2, TAPS, 5)
    values, tags = pool(5, num_rows)
    values[sorted(sources - {0})] = normal(4, len(sources - {0}), 5)
    expected, expected_tags = values.clone(), tags.clone()
    with programs_in_order(order):
        y = run(device, torch.float32, x, taps, values, tags, ix)
    assert torch.equal(y, twin(x, taps, expected, expected_tags, ix))
    assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(tags, expected_tags)


@pytest.mark.parametrize("order", range(6))
def test_what_a_row_overwrites_is_first_used_whatever_program_runs_first(device, monkeypatch, order):
    """The last of nine tokens take the places of the history, of which the first outputs and two of four entries are made."""
    monkeypatch.setattr(conv, "SCAN", 4)
    ring, history = torch.arange(2, 2 + RING), normal(1, HISTORY, 5)
    x, taps = normal(2, RING, 5), normal(3, TAPS, 5)
    own, other = ring_index(ring, HISTORY, RING, TAPS), ring_index(ring + RING, 0, 0, TAPS)
    fields = {name: torch.cat([getattr(own, name), getattr(other, name)]) for name in ConvIndex.__slots__} | {
        "query_start": ints(0, RING, RING),
        "entry_sources": torch.tensor([[-1] * 3, [-1] * 3, [-3, -4, -5], [-4, -5, 0]], dtype=torch.int32),
        "entry_source_tags": torch.tensor([[0] * 3, [0] * 3, [tag(0), tag(1), tag(2)], [tag(1), tag(2), 0]]),
        "entry_dest": torch.tensor([[SINK] * 3, [SINK] * 3, [20, 21, 22], [23, 24, 25]], dtype=torch.int32),
        "entry_tag": longs(0, 0, 901, 902),
    }
    assert set(own.write_rows.tolist()) >= set(own.read_rows.flatten().tolist()) == {2, 3, 4}
    values, tags = pool(5)
    values[2:5], tags[2:5] = history, own.read_tags[0]
    with programs_in_order(order):
        y = run(device, torch.float32, x, taps, values, tags, ConvIndex(**fields))
    inputs = torch.cat([history, x])
    wanted = sum(weight * inputs[tap : tap + RING] for tap, weight in enumerate(taps)) + x
    assert torch.equal(y, wanted)
    assert torch.equal(values[20:26], inputs[[0, 1, 2, 1, 2, 3]])
    assert tags[20:26].tolist() == [901] * 3 + [902] * 3
    assert torch.equal(values[own.write_rows], x)


def step_of(counts, padding=0):
    """A step of new rows with so many tokens each, and its pool."""
    parts = [ring_index(torch.arange(2, 2 + RING) + RING * i, 0, count, TAPS) for i, count in enumerate(counts)]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in ConvIndex.__slots__}
    joined["query_start"] = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    joined["write_rows"] = torch.cat([joined["write_rows"], ints(*[SINK] * padding)])
    joined["write_tags"] = torch.cat([joined["write_tags"], longs(*[0] * padding)])
    return ConvIndex(**joined), *pool(5, 2 + RING * len(counts))


@pytest.mark.parametrize("tile", [None, *TILES], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_one_long_row_among_many_short_ones_and_padding_are_found(device, monkeypatch, tile, padding):
    use_tile(monkeypatch, tile)
    counts = [1, 1, 8, 0, 1, 3, 1]
    assert sum(counts) + padding <= HISTORY * len(counts)
    ix, values, tags = step_of(counts, padding)
    x, taps = normal(1, sum(counts) + padding, 5), normal(2, TAPS, 5)
    expected, expected_tags = values.clone(), tags.clone()
    y = run(device, torch.float32, x, taps, values, tags, ix)
    assert torch.equal(y, twin(x, taps, expected, expected_tags, ix))
    assert torch.equal(y[sum(counts) :], torch.zeros(padding, 5))


@pytest.mark.skipif(not IS_INTERPRETED, reason="programs are watched in the interpreter")
@pytest.mark.parametrize(("counts", "num_busy"), [([1] * 9, 0), ([1] * 5 + [4] + [1] * 3, 1)])
def test_in_a_decode_step_only_programs_with_something_to_store_load_inputs(device, monkeypatch, counts, num_busy):
    ix, values, tags = step_of(counts)
    busy, convolve = [], conv.convolve_later_tokens
    monkeypatch.setattr(conv, "convolve_later_tokens", lambda *args, **named: busy.append(convolve(*args, **named)))
    run(device, torch.float32, normal(1, sum(counts), 5), normal(2, TAPS, 5), values, tags, ix)
    assert len(busy) == num_busy


def test_the_tile_is_a_function_of_sizes_and_no_wider_than_the_channels():
    assert conv.tile_of(128, 128, 2048) == conv.tile_of(1, 1, 2048) == conv.FEW
    assert conv.tile_of(8192, 8, 2048) == conv.tile_of(20, 1, 2048) == conv.MANY
    assert [conv.tile_of(1, 1, channels).channels for channels in (1, 63, 200, 300)] == [1, 64, 256, 256]


def test_a_step_is_one_launch(device):
    before = num_launches()
    run(
        device,
        torch.float32,
        normal(1, 9, 5),
        normal(2, TAPS, 5),
        *pool(5),
        ring_index(torch.arange(2, 11), 0, 9, TAPS),
    )
    assert num_launches() == before + 1


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, 3 * RING), min_size=1, max_size=3), channels=st.sampled_from([1, 63, 70]))
def test_the_cut_of_a_sequence_changes_neither_outputs_nor_ring(device, cuts, channels):
    total = max(1, sum(cuts))
    x, weights, residual = normal(1, total, channels), normal(2, TAPS, channels), normal(3, total, channels)
    ring = torch.arange(2, 2 + RING)
    dtype = (torch.float32, torch.bfloat16)[len(cuts) % 2]
    whole_pool, cut_pool, parts, first = pool(channels), pool(channels), [], 0
    whole = run(device, dtype, x, weights, *whole_pool, ring_index(ring, 0, total, TAPS), residual)
    for count in cuts if sum(cuts) else [1]:
        part = slice(first, first + count)
        ix = ring_index(ring, first, count, TAPS)
        parts.append(run(device, dtype, x[part], weights, *cut_pool, ix, residual[part]))
        first += count
    assert torch.equal(torch.cat(parts), whole)
    last = [p for p in range(total - RING, total) if p >= 0]
    rows = ring[[p % RING for p in last]]
    for values, tags in (whole_pool, cut_pool):
        assert torch.equal(values[rows], kept(x[last], dtype))
        assert tags[rows].tolist() == [tag(p) for p in last]


@settings(max_examples=8)
@given(batch=st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_a_batch_row_does_not_know_its_company(device, batch):
    weights = normal(1, TAPS, 33)
    steps = [normal(10 + i, count, 33) for i, count in enumerate(batch)]
    parts = [ring_index(torch.arange(2 + 7 * i, 9 + 7 * i), 0, n, TAPS) for i, n in enumerate(batch)]
    starts = torch.tensor([0, *batch]).cumsum(0).to(torch.int32)
    joined = {
        name: torch.cat([getattr(p, name) for p in parts]) for name in ConvIndex.__slots__ if name != "query_start"
    }
    values, tags = pool(33)
    ix = ConvIndex(query_start=starts, **joined)
    y = run(device, torch.float32, torch.cat(steps), weights, values, tags, ix)
    for i, part in enumerate(parts):
        own, own_tags = pool(33)
        alone = run(device, torch.float32, steps[i], weights, own, own_tags, part)
        assert torch.equal(y[starts[i] : starts[i + 1]], alone)
        rows = slice(2 + 7 * i, 9 + 7 * i)
        assert torch.equal(values[rows].nan_to_num(), own[rows].nan_to_num())
        assert torch.equal(tags[rows], own_tags[rows])


def test_inputs_may_be_columns_of_a_wider_tensor(device, activation):
    fused, weights = normal(1, 12, 90).to(activation), normal(2, TAPS, 33)
    x, residual, ix = fused[:, 20:53], fused[:, 30:63].float(), ring_index(torch.arange(2, 2 + RING), 0, 12, TAPS)
    found = run(device, activation, x, weights, *pool(33), ix, residual)
    assert torch.equal(found, run(device, activation, x.contiguous(), weights, *pool(33), ix, residual.contiguous()))


def test_entries_and_stored_rows_are_read_before_anything_is_written(device):
    values, tags = pool(5)
    values[4:7] = normal(1, 3, 5)
    tags[4:7] = longs(11, 12, 13)
    before = values[4:7].clone()
    read, read_tags = ints(4, 5, 6), longs(11, 12, 13)
    ix = ConvIndex(
        query_start=ints(0, 0),
        read_rows=read[None],
        read_tags=read_tags[None],
        store_rows=ints(5, 6, 4)[None],
        store_tags=longs(50, 51, 52)[None],
        write_rows=ints(),
        write_tags=longs(),
        entry_sources=-(read + 1)[None],
        entry_source_tags=read_tags[None],
        entry_dest=ints(10, 11, 12)[None],
        entry_tag=longs(900),
    )
    run(device, torch.float32, normal(2, 0, 5), normal(3, TAPS, 5), values, tags, ix)
    assert torch.equal(values[[5, 6, 4]], before)
    assert torch.equal(values[10:13], before)
    assert tags[[5, 6, 4]].tolist() == [50, 51, 52]
    assert tags[10:13].tolist() == [900] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [256, 512, 2048, 100])
@pytest.mark.parametrize("count", [1, 7, 30, 31, 32, 700, 8192])
def test_long_rows_resume_and_are_the_twins(device, activation, channels, count):
    ring, start = torch.arange(2, 33), 50
    entry = torch.arange(40, 43)
    x, weights, residual = (
        normal(1, count, channels).to(activation),
        normal(2, TAPS, channels),
        normal(3, count, channels),
    )
    ix = ring_index(ring, start, count, TAPS, padding=5, entry=entry)
    snapshot = torch.arange(50, 53, dtype=torch.int32)[None]
    stores = ints(*[2 + p % 31 for p in range(start - HISTORY, start)])[None]
    fields = {name: getattr(ix, name) for name in ConvIndex.__slots__}
    sources = [[s if s >= 0 else -(50 + count + h + 1) for h, s in enumerate(ix.entry_sources[0].tolist())]]
    fields["entry_sources"] = torch.tensor(sources, dtype=torch.int32)
    ix = ConvIndex(**fields | {"read_rows": snapshot, "store_rows": stores})
    padded = torch.cat([x, torch.full((5, channels), torch.nan, dtype=activation)])
    residual = torch.cat([residual, torch.zeros(5, channels)])
    values, tags = pool(channels, 60)
    values[2:33] = values[50:53] = 1.5
    expected, expected_tags = values.clone(), tags.clone()
    for extra in (residual, None):
        y = run(device, activation, padded, weights, values, tags, ix, extra)
        wanted = twin(padded.float(), weights, expected, expected_tags, ix, extra)
        assert torch.equal(y.float(), kept(wanted, y.dtype))
        assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(tags, expected_tags)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200))
def test_random_steps_of_real_width_are_the_twins(device, seed):
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    ix, sources, num_rows = random_step(random.Random(seed), 10 * RING)
    tokens = ix.write_rows.shape[0]
    x, taps, residual = normal(seed, tokens, 768).to(dtype), normal(2, TAPS, 768), normal(3, tokens, 768)
    values, tags = pool(768, num_rows)
    read = torch.tensor(sorted(sources - {0}), dtype=torch.long)
    values[read] = normal(4, len(read), 768).to(torch.bfloat16).float()
    expected, expected_tags = values.clone(), tags.clone()
    y = run(device, dtype, x, taps, values, tags, ix, residual)
    assert torch.equal(y, twin(x.float(), taps, expected, expected_tags, ix, residual))
    assert torch.equal(values.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(tags, expected_tags)
