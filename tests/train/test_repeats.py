"""Rows in which lines are repeated: the true text is all there, in order, and copies count for nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.train.feed import Feed
from samebit.train.repeats import line_tokens, repeat_lines
from samebit.train.transcript import COPIED, LEAVING, LOOPING, PLAIN
from samebit.train.writers import OwnWriter

LINE = 7  # the token that opens a line
OPENS = torch.arange(100) == LINE


@st.composite
def rows(draw):
    """Distinct tokens, but for those that open a line."""
    length = draw(st.integers(8, 90))
    marks = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    ids = torch.tensor([LINE if mark else 10 + i for i, mark in enumerate(marks)])
    fractions = st.floats(0, 1, exclude_max=True, width=32)
    return ids, torch.tensor(draw(st.lists(fractions, min_size=3, max_size=3)))


@given(rows())
def test_without_the_copies_a_row_is_the_true_text(row):
    ids, draws = row
    repeated, classes = (found[0] for found in repeat_lines(ids[None], OPENS, draws[None]))
    is_copy = (classes == COPIED) | (classes == LOOPING)
    kept = repeated[~is_copy]
    assert torch.equal(kept, ids[: len(kept)])
    assert len(repeated) == len(ids)
    assert is_copy.sum() <= len(ids) // 2


@given(rows())
def test_copies_repeat_one_to_six_whole_lines_up_to_five_times(row):
    ids, draws = row
    repeated, classes = (found[0] for found in repeat_lines(ids[None], OPENS, draws[None]))
    copied = ((classes == COPIED) | (classes == LOOPING)).nonzero()[:, 0].tolist()
    if not copied:
        assert torch.equal(repeated, ids)
        assert (classes == PLAIN).all()
        return
    begin, end = copied[0], copied[-1] + 1
    assert copied == list(range(begin, end))
    num_lines = 1 + int(draws[0] * 6)
    opening = (ids[:begin] == LINE).nonzero()[-num_lines, 0].item()
    span = begin - opening
    assert ids[begin] == LINE
    assert repeated[begin:end].tolist() == ids[opening:begin].tolist() * ((end - begin) // span)
    assert (end - begin) % span == 0
    assert 1 <= (end - begin) // span <= 5
    assert (classes == LOOPING).nonzero()[:, 0].tolist() == copied[span:]
    leaving = (classes == LEAVING).nonzero()[:, 0].tolist()
    assert leaving == list(range(end, min(end + 12, len(ids))))


def test_lines_are_repeated_in_long_enough_rows():
    ids = torch.tensor([LINE if i % 5 == 0 else 10 + i for i in range(80)])
    draws = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
    _, classes = repeat_lines(ids.expand(200, -1), OPENS, draws)
    num_copied = (classes == COPIED).sum(1)
    assert (num_copied > 0).all()
    assert len(num_copied.unique()) > 5


def test_the_tokens_that_open_a_line_hold_a_line_break(data):
    opens = line_tokens(data.tokenizer)
    assert opens[data.tokenizer.encode("x\n    y").ids].tolist().count(True) == 1
    assert not opens[data.tokenizer.encode("one two").ids].any()


@pytest.mark.parametrize(("every", "low", "high"), [(None, 0, 0), (3650, 5, 60), (256, 300, 400)])
def test_lines_are_repeated_once_in_so_many_tokens_of_code(data, every, low, high):
    source = OwnWriter(data, length=256, seed=0)
    feed = Feed(
        data, source, length=256, rows=400, dialogue_share=0.0, seed=0, device=torch.device("cpu"),
        ring_rows=8, repeat_every=every,
    )  # fmt: skip
    batch = feed.batch()
    is_repeated = (batch.weights == 0).any(1)
    assert low <= is_repeated.sum() <= high
    assert ((batch.weights == 3).any(1) <= is_repeated).all()
    assert torch.equal(batch.token_ids[:, 1:], batch.targets[:, :-1])
