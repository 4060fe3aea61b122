"""Paged attention on a device: the twin's values, and bits that depend on absolute positions alone."""

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebit.kernels.triton.attention import TILINGS, Rows, attend, attention
from samebit.kernels.triton.last import counters
from samebit.kernels.triton.launch import launch, num_launches
from samebit.kernels.triton.merging import merge_tile
from tests.kernels.cases import ints
from tests.kernels.triton.paged import TINY, TOLERANCE, Case, Shape, error

PAIR = Shape(2, 1, 16, 2)
SHAPES = [
    Shape(4, 2, 64, 2),
    Shape(2, 2, 48, 2, page=32),
    Shape(6, 2, 20, 3, extent=100, page=4),
    Shape(4, 1, 16, 1, extent=1, page=7),
]
MIXED = [(0, 21), (60, 1), (0, 0), (40, 3), (33, 8)]
BRIEF = settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize(("shape", "window"), [*itertools.product(SHAPES[2:], [0, 40]), (SHAPES[1], 1)])
def test_attention_agrees_with_its_twin(device, activation, shape, window):
    case = Case(shape, MIXED, device, activation)
    assert error(case.attend(window, tiling=TINY), case.twin(window)) < TOLERANCE[activation]


@pytest.mark.parametrize(("shape", "window"), [(SHAPES[0], 0), (SHAPES[2], 19)])
def test_attention_in_tiles_as_they_are_used_agrees_with_its_twin(device, activation, shape, window):
    case = Case(shape, [(0, 18), (520, 1), (70, 2)], device, activation)
    assert error(case.attend(window), case.twin(window)) < TOLERANCE[activation]


def test_padding_gives_zeros_and_the_result_has_the_dtype_of_the_pages(device, activation):
    case, window = Case(SHAPES[2], MIXED, device, activation, padding=5), 40
    found = case.attend(window)
    assert found.dtype == activation
    assert (found[case.tokens :] == 0).all()
    assert torch.equal(found[: case.tokens], case.attend(window, part=slice(case.tokens)))


@pytest.mark.parametrize("window", [0, 40])
def test_a_batch_row_does_not_know_its_company(device, activation, window):
    case = Case(PAIR, MIXED, device, activation, padding=2)
    together, at = case.attend(window, tiling=TINY), 0
    for slot, (first, count) in enumerate(case.rows):
        part = slice(at, at + count)
        at += count
        if count:
            alone = case.attend(window, tiling=TINY, rows=[(slot, first, count)], part=part)
            assert torch.equal(together[part], alone)


@BRIEF
@given(window=st.sampled_from([0, 20, 40]), cuts=st.lists(st.integers(0, 50), max_size=3))
def test_the_cut_of_a_sequence_does_not_change_bits(device, activation, window, cuts):
    case = Case(PAIR, [(0, 50)], device, activation)
    whole = case.attend(window, tiling=TINY)
    for begin, end in itertools.pairwise(sorted({0, 50, *cuts})):
        part = slice(begin, end)
        assert torch.equal(case.attend(window, tiling=TINY, rows=[(0, begin, end - begin)], part=part), whole[part])


def test_tokens_of_a_decode_or_a_verification_have_the_bits_of_prefill(device, activation):
    case = Case(PAIR, [(0, 70)], device, activation)
    whole = case.attend(0, tiling=TINY)
    for count in (1, 2, 6, 7, 17):
        part = slice(70 - count, 70)
        assert torch.equal(case.attend(0, tiling=TINY, rows=[(0, part.start, count)], part=part), whole[part]), count


@pytest.mark.parametrize(("shape", "window"), [(PAIR, 0), (Shape(3, 1, 16, 1), 45)])
def test_neither_splitting_nor_tiles_change_bits(device, activation, shape, window):
    case = Case(shape, [(67, 1), (0, 10), (40, 4), (31, 1)], device, activation)
    wanted = case.attend(window, tiling=TINY)
    for change in (
        {"max_partials": 0},
        {"max_partials": 4},  # room for some of the rows
        {"short_rows": 1000},
        {"split_above": 1},
        {"short_rows": 0},
        {"short_rows": 0, "long_block_m": 64, "long_warps": 4},
    ):
        assert torch.equal(case.attend(window, tiling=replace(TINY, **change)), wanted), change


def test_many_rows_of_few_tokens_are_one_launch(device, activation):
    """However many tokens the step has; where a row might have more, another looks for such rows, and finds none."""
    case = Case(PAIR, [(start, 1 + start % 2) for start in range(0, 60, 5)], device, activation, padding=3)
    for tiling, wanted in ((TINY, 1), (replace(TINY, short_rows=2), 2)):
        before = num_launches()
        found = case.attend(0, tiling=tiling)
        assert num_launches() - before == wanted, tiling
        assert torch.equal(found, case.attend(0, tiling=replace(TINY, short_rows=0)))


