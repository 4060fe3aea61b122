"""Pool sizes: what is asked for, what fits, and what the pools really take."""

import pytest
import torch

from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError
from samebit.engine.sizing import size_pools
from samebit.state.layout import ConvStream, KvLayer, PageGroup, StateLayout
from samebit.state.pools import StatePools

LAYOUT = StateLayout(
    groups=(PageGroup(6, (KvLayer(2, 16), KvLayer(2, 16))), PageGroup(None, (KvLayer(1, 8),))),
    streams=(ConvStream("a", 32), ConvStream("b", 16)),
    kernel_size=4,
)


def test_the_stated_bytes_are_those_of_the_tensors():
    geometry, _ = size_pools(EngineConfig(num_pages=40, num_window_pages=30, num_checkpoints=7), LAYOUT, 512)
    pools = StatePools(geometry, torch.device("cpu"))
    tables = pools.tables
    tensors = [t for group in pools.kv for pool in group for t in (pool.k, pool.v)]
    tensors += [pool.rows for pool in pools.conv]
    tensors += [pools.row_tags, *pools.page_tags, tables.ring_tags, *tables.page_stamps]
    # Page tables and the two words of a slot hold 4- and 8-byte integers; the estimate counts 8 for each.
    small = sum(8 * t.numel() for t in tables.page_table)
    assert sum(t.nbytes for t in tensors) + small == geometry.num_bytes


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 10**11},
        {"page_size": 10**9, "checkpoint_interval": 10**9},
        {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9},
        {"num_pages": 10**12},
        {"num_checkpoints": 10**12},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_pools_that_cannot_fit_are_refused_before_anything_is_allocated(settings):
    with pytest.raises(ConfigError, match="GB are available"):
        size_pools(EngineConfig(**settings), LAYOUT, 4096)


def test_what_capped_checkpoints_leave_of_the_budget_is_for_pages():
    config = EngineConfig(max_num_seqs=200, max_num_batched_tokens=200)
    budget = 1 << 28
    geometry, _ = size_pools(config, LAYOUT, 1 << 20, 0, budget, 1 << 40)
    assert geometry.num_snapshots == 1024
    page = config.page_size * LAYOUT.groups[1].width * LAYOUT.element_bytes
    assert budget * 0.9 < geometry.num_pages[1] * page < budget


def test_a_short_pool_limits_requests_unless_a_length_was_asked_for():
    small = {"num_pages": 10, "num_window_pages": 20, "num_checkpoints": 2}
    assert size_pools(EngineConfig(**small), LAYOUT, 4096)[1] == 160
    with pytest.raises(ConfigError, match="max_model_len=200: 10 pages hold only 160 tokens"):
        size_pools(EngineConfig(**small, max_model_len=200), LAYOUT, 4096)
