"""How large the pools are: from explicit counts, or from a memory budget. Plain arithmetic."""

from __future__ import annotations

import logging

import psutil

from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError
from samebit.state.layout import PageGroup, StateGeometry, StateLayout

_log = logging.getLogger(__name__)

_MAX_CHECKPOINTS = 1024
DEFAULT_CACHE_BYTES = 1 << 30
"""Memory for pools where nothing else is said."""


def size_pools(
    config: EngineConfig,
    layout: StateLayout,
    model_max_length: int,
    max_drafts: int = 0,
    cache_bytes: int | None = None,
    available: int | None = None,
) -> tuple[StateGeometry, int]:
    """The geometry of all pools, and the most tokens that one request can have; a step verifies at most `max_drafts` guesses.

    `cache_bytes` sizes what the settings do not (None: the setting of that name, or a gibibyte); `available`: bytes that all pools must fit (None: what this machine has free).
    Raises ConfigError naming the setting that does not fit.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_length:
        raise ConfigError(f"max_model_len={config.max_model_len}: the model's limit is {model_max_length}")
    length = config.max_model_len or model_max_length
    cache_bytes = cache_bytes or config.cache_bytes or DEFAULT_CACHE_BYTES
    num_checkpoints = config.num_checkpoints or _affordable_checkpoints(config, layout, cache_bytes)
    num_pages = tuple(
        _num_pages(config, layout, group, length, num_checkpoints, cache_bytes) for group in layout.groups
    )
    for group, count in zip(layout.groups, num_pages, strict=True):
        capacity = count * config.page_size
        if group.window is None and capacity < length:
            if config.max_model_len is not None:
                raise ConfigError(f"max_model_len={length}: {count} pages hold only {capacity} tokens")
            _log.warning("requests are limited to %d tokens: %d pages of %d", capacity, count, config.page_size)
            length = capacity
        if group.window is not None and count < (least := _window_pages(group, config.page_size) + 1):
            raise ConfigError(f"num_window_pages={count}: one request needs {least} with a window of {group.window}")
    geometry = StateGeometry(
        layout=layout,
        page_size=config.page_size,
        num_slots=config.max_num_seqs,
        num_snapshots=num_checkpoints,
        num_pages=num_pages,
        max_length=length,
        max_drafts=max_drafts,
    )
    _check_memory(geometry, psutil.virtual_memory().available if available is None else available)
    return geometry, length


def _check_memory(geometry: StateGeometry, available: int) -> None:
    """Refuse pools that the device cannot hold, and say what makes them large."""
    if geometry.num_bytes > available:
        raise ConfigError(
            f"the pools need {geometry.num_bytes / 1e9:.1f} GB and {available / 1e9:.1f} GB are available: "
            f"{geometry.num_slots} sequences (max_num_seqs), pages {geometry.num_pages} of {geometry.page_size} tokens "
            f"(num_pages, num_window_pages, max_num_batched_tokens), {geometry.num_snapshots} checkpoints "
            f"(num_checkpoints), {geometry.max_length} tokens a request (max_model_len); cache_bytes lowers the defaults"
        )


def _page_bytes(layout: StateLayout, group: PageGroup, page_size: int) -> int:
    return group.width * page_size * layout.element_bytes


def _window_pages(group: PageGroup, page_size: int) -> int:
    """Most pages that a window touches, wherever it begins."""
    assert group.window is not None, "only window groups have a window"
    return -(-(group.window - 1) // page_size) + 1


def _live_window_pages(config: EngineConfig, group: PageGroup) -> int:
    """Pages that all running sequences can need in a step at once."""
    per_sequence = _window_pages(group, config.page_size) + 1
    return config.max_num_seqs * per_sequence + -(-config.max_num_batched_tokens // config.page_size)


def _checkpoint_bytes(config: EngineConfig, layout: StateLayout) -> int:
    """Bytes of a checkpoint: its rows, and the window pages that it owns."""
    windows = [group for group in layout.groups if group.window is not None]
    row_bytes = sum(stream.width for stream in layout.streams) * layout.element_bytes
    pages = (_window_pages(group, config.page_size) * _page_bytes(layout, group, config.page_size) for group in windows)
    return layout.history * row_bytes + sum(pages)


def _affordable_checkpoints(config: EngineConfig, layout: StateLayout, cache_bytes: int) -> int:
    """Checkpoints that fit half of the budget; at least one a running sequence."""
    each = _checkpoint_bytes(config, layout)
    return max(config.max_num_seqs, min(_MAX_CHECKPOINTS, cache_bytes // 2 // max(each, 1)))


def _num_pages(
    config: EngineConfig,
    layout: StateLayout,
    group: PageGroup,
    length: int,
    num_checkpoints: int,
    cache_bytes: int,
) -> int:
    per_sequence = -(-length // config.page_size)
    if group.window is not None:
        wanted = _live_window_pages(config, group) + num_checkpoints * _window_pages(group, config.page_size)
        return config.num_window_pages or wanted
    if config.num_pages is not None:
        return config.num_pages
    # Half of the budget, and what the checkpoints leave of theirs.
    left = max(cache_bytes // 2, cache_bytes - num_checkpoints * _checkpoint_bytes(config, layout))
    affordable = left // _page_bytes(layout, group, config.page_size)
    # Twice what running sequences can use leaves as much for the prefix cache; more than that is seldom touched.
    return max(2, min(affordable, 2 * config.max_num_seqs * per_sequence))
