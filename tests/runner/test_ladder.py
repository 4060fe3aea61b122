"""The buckets that graphs are captured for hold every ordinary step, and are few."""

from __future__ import annotations

from operator import ge

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.request import MAX_LOGPROBS
from samebit.inputs import Bucket
from samebit.runner.ladder import Ladder, ladder
from samebit.state.layout import KvLayer, PageGroup, StateGeometry, StateLayout

VOCAB = 70
LAYOUT = StateLayout((PageGroup(None, (KvLayer(1, 8),)), PageGroup(6, (KvLayer(1, 8),))), (), 4)


def geometry(slots: int, max_drafts: int = 0) -> StateGeometry:
    return StateGeometry(
        layout=LAYOUT,
        page_size=4,
        num_slots=slots,
        num_snapshots=8,
        num_pages=(400, 400),
        max_length=512,
        max_drafts=max_drafts,
    )


@given(st.integers(1, 130), st.integers(1, 9000), st.sampled_from([0, 1, 7]), st.booleans())
def test_every_step_without_extras_fits_a_bucket_of_less_than_twice_its_tokens(slots, tokens, drafts, is_drafting):
    shape = geometry(slots, drafts)
    buckets = ladder(shape, 9000, is_drafting=is_drafting, vocab_size=VOCAB)
    rows = min(slots, tokens)
    wanted = Bucket(tokens, rows, min(tokens, rows), 0, rows, rows, 0, rows if is_drafting else 0)
    found = Ladder(buckets).first_that_holds(wanted)
    assert found is not None
    assert found.tokens < max(2 * tokens, 17)


def test_decoding_and_verifying_rows_have_buckets_of_their_own():
    sizes = {(b.rows, b.tokens, b.longest) for b in ladder(geometry(6, 7), 100, is_drafting=True, vocab_size=VOCAB)}
    assert {(1, 1, 1), (1, 8, 8), (2, 2, 1), (2, 16, 8), (4, 4, 1), (4, 32, 8), (6, 6, 1), (6, 48, 8)} <= sizes


def test_a_row_of_many_tokens_has_no_bucket_of_decoding_rows():
    found = Ladder(ladder(geometry(64), 64, is_drafting=False, vocab_size=VOCAB))
    short = Bucket(64, 64, 64, 0, 0, 0, 0, 0)
    assert found.first_that_holds(short).longest == 1
    assert found.first_that_holds(short._replace(longest=2)).longest == 64


def test_a_step_that_wants_more_than_any_bucket_has_fits_none():
    buckets = ladder(geometry(4), 64, is_drafting=False, vocab_size=VOCAB)
    plain = Bucket(4, 4, 4, 0, 0, 0, 0, 0)
    assert Ladder(buckets).first_that_holds(plain) is not None
    unheard = [{"top": MAX_LOGPROBS + 1}, {"edits": 1 << 17}, {"masks": 65}, {"mask_words": 4}]
    for extra in (*unheard, {"tokens": 65}, {"rows": 5}, {"samples": 65}, {"drafts": 1}):
        assert Ladder(buckets).first_that_holds(plain._replace(**extra)) is None, extra


@given(st.integers(1, 130), st.integers(1, 9000), st.sampled_from([0, 7]), st.integers(0, 500), st.booleans())
def test_steps_with_edits_masks_and_logprobs_fit_a_bucket_of_less_than_four_times_their_tokens(
    slots, tokens, drafts, edits, has_masks
):
    rows = min(slots, tokens)
    masks = min(rows, 64) if has_masks else 0
    words = -(-VOCAB // 32) if has_masks else 0
    wanted = Bucket(tokens, rows, rows, edits * rows, rows, rows, MAX_LOGPROBS, 0, masks, words)
    found = Ladder(ladder(geometry(slots, drafts), 9000, is_drafting=False, vocab_size=VOCAB)).first_that_holds(wanted)
    assert found is not None
    assert found.tokens < max(4 * tokens, 17)


def test_a_step_that_wants_nothing_further_is_not_put_where_there_is_room_for_it():
    buckets = ladder(geometry(128), 8192, is_drafting=False, vocab_size=VOCAB)
    found = Ladder(buckets)
    for tokens in range(1, 8193, 7):
        rows = min(tokens, 128)
        holding = found.first_that_holds(Bucket(tokens, rows, rows, 0, rows, rows, 0, 0))
        assert holding is not None
        assert holding.edits == holding.top == holding.masks == 0


some_bucket = st.builds(Bucket, **{name: st.integers(0, 3) for name in Bucket._fields})


@given(st.lists(some_bucket, max_size=40), st.lists(some_bucket, min_size=1, max_size=20))
def test_what_is_found_is_the_first_bucket_none_of_whose_sizes_is_too_small(buckets, wanted):
    found = Ladder(buckets)
    for bucket in wanted:
        holding = [b for b in buckets if all(map(ge, b, bucket))]
        assert found.first_that_holds(bucket) == (holding[0] if holding else None)


@pytest.mark.parametrize("max_tokens", [1, 15, 16, 512, 8192])
def test_there_are_few_buckets_in_order_of_size(max_tokens):
    buckets = ladder(geometry(128), max_tokens, is_drafting=False, vocab_size=VOCAB)
    assert len(buckets) == len(set(buckets)) <= 40
    assert buckets == sorted(buckets)
