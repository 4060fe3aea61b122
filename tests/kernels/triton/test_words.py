"""Words of rows that guess, kept guesses, taken rows and joined sums on a device: the twin's bits, in one launch each."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.kernels import torch_words
from samebit.kernels.triton import words
from samebit.kernels.triton.launch import num_launches
from samebit.kernels.values import DraftWords
from samebit.runner.step import StepTensors
from tests.kernels.cases import normal
from tests.kernels.test_words import draft_case

WIDTHS = [1, 63, 100, 257, 1100]
DTYPES = [torch.float32, torch.bfloat16]


def launches(function, *operands):
    """What a kernel gives, which is to take one launch."""
    before = num_launches()
    found = function(*operands)
    assert num_launches() == before + 1
    return found


@given(st.integers(0, 2**32), st.integers(1, 70), st.integers(0, 5), st.integers(0, 9))
def test_what_rows_guess_by_is_what_the_twin_finds(device, seed, rows, drafts, tokens):
    *given, sampling, expected, filler = draft_case(seed, rows, drafts, tokens, samples=9, slots=80)
    columns = [getattr(sampling, name) for name in sampling.__slots__[:6]]
    found = [x.to(device, copy=True) for x in expected]
    launches(words.draft_words, *(x.to(device) for x in (*given, *columns)), found, filler)
    torch_words.draft_words(*given, *columns, list(expected), filler)
    for name, one, other in zip(DraftWords._fields, found, expected, strict=True):
        assert torch.equal(one.cpu(), other), name


@given(st.integers(0, 999), st.integers(1, 70), st.integers(1, 5), st.integers(0, 2), st.booleans())
def test_guesses_are_kept_as_the_twin_keeps_them(device, seed, rows, count, more, is_apart):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(999, (count, rows) if is_apart else (rows, count), generator=generator, dtype=torch.int32)
    tokens = tokens.T if is_apart else tokens
    slots = torch.randperm(80, generator=generator)[:rows].int()
    slots[::3] = 0
    expected = torch.full((80, count + more), 7, dtype=torch.int32)
    drafts = expected.to(device, copy=True)
    kept = launches(words.keep_drafts, tokens.to(device), slots.to(device), drafts)
    assert kept.is_contiguous()
    assert torch.equal(kept.cpu(), torch_words.keep_drafts(tokens, slots, expected))
    assert torch.equal(drafts[1:].cpu(), expected[1:])
    assert (drafts[0] == 7).all(), "the inert slot takes nothing"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("divisor", [1.0, 1.7, 8.0])
def test_taken_rows_are_divided_as_the_twin_divides_them(device, activation, width, divisor):
    x, rows = normal(1, 9, width + 3).to(activation)[:, 2 : 2 + width], torch.tensor([8, 0, 3, 3, 5])
    # Compared on the CPU: a device's library multiplies by the inverse instead.
    found = launches(words.take_rows, x.to(device), rows.to(device), divisor)
    assert found.dtype is activation
    assert torch.equal(found.cpu(), torch_words.take_rows(x, rows, divisor))
    assert torch.equal(words.take_rows(x.to(device), rows[2:4].to(device), divisor), found[2:4])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_joined_sums_are_what_a_product_would_take_of_the_twins(device, activation, width, count):
    x = [normal(n, 7, width).to(device) for n in range(count)]
    y = [normal(9 + n, 7, width).to(device, activation) for n in range(count)]
    joined = words.implementations(activation)["joined_sums"]
    found = launches(joined, x, y)
    assert found.dtype is activation
    assert torch.equal(found, torch_words.joined_sums(x, y).to(activation))
    assert torch.equal(found[3:4], joined([one[3:4] for one in x], [one[3:4] for one in y]))


@given(st.lists(st.integers(0, 1500), min_size=1, max_size=words.MAX_PARTS), st.integers(0, 99))
def test_bytes_are_joined_in_order(device, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
    found = words.joined_bytes([part.to(device) for part in parts])
    assert torch.equal(found.cpu(), torch.cat(parts))


def test_as_many_results_are_joined_as_a_step_has():
    assert len(fields(StepTensors)) <= words.MAX_PARTS


@pytest.mark.gpu
@pytest.mark.parametrize("divisor", [1.5, 8.0, 16.0])
def test_every_bf16_value_is_divided_as_the_library_does(device, divisor):
    """A device's library multiplies by the inverse; rounded to bf16 that is the same, so a fused division changes no bit."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256).to(device)
    x = torch.where(x.isfinite(), x, 0)
    assert torch.equal(words.take_rows(x, torch.arange(256, device=device), divisor), x / divisor)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_taken_and_joined_as_the_twin_does(device, dtype):
    x = [normal(n, 8192, 4096).to(device) for n in range(2)]
    y = [normal(9 + n, 8192, 4096).to(device, dtype) for n in range(2)]
    assert torch.equal(words.joined_sums(dtype, x, y), torch_words.joined_sums(x, y).to(dtype))
    rows = torch.randint(8192, (512,), device=device)
    assert torch.equal(words.take_rows(y[0], rows, 4.0), torch_words.take_rows(y[0], rows, 4.0))
