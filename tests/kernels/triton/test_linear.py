"""Products on a device: values, and that a row's bits depend on neither its company nor the tile."""

import pytest
import torch

from samebit.kernels.composed import in_order
from samebit.kernels.triton import linear
from samebit.kernels.triton import set as triton_set
from samebit.kernels.triton.last import counters
from samebit.kernels.triton.launch import num_launches
from samebit.kernels.triton.linear import (
    BLOCK_K,
    CUT_TILES,
    SEGMENT_STEPS,
    TILES,
    certified_row_counts,
    implementations,
    num_segments,
    pack_linear,
)
from tests.kernels.cases import normal

SUM_OF_SEGMENTS = (66, 1024)
SIZES = [(1, 1), (63, 100), (100, 63), (64, 257), (257, 130), SUM_OF_SEGMENTS]
BF16_ROUNDING = 2**-8  # half a unit in the last place, with room for the sum's own rounding
EVERY_TILE = [(dtype, tile) for dtype, tiles in TILES.items() for tile in tiles]
EVERY_SEGMENTS_TILE = [(dtype, tile) for dtype, tiles in TILES.items() for tile in (*tiles, CUT_TILES[dtype])]


def operands(device, activation, num_rows, num_out, num_in, seed=1):
    weight, x = normal(seed, num_out, num_in), normal(seed + 1, num_rows, num_in)
    return x.to(device, activation), pack_linear(weight.to(device), activation)


def product(x, weight, *, wide=False, library=False):
    return implementations(x.dtype)["linear"](x, weight, weight.shape[0], wide, library, 1)


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_product_agrees_with_float64(device, activation, num_out, num_in, wide):
    x, weight = operands(device, activation, 7, num_out, num_in)
    wanted = x.double() @ weight.double().T
    bound = 4e-6 * (x.abs().double() @ weight.abs().double().T)
    if activation is torch.bfloat16 and not wide:
        bound += BF16_ROUNDING * wanted.abs()
    found = product(x, weight, wide=wide)
    assert found.dtype == (torch.float32 if wide else activation)
    assert ((found - wanted).abs() <= bound).all()


def test_a_product_is_the_wide_product_rounded(device, activation):
    x, weight = operands(device, activation, 19, 100, 130)
    assert torch.equal(product(x, weight), product(x, weight, wide=True).to(activation))


@pytest.mark.parametrize(("num_out", "num_in"), [(63, 100), (257, 130), SUM_OF_SEGMENTS])
def test_a_row_of_a_product_does_not_know_its_company(device, activation, num_out, num_in):
    x, weight = operands(device, activation, 150, num_out, num_in)
    together = product(x, weight, wide=True)
    assert torch.equal(product(x.flip(0), weight, wide=True).flip(0), together)
    for first, stop in [(0, 1), (149, 150), (3, 20), (17, 50), (1, 65), (20, 150)]:
        assert torch.equal(product(x[first:stop], weight, wide=True), together[first:stop])


@pytest.mark.parametrize(("dtype", "tile"), EVERY_TILE)
def test_a_tile_does_not_change_a_product(device, monkeypatch, dtype, tile):
    x, weight = operands(device, dtype, 33, 150, 256)
    expected = product(x, weight, wide=True)
    monkeypatch.setattr(linear, "tile_of", lambda *_: tile)
    assert torch.equal(product(x, weight, wide=True), expected)
    assert torch.equal(product(x[5:6], weight, wide=True), expected[5:6])


def addends(x, weight):
    return implementations(x.dtype)["addends"](x, weight, weight.shape[0], False, 1)