@pytest.mark.parametrize("shape", [PAIR, Shape(3, 1, 16, 1)])
def test_chunks_are_merged_in_the_launch_that_they_are_of(device, activation, shape):
    """More of them than are loaded at once, of tiles of few and of many query rows; then the next launch finds all in order."""
    case = Case(shape, [(330, 1), (0, 0), (170, 4), (300, 2), (20, 1)], device, activation)
    tiling = replace(TINY, short_rows=12 * case.tokens)
    before = num_launches()
    found = [case.attend(0, tiling=tiling) for _ in range(2)]
    assert num_launches() - before == len(found)
    assert (counters(case.q.device) == 0).all()
    wanted = case.attend(0, tiling=replace(tiling, max_partials=0))
    assert all(torch.equal(x, wanted) for x in found)


@triton.jit
def merge_kernel(out, sums, scales, first, chunks, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    merge_tile(out, sums, scales, first, chunks, first, ROWS, first, first, 1, 1, 16, 16, 16, ROWS, AT_ONCE)


@pytest.mark.parametrize(("rows", "at_once"), [(4, 8), (8, 8), (16, 4), (4, 2), (16, 2)])
def test_a_result_that_comes_down_to_zero_has_no_sign_however_many_chunks_are_added(device, rows, at_once):
    """What the first chunk came to is too small beside the second one's scores: -0 is left of it, 0 if another one follows."""
    sums, scales = torch.full((2, 16, 16), -1e-30), torch.zeros(2, 16, 2)
    sums[1], scales[:, :, 1], scales[1, :, 0] = -0.0, 1.0, 140.0
    out = torch.full((rows, 16), torch.nan, device=device)
    launch(merge_kernel, (1,), out, sums.to(device), scales.to(device), 0, 2, ROWS=rows, AT_ONCE=at_once)
    assert (out == 0).all()
    assert not out.signbit().any()


@pytest.mark.parametrize(("window", "other"), [(0, "window_chunk"), (40, "chunk")])
def test_keys_are_summed_in_the_chunks_of_their_kind_of_layer(device, activation, window, other):
    case = Case(PAIR, [(67, 1), (0, 10), (31, 1)], device, activation)
    wanted = case.attend(window, tiling=TINY)
    assert torch.equal(case.attend(window, tiling=replace(TINY, **{other: 64})), wanted)


@pytest.mark.parametrize("first", range(30, 40))
def test_a_bias_is_found_wherever_a_row_begins(device, activation, first):
    """Of the scores nothing but the bias is left; the last key without one is at the extent."""
    case = Case(Shape(2, 1, 16, 2, extent=24), [(first, 1), (first - 30, 9)], device, activation)
    case.q.zero_()
    assert error(case.attend(0, tiling=TINY), case.twin(0)) < TOLERANCE[activation]


@pytest.mark.parametrize("shape", [PAIR, SHAPES[2]])
@pytest.mark.parametrize("window", [0, 20])
def test_keys_below_the_window_and_behind_the_sequence_are_not_read(device, activation, shape, window):
    """Addresses outside of the pages stand there; what shares a page with a key is NaN."""
    case = Case(shape, [(0, 96)], device, activation)
    rows, part = [(0, 78, 2)], slice(78, 80)
    clean = case.attend(window, rows=rows, part=part)
    low = 78 - window + 1 if window else 0
    for position in (*range(low), *range(80, 96)):
        page, offset = int(case.table[0, position // shape.page]), position % shape.page
        case.k_pages[page, :, offset], case.v_pages[page, :, offset] = torch.nan, torch.nan
    case.table[0, : low // shape.page] = -(10**6)
    case.table[0, -(-80 // shape.page) :] = -(10**6)
    assert torch.equal(case.attend(window, rows=rows, part=part), clean)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_a_sequence_that_is_not_finite_leaves_others_alone(device, activation):
    case = Case(PAIR, [(40, 3), (50, 3)], device, activation)
    clean = case.attend(0)
    for page in case.table[0].unique().tolist():
        case.k_pages[page] = torch.nan
    spoiled = case.attend(0)
    assert spoiled[:3].isnan().all()
    assert torch.equal(spoiled[3:], clean[3:])


def test_operands_may_be_columns_of_a_wider_tensor_and_of_a_wider_type(device, activation):
    case = Case(PAIR, MIXED, device, activation)
    nothing = torch.full((case.tokens, 8), torch.nan, device=device)
    wide = torch.cat([case.rel.float(), nothing, case.q.float()], 1)
    ix = case.cache.index([(slot, *row) for slot, row in enumerate(case.rows)])
    found = attention(
        wide[:, -case.q.shape[1] :], wide[:, : case.rel.shape[1]], case.rel_proj.float(), case.tau, case.k_pages, case.v_pages,
        ix.query_start.to(device), ix.row_start.to(device), ix.row_slots.to(device), case.table, ix.longest, 0, 0.2, 1,
    )  # fmt: skip
    assert torch.equal(found, case.attend(0))


def test_a_bias_ends_at_its_extent(device, activation):
    """Keys further away than the extent have none: a profile with more zeros behind it gives the same bits."""
    case = Case(PAIR, [(0, 20), (90, 2)], device, activation)
    found = case.attend(0, tiling=TINY)
    case.rel_proj = torch.cat([case.rel_proj, torch.zeros(2, 80, dtype=activation, device=device)], 1).contiguous()
    assert torch.equal(case.attend(0, tiling=TINY), found)


def test_an_empty_batch_has_no_result(device, activation):
    case = Case(PAIR, [(0, 4)], device, activation)
    q = case.q[:0]
    rows = Rows(*(ints(*x).to(device) for x in ((0, 0), (0,), (0,))), case.table, 1, 0, True, q, q)
    found = attend(q, case.rel[:0], case.rel_proj, case.tau[:0], case.k_pages, case.v_pages, rows, 0, 0.2, TINY)
    assert found.shape == (0, case.q.shape[1])


LARGE = [
    Shape(4, 4, 128, 16, extent=512),
    Shape(16, 4, 128, 16, extent=1024),
    Shape(4, 2, 64, 16, extent=512),
    Shape(8, 4, 48, 16, extent=64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: f"{shape.heads}x{shape.width}")
@pytest.mark.parametrize("window", [0, 128, 512, 700])
def test_large_batches_agree_with_the_twin(device, activation, shape, window):
    case = Case(shape, [(0, 300), (1500, 1), (1023, 8), (2000, 17), (5, 0), (511, 2), (900, 130)], device, activation)
    assert error(case.attend(window), case.twin(window)) < TOLERANCE[activation]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=lambda shape: f"{shape.heads}x{shape.width}")
@pytest.mark.parametrize("window", [0, 512])
def test_any_number_of_tokens_has_the_bits_of_prefill(device, activation, shape, window):
    case = Case(shape, [(0, 2100)], device, activation)
    whole = case.attend(window)
    for end in (1, 65, 513, 1025, 2100):
        for count in range(1, min(end, 112) + 1):
            part = slice(end - count, end)
            found = case.attend(window, rows=[(0, part.start, count)], part=part)
            assert torch.equal(found, whole[part]), (end, count)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 512])
def test_random_cuts_in_random_company_have_the_bits_of_prefill(device, activation, window):
    rows = [(0, n) for n in (1700, 900, 64, 2048, 513, 1200)]
    case = Case(LARGE[1], rows, device, activation)
    whole = case.attend(window)
    offsets = [0, *itertools.accumulate(n for _, n in rows)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        batch, tokens = [], []
        for slot in torch.randperm(len(rows), generator=generator).tolist():
            most = (1, 8, 40, 300)[int(torch.randint(4, (), generator=generator))]
            count = min(int(torch.randint(most, (), generator=generator)) + 1, rows[slot][1])
            first = int(torch.randint(rows[slot][1] - count + 1, (), generator=generator))
            batch.append((slot, first, count))
            tokens += range(offsets[slot] + first, offsets[slot] + first + count)
        part = torch.tensor(tokens, device=device)
        assert torch.equal(case.attend(window, rows=batch, part=part), whole[part])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 128, 256])
def test_rows_that_scratch_memory_has_no_room_for_have_the_same_bits(device, activation, num_rows):
    case = Case(LARGE[2], [(1030 + 5 * i, 1 + i % 5) for i in range(num_rows)], device, activation)
    wanted = case.attend(0)
    for most in (0, 7, 100):
        assert torch.equal(case.attend(0, tiling=replace(TILINGS[activation], max_partials=most)), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 512])
def test_captured_launches_give_the_same_bits_however_often_they_run(device, activation, window):
    cases = [
        Case(LARGE[1], [(n, 1 + i % 5) for i in range(rows)], device, activation) for rows, n in ((1, 2070), (9, 900))
    ]
    wanted = [case.attend(window, tiling=replace(TILINGS[activation], max_partials=0)) for case in cases]
    launches = [case.prepared(window) for case in cases]
    for attended in launches:
        attended()
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            for attended, x in zip(launches, wanted, strict=True):
                wrong += (attended() != x).sum()
    for _ in range(200):
        graph.replay()
    assert int(wrong) == 0
