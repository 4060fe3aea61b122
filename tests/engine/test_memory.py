"""The table of an engine's memory adds up, and tells how many requests fit."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from samebit.engine.memory import in_units, memory_of, memory_table, num_that_fit
from samebit.state.layout import ConvStream, KvLayer, PageGroup, StateGeometry, StateLayout

LAYOUT = StateLayout(
    (PageGroup(None, (KvLayer(2, 8),)), PageGroup(20, (KvLayer(1, 8), KvLayer(1, 8)))), (ConvStream("a", 12),), 4
)
GEOMETRY = StateGeometry(layout=LAYOUT, page_size=4, num_slots=9, num_snapshots=5, num_pages=(100, 60), max_length=2000)


def test_parts_are_the_whole_but_for_sinks_and_tables():
    found = memory_of(GEOMETRY)
    parts = found["row_bytes"] + found["page_bytes_full"] + found["page_bytes_20"]
    assert (found["page_bytes_full"], found["page_bytes_20"]) == (100 * 4 * 32 * 4, 60 * 4 * 32 * 4)
    tags = 8 * (GEOMETRY.num_rows + 101 + 2 * 61 + 10 * (GEOMETRY.ring_length + 4 * 500))
    assert found["state_bytes"] == parts + 2 * 4 * 32 * 4 + tags


def test_as_many_requests_fit_as_the_scarcest_pool_allows():
    assert num_that_fit(GEOMETRY, 4) == 9  # slots
    assert num_that_fit(GEOMETRY, 60) == 6  # 100 pages of which each takes 15
    fewer = msgspec.structs.replace(GEOMETRY, num_pages=(100, 13))
    assert num_that_fit(fewer, 60) == 2  # six pages of the window each
    assert memory_of(GEOMETRY)["fit_1024"] == 0
    assert "fit_2000" in memory_of(GEOMETRY)


@given(st.integers(1, 400), st.integers(1, 400))
def test_no_more_long_requests_fit_than_short_ones(a, b):
    assert num_that_fit(GEOMETRY, max(a, b)) <= num_that_fit(GEOMETRY, min(a, b))


def test_the_table_has_a_line_for_each_figure():
    found = memory_of(GEOMETRY)
    table = memory_table(found)
    assert len(table.splitlines()) == len(found) + 1
    assert "  page bytes full: 50.00 KiB" in table
    assert "  requests of 2000 tokens at once: 0" in table
    assert [in_units(n) for n in (5, 2048, 3 << 20, 5 << 29)] == ["5 B", "2.00 KiB", "3.00 MiB", "2.50 GiB"]