def sum_of_segments(x, weight):
    """The products of the segments of K, each by itself, added up in ascending order."""
    length = SEGMENT_STEPS * BLOCK_K[x.dtype]
    parts = zip(x.split(length, 1), weight.split(length, 1), strict=True)
    products = [product(part.contiguous(), of_weight.contiguous(), wide=True) for part, of_weight in parts]
    return in_order(torch.stack([torch.zeros_like(products[0]), *products]))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_few_outputs_over_a_long_k_are_the_sum_of_its_segments(device, activation, rows):
    x, weight = operands(device, activation, rows, *SUM_OF_SEGMENTS)
    assert num_segments(*SUM_OF_SEGMENTS, activation) == 1024 // (SEGMENT_STEPS * BLOCK_K[activation])
    wanted = sum_of_segments(x, weight)
    assert torch.equal(product(x, weight, wide=True), wanted)
    assert torch.equal(product(x, weight), wanted.to(activation))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_sum_of_segments_has_the_same_bits_whoever_adds_it_up(device, activation, rows, monkeypatch):
    x, weight = operands(device, activation, rows, *SUM_OF_SEGMENTS)
    monkeypatch.setattr(linear, "MOST_ADDENDS", 1 << 30)
    by_the_last = product(x, weight, wide=True)
    assert not counters(device).any()
    by_the_caller = addends(x, weight)
    assert by_the_caller.shape[0] == num_segments(*SUM_OF_SEGMENTS, activation)
    assert torch.equal(in_order(by_the_caller), by_the_last)
    monkeypatch.setattr(linear, "MOST_CUT_ROWS", 0)
    assert torch.equal(product(x, weight, wide=True), by_the_last)


