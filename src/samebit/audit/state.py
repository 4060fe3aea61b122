"""Reads State(t) out of an engine: the rows of every published checkpoint on a request's path. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from samebit.engine.engine import Engine
from samebit.state.layout import PageGroup
from samebit.state.nodes import Checkpoint
from samebit.state.pools import StatePools


@dataclass(frozen=True, slots=True)
class StatePart:
    """One component of one layer: `rows` [N, width] in the pool's dtype, row i at token position `positions[i]`."""

    layer: str
    component: str
    positions: list[int]
    rows: Tensor


@dataclass(slots=True)
class SeenMemory:
    """Pages and snapshots that were read already: published memory never changes, so it is compared once."""

    pages: set[tuple[int, int]] = field(default_factory=set)
    snapshots: set[int] = field(default_factory=set)


def read_state(engine: Engine, salt: str, tokens: list[int], seen: SeenMemory) -> list[StatePart]:
    """All parts of every checkpoint that lies on the path of `tokens` and is not in `seen`, which grows.

    Full-attention rows of positions [0, t), window rows of [t - W + 1, t), convolution inputs of [t - K + 1, t).
    """
    path = engine.manager.tree.walk(engine.manager.namespace(salt), tokens, len(tokens))
    checkpoints = [node.checkpoint for node in path if node.checkpoint is not None]
    if not checkpoints:
        return []
    pools = engine.pools
    parts: list[StatePart] = []
    for g, group in enumerate(pools.geometry.layout.groups):
        if group.window is None:
            nodes = [node for node in path if node.num_tokens <= checkpoints[-1].boundary]
            firsts = {node.page: node.num_tokens - len(node.key) for node in nodes if node.page is not None}
            starts = {int(page): (first, first) for page, first in firsts.items()}
        else:
            starts = _window_starts(checkpoints, g, group, pools.geometry.page_size)
        fresh = {page: where for page, where in starts.items() if (g, page) not in seen.pages}
        seen.pages.update((g, page) for page in fresh)
        parts += _kv_parts(pools, g, group, fresh)
    new = [c for c in checkpoints if c.snapshot not in seen.snapshots]
    seen.snapshots.update(c.snapshot for c in new)
    return parts + _conv_parts(pools, new)


def _window_starts(checkpoints: list[Checkpoint], g: int, group: PageGroup, size: int) -> dict[int, tuple[int, int]]:
    """By page: the position of its first row, and the first position of it that some checkpoint's state holds."""
    starts: dict[int, tuple[int, int]] = {}
    for checkpoint in checkpoints:
        low = group.first_position(checkpoint.boundary)
        for held in checkpoint.windows[g]:
            first = held.index * size
            begin = max(first, low)
            starts[held.page] = (first, min(begin, starts.get(held.page, (first, begin))[1]))
    return starts


def _kv_parts(pools: StatePools, g: int, group: PageGroup, starts: dict[int, tuple[int, int]]) -> list[StatePart]:
    size = pools.geometry.page_size
    kind = "full" if group.window is None else f"window {group.window}"
    ids = torch.tensor(list(starts), dtype=torch.int64)
    flat = [(n, first + i) for n, (first, low) in enumerate(starts.values()) for i in range(low - first, size)]
    if not flat:
        return []
    positions = [position for _, position in flat]
    picks = torch.tensor([n * size + position % size for n, position in flat])
    parts = []
    for layer, pool in enumerate(pools.kv[g]):
        for component, tensor in (("k", pool.k), ("v", pool.v)):
            rows = tensor[ids].cpu().transpose(1, 2).reshape(len(ids) * size, -1)[picks]
            parts.append(StatePart(f"{kind} #{layer}", component, positions, rows))
    return parts


def _conv_parts(pools: StatePools, checkpoints: list[Checkpoint]) -> list[StatePart]:
    geometry = pools.geometry
    history = geometry.layout.history
    found = [
        (geometry.snapshot_base(c.snapshot) + i, c.boundary - history + i)
        for c in checkpoints
        for i in range(history)
        if c.boundary - history + i >= 0
    ]
    if not found:
        return []
    rows = torch.tensor([row for row, _ in found])
    positions = [position for _, position in found]
    parts = []
    for stream, pool in zip(geometry.layout.streams, pools.conv, strict=True):
        layer, _, name = stream.name.rpartition(".")
        parts.append(StatePart(layer, f"{name} convolution input", positions, pool.rows[rows].cpu()))
    return parts
