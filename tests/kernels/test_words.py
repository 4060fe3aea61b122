"""What rows guess by, kept guesses, rows that are taken and sums that are joined: the same from every set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.drafting import DraftBlock, DraftSteps
from samebit.inputs import Bucket, InputBuffer
from samebit.kernels.values import DraftWords, SampleColumns
from samebit.state.pools import StatePools
from tests.fakes import make_geometry
from tests.kernels.cases import ints, normal

SLOTS = 6


def random_sampling(generator, rows):
    """Settings of any kind; all differ."""

    def some(dtype):
        return torch.randperm(1000, generator=generator)[:rows].to(dtype)

    real, narrow, wide = torch.float32, torch.int32, torch.int64
    dtypes = (real, narrow, real, real, wide, narrow, wide, narrow)
    return SampleColumns(*(some(dtype) for dtype in dtypes))


def draft_case(seed, rows, drafts, tokens, samples=5, slots=SLOTS):
    """Operands of ``draft_words``; some rows are in the inert slot, and results hold sevens."""
    generator = torch.Generator().manual_seed(seed)

    def some(high, *shape, dtype=torch.int32):
        return torch.randint(0, high, shape, generator=generator, dtype=dtype)

    real, narrow, wide = torch.float32, torch.int32, torch.int64
    columns = (real, narrow, real, real, wide, narrow, wide)
    words = DraftWords(
        *(torch.full((rows,), 7, dtype=narrow) for _ in range(2)),
        *(torch.full((drafts, rows), 7, dtype=dtype) for dtype in columns),
        *(torch.full((rows, tokens), 7, dtype=dtype) for dtype in (narrow, wide)),
    )
    length, next_token = some(5000, slots + 1, dtype=wide) + 1, some(999, slots + 1) + 1
    return (
        some(slots + 1, rows),
        some(samples, rows),
        length,
        next_token,
        random_sampling(generator, samples),
        words,
        1234,
    )


@given(st.integers(0, 999), st.integers(1, 9), st.integers(0, 4), st.integers(0, 5))
def test_rows_guess_by_the_words_of_their_slots(kernels, seed, rows, drafts, tokens):
    operands = draft_case(seed, rows, drafts, tokens)
    kernels.draft_words(*operands)
    slots, samples, length, next_token, sampling, words, filler = operands
    for p, (slot, sample) in enumerate(zip(slots.tolist(), samples.tolist(), strict=True)):
        start, last = (int(length[slot]), int(next_token[slot])) if slot else (0, 0)
        assert (int(words.lengths[p]), int(words.last_tokens[p])) == (start, last)
        assert words.token_ids[p].tolist() == [last, *[filler] * (tokens - 1)][:tokens]
        assert words.positions[p].tolist() == [start + n for n in range(tokens)]
        assert words.position[:, p].tolist() == [start + 1 + k for k in range(drafts)]
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index"):
            assert getattr(words, name)[:, p].tolist() == [getattr(sampling, name)[sample].item()] * drafts, name


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_apart", [False, True])
def test_guesses_go_to_their_slots_and_nowhere_else(kernels, count, is_apart):
    drafts = torch.full((SLOTS + 1, 3), 7, dtype=torch.int32)
    tokens = torch.arange(4 * count, dtype=torch.int32).view(count, 4).T
    if not is_apart:
        tokens = tokens.contiguous()
    kept = kernels.keep_drafts(tokens, ints(5, 2, 0, 6), drafts)
    assert kept.is_contiguous()
    assert torch.equal(kept, tokens)
    assert torch.equal(drafts[[5, 2, 6], :count], tokens[[0, 1, 3]])
    drafts[[5, 2, 6], :count] = 7
    assert (drafts[1:] == 7).all()


def test_rows_are_taken_and_divided(kernels):
    x, rows = normal(1, 9, 40), torch.tensor([3, 0, 8, 3])
    assert torch.equal(kernels.take_rows(x, rows, 1.7), x[rows] / 1.7)


def test_sums_stand_side_by_side(kernels):
    x, y = ([normal(seed + n, 5, 40) for n in range(3)] for seed in (1, 4))
    assert torch.equal(kernels.joined_sums(x, y), torch.cat([x[n] + y[n] for n in range(3)], dim=1))


def test_columns_of_guesses_and_rows_of_blocks_are_in_the_same_order(kernels):
    """Each guess is drawn from its own row's block, with its own row's settings, at its own position."""
    pools = StatePools(make_geometry(max_drafts=3), torch.device("cpu"))
    inputs = InputBuffer(Bucket(2, 2, 2, 0, 0, 0, 0, drafts=2), torch.device("cpu")).view
    inputs.draft_slots.copy_(ints(3, 1))
    inputs.draft_samples.copy_(ints(1, 0))
    pools.tables.length[[3, 1]] = torch.tensor([10, 20])
    steps = DraftSteps(inputs, pools, torch.device("cpu"), DraftBlock(num_tokens=4, first_guess=1, filler=9))
    sampling = random_sampling(torch.Generator().manual_seed(0), 2)
    steps.begin(kernels, sampling)
    columns = steps.columns(1, 3)
    assert columns.position.tolist() == [11, 21, 12, 22, 13, 23]
    assert torch.equal(steps.block_positions[steps.guess_rows], columns.position)
    assert torch.equal(columns.seed, sampling.seed[[1, 0]].repeat(3))
    assert columns.target.tolist() == [-1] * 6
    assert steps.columns(2).position.tolist() == [12, 22]
