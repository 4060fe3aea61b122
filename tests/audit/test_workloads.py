"""Seeded workloads: the same everywhere, as long as asked for, at the edges they are meant for."""

from hypothesis import given
from hypothesis import strategies as st

from samebit.workloads import document, edge_lengths, question, spread


@given(st.integers(0, 1 << 40), st.integers(0, 3000))
def test_a_document_is_as_long_as_asked_and_begins_every_longer_one(seed, num_chars):
    text = document(seed, num_chars)
    assert len(text) == num_chars
    assert document(seed, num_chars + 500).startswith(text)


def test_texts_are_the_same_on_every_machine():
    assert document(7, 38) == "def write_parser(parser, cache=None):\n"
    assert question(1) != question(2)
    assert len({document(seed, 200) for seed in range(50)}) == 50


@given(st.lists(st.integers(1, 300), max_size=3), st.integers(1, 1000))
def test_edge_lengths_fit_and_lie_on_both_sides_of_each_period(periods, limit):
    lengths = edge_lengths(periods, limit)
    assert lengths == sorted(set(lengths))
    assert 1 <= lengths[0] <= lengths[-1] <= limit
    for period in periods:
        assert {n for n in (period - 1, period, period + 1) if 1 <= n <= limit} <= set(lengths)


@given(st.lists(st.integers(), min_size=1, max_size=40), st.integers(1, 50))
def test_a_spread_is_in_order_and_ends_where_the_list_does(items, count):
    chosen = spread(items, count)
    assert len(chosen) == min(count, len(items))
    assert chosen[-1] == items[-1]
    left = iter(items)
    assert all(any(item == other for other in left) for item in chosen)
