"""The table of a tile's biases has room for every distance that the tile can see."""

import pytest

from samebit.kernels.triton.bias import most_rows, table_shape


@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 12, 16, 40])
def test_every_entry_that_a_tile_asks_for_is_in_its_table(group, block_m):
    shape = table_shape(16, group, block_m, 64)
    tiles = [range(tile * block_m, (tile + 1) * block_m) for tile in range(group)]
    most_tokens = max(rows[-1] // group - rows[0] // group + 1 for rows in tiles)
    worst_start = shape["ALIGN"] - 1
    assert worst_start + most_tokens - 1 + 64 - 1 < shape["SPAN"]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 12, 16, 40])
def test_the_highest_tile_doubles_the_distances_of_a_block_and_no_more(group):
    rows = most_rows(group, 64)
    assert table_shape(16, group, rows, 64)["SPAN"] == 128
    assert table_shape(16, group, 2 * rows, 64)["SPAN"] > 128 or 2 * rows > 64 * group