@pytest.mark.parametrize("at_once", [1, 3])
def test_how_many_segments_the_last_loads_at_once_changes_no_bit(device, activation, at_once, monkeypatch):
    x, weight = operands(device, activation, 5, *SUM_OF_SEGMENTS)
    expected = product(x, weight, wide=True)
    tile = linear.tile_of(5, *SUM_OF_SEGMENTS, activation)
    monkeypatch.setattr(linear, "IN_REGISTERS", at_once * tile.weights * tile.tokens // (32 * tile.num_warps))
    assert torch.equal(product(x, weight, wide=True), expected)


@pytest.mark.parametrize(("dtype", "tile"), EVERY_SEGMENTS_TILE)
@pytest.mark.parametrize("most_cut", [0, 40])
def test_a_tile_does_not_change_a_sum_of_segments(device, monkeypatch, dtype, tile, most_cut):
    x, weight = operands(device, dtype, 33, *SUM_OF_SEGMENTS)
    expected = product(x, weight, wide=True)
    monkeypatch.setattr(linear, "tile_of", lambda *_: tile)
    monkeypatch.setattr(linear, "MOST_CUT_ROWS", most_cut)
    assert torch.equal(product(x, weight, wide=True), expected)


@pytest.mark.parametrize(("num_out", "num_in"), [(321, 1024), (66, 960), (66, 1088)])
def test_other_products_are_one_chain(device, activation, num_out, num_in):
    assert num_segments(num_out, num_in, torch.bfloat16) == 1
    x, weight = operands(device, torch.bfloat16, 3, num_out, num_in)
    assert torch.equal(addends(x, weight)[0], product(x, weight, wide=True))


def test_addends_are_one_launch_and_added_up_where_they_are_many(device, activation):
    segments = num_segments(*SUM_OF_SEGMENTS, activation)
    most = linear.MOST_ADDENDS // (segments * SUM_OF_SEGMENTS[0])
    x, weight = operands(device, activation, most + 1, *SUM_OF_SEGMENTS)
    before = num_launches()
    found = addends(x, weight), addends(x[:most], weight)
    assert num_launches() == before + 2
    assert [len(one) for one in found] == [1, segments]
    assert all(one.dtype == torch.float32 for one in found)
    assert torch.equal(in_order(found[1]), found[0][0, :most])


def test_no_library_is_tried_for_a_sum_of_segments(monkeypatch):
    tried = []
    monkeypatch.setattr(triton_set.launch, "IS_INTERPRETED", False)
    monkeypatch.setattr(linear, "certified_row_counts", lambda shape, *_: tried.append(shape) or frozenset({64}))
    library_rows = triton_set.make_library_rows(torch.bfloat16, torch.device("cpu"), 64)
    assert library_rows(torch.zeros(SUM_OF_SEGMENTS, dtype=torch.bfloat16)) == frozenset()
    assert library_rows(torch.zeros(66, 100, dtype=torch.bfloat16)) == {64}
    assert tried == [(66, 100)]


def test_inputs_are_rounded_to_the_activation_dtype_first(device, activation):
    x, weight = operands(device, torch.float32, 5, 64, 96)
    weight = pack_linear(weight, activation)
    rounded = product(x.to(activation), weight)
    assert torch.equal(implementations(activation)["linear"](x, weight, 64, False, False, 1), rounded)


def test_bfloat16_weights_give_the_bits_of_their_float32_copy(device):
    weight, x = normal(1, 100, 63).to(device).bfloat16(), normal(2, 17, 63).to(device)
    half, full = pack_linear(weight, torch.float32), pack_linear(weight.float(), torch.float32)
    assert (half.dtype, full.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(product(x, half), product(x, full))


def test_packed_weights_are_bfloat16_where_activations_are(activation):
    packed = pack_linear(normal(1, 8, 6).mT, activation)
    assert packed.dtype == activation
    assert packed.is_contiguous()


def test_a_row_that_is_not_finite_spoils_no_other(device, activation):
    x, weight = operands(device, activation, 9, 100, 63)
    clean = product(x, weight)
    x[4] = torch.nan
    x[7, 3] = torch.nan
    spoiled = product(x, weight)
    assert spoiled[[4, 7]].isnan().all()
    rest = [0, 1, 2, 3, 5, 6, 8]
    assert torch.equal(spoiled[rest], clean[rest])


def test_what_lies_behind_a_row_and_behind_the_weight_is_not_summed(device, activation):
    x, weight = operands(device, activation, 5, 70, 63)
    fused = torch.full((6, 150), torch.nan, dtype=activation, device=device)
    fused[:5, 40:103] = x
    longer = torch.full((75, 63), torch.nan, dtype=activation, device=device)
    longer[:70] = weight
    assert torch.equal(product(fused[:5, 40:103], longer[:70]), product(x, weight))


def test_no_rows_give_no_rows(device, activation):
    x, weight = operands(device, activation, 3, 64, 96)
    assert product(x[:0], weight).shape == (0, 64)


def test_tiles_are_no_wider_than_few_tokens_and_large_where_they_are_many():
    for num_rows in (1, 8, 16, 17, 32):
        tile = linear.tile_of(num_rows, 2048, 2048, torch.bfloat16)
        assert num_rows <= tile.tokens < 2 * max(16, num_rows)
    for num_rows in (64, 128):
        tile = linear.tile_of(num_rows, 2048, 2048, torch.bfloat16)
        assert 2048 // tile.weights * (num_rows // tile.tokens) >= linear.ENOUGH_PROGRAMS * (num_rows // 128)
    assert linear.tile_of(8192, 2048, 2048, torch.bfloat16) == TILES[torch.bfloat16][0]


def test_no_more_is_loaded_ahead_than_there_is():
    assert linear.stages_for(4, span=4, num_in=256, dtype=torch.bfloat16) == 2
    assert linear.stages_for(6, span=1, num_in=112, dtype=torch.bfloat16) == 3
    assert linear.stages_for(4, span=2, num_in=2048, dtype=torch.bfloat16) == 4


@pytest.mark.parametrize("wide", [False, True])
def test_the_library_computes_the_same_product(device, activation, wide, plain_torch):
    x, weight = operands(device, activation, 17, 100, 96)
    found = product(x, weight, wide=wide, library=True)
    wanted = product(x, weight, wide=wide)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(
        found, wanted, rtol=2 * BF16_ROUNDING if found.dtype != torch.float32 else 1e-5, atol=1e-4
    )


def test_only_row_counts_of_equal_bits_are_certified(device, activation, monkeypatch):
    def library(dtype, x, weight, num_out, wide, threads):
        found = linear.linear(dtype, x, weight, num_out, wide, threads)
        found[-1, -1] += (len(x) == 17) or (len(x) == 5 and wide)
        return found

    monkeypatch.setattr(linear, "linear_library", library)
    assert certified_row_counts((40, 64), activation, [3, 5, 17, 20], device, budget_seconds=600) == {3, 20}


def test_a_row_count_that_was_not_reached_in_time_is_not_certified(device, activation, monkeypatch):
    monkeypatch.setattr(linear, "linear_library", linear.linear)
    assert certified_row_counts((40, 64), activation, [3, 5], device, budget_seconds=-1) == frozenset()


@pytest.fixture
def plain_torch(poisoned_memory):
    """Without the mode that asks torch for deterministic algorithms only: it refuses the library's products on a device."""
    torch.use_deterministic_algorithms(False)


# Every product of nano, of bench-8b and of Inkling-Small's layers (benchmarks/models.py), and two that fit no tile.
NANO = [(10, 256), (256, 256), (256, 640), (576, 256), (1280, 256), (4096, 256)]
BENCH = [(66, 2048), (2048, 2048), (2048, 6144), (3328, 2048), (4352, 2048), (12288, 2048), (32768, 2048)]
SMALL = [(258, 4096), (4096, 4096), (4096, 16384), (6656, 4096), (32768, 4096), (200058, 4096)]
MODEL_SHAPES = [*NANO, *BENCH, *SMALL, (1000, 200), (333, 77)]
ROW_COUNTS = [*range(1, 301), 512, 1000, 2048, 8191, 8192]
# Elements of the largest result: more would take memory that workers share.
MOST_RESULTS = 1 << 29


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("num_out", "num_in"), MODEL_SHAPES)
def test_every_number_of_rows_gives_the_same_bits(device, activation, num_out, num_in):
    counts = [rows for rows in ROW_COUNTS if rows * num_out <= MOST_RESULTS]
    x, weight = operands(device, activation, counts[-1], num_out, num_in)
    everything = product(x, weight, wide=True)
    for rows in counts:
        assert torch.equal(product(x[:rows], weight, wide=True), everything[:rows]), rows
        assert torch.equal(product(x[-rows:], weight), everything[-rows:].to(activation)), rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tile"), EVERY_TILE)
def test_every_tile_gives_the_same_bits_at_model_sizes(device, monkeypatch, dtype, tile):
    x, weight = operands(device, dtype, 300, 6144, 4096)
    expected = product(x, weight, wide=True)
    monkeypatch.setattr(linear, "tile_of", lambda *_: tile)
    assert torch.equal(product(x, weight, wide=True), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("num_out", "num_in"), [(66, 2048), (258, 4096), (320, 1024)])
def test_every_number_of_rows_is_the_sum_of_its_segments(device, activation, num_out, num_in):
    x, weight = operands(device, activation, 8192, num_out, num_in)
    everything = sum_of_segments(x, weight)
    for rows in ROW_COUNTS:
        assert torch.equal(product(x[:rows], weight, wide=True), everything[:rows]), rows
        assert torch.equal(in_order(addends(x[:rows], weight)), everything[:rows]), rows
    assert not counters(device).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tile"), EVERY_SEGMENTS_TILE)
@pytest.mark.parametrize("most_cut", [0, 300])
def test_every_tile_gives_the_same_sums_of_segments_at_model_sizes(device, monkeypatch, dtype, tile, most_cut):
    x, weight = operands(device, dtype, 300, 258, 4096)
    expected = product(x, weight, wide=True)
    monkeypatch.setattr(linear, "tile_of", lambda *_: tile)
    monkeypatch.setattr(linear, "MOST_CUT_ROWS", most_cut)
    assert torch.equal(product(x, weight, wide=True), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_certified_row_count_holds_for_other_inputs(device, activation, plain_torch):
    shape = (2048, 2048)
    for rows in certified_row_counts(shape, activation, [1, 8, 64, 128, 256, 1024, 4096], device, budget_seconds=30):
        for seed in range(5):
            x, weight = operands(device, activation, rows, *shape, seed=seed)
            found = product(x, weight, wide=True, library=True)
            assert torch.equal(found, product(x, weight, wide=True)), rows
