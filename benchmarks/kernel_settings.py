"""Settings of kernels that are worth a try: tiles of products, experts and convolutions, and how attention is cut. Knows no operands."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import torch

from samebit.kernels.triton import attention, conv, experts, linear
from samebit.kernels.triton.launch import HOPPER_SHARED

DTYPE = torch.bfloat16


def chunk_fields() -> list[str]:
    """Fields of attention's tiling that say where keys are cut into chunks: with how keys are blocked, they fix bits."""
    return [field.name for field in fields(attention.Tiling) if field.name.endswith("chunk")]


def linear_tiles(rows: int) -> list[linear.Tile]:
    """Tiles for a product of so many rows: as wide as the tokens, deep for few of them and large for many."""
    widest = min(256, max(16, 1 << (rows - 1).bit_length()))
    if widest >= 256:
        shapes = [(128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (128, 64)]
        grid = itertools.product(shapes, [(1, 3), (1, 4)], (4, 8))
    elif widest > 32:
        shapes = list(itertools.product((32, 64, 128), sorted({widest // 2, widest})))
        grid = itertools.product(shapes, [(1, 3), (1, 4), (2, 3)], (4, 8))
    else:
        shapes = list(itertools.product((16, 32, 64, 128), (widest,)))
        grid = itertools.product(shapes, [(1, 6), (2, 4), (4, 3), (4, 4), (8, 3), (8, 4)], (4, 8))
    tiles = [linear.Tile(*shape, span, warps, stages) for shape, (span, stages), warps in grid]
    return [tile for tile in tiles if _fits(tile, tile.weights + tile.tokens, tile.weights * tile.tokens)]


def expert_tiles(mean_pairs: float) -> list[experts.Tile]:
    """Tiles for experts of so many pairs on average."""
    if mean_pairs >= 64:
        grid = itertools.product((64, 128), (64, 128), [(1, 3), (1, 4)], (4, 8), (1, 2))
    else:
        tokens, rows = ((16,), (16, 32, 64, 128)) if mean_pairs < 8 else ((16, 32), (32, 64, 128))
        depths = [(1, 4), (2, 3), (2, 4), (4, 3)][: 4 if mean_pairs < 8 else 2]
        grid = itertools.product(tokens, rows, depths, (4, 8), (2, 4, 8))
    if mean_pairs < 1:  # few programs, so that each may load far ahead
        deep = [(32, (2, 6)), (64, (1, 6)), (64, (2, 5))]
        grid = itertools.chain(grid, [(16, rows, depth, 4, 2) for rows, depth in deep])
    tiles = [experts.Tile(t, rows, span, warps, stages, programs) for t, rows, (span, stages), warps, programs in grid]
    return [tile for tile in tiles if _fits(tile, 2 * tile.rows + tile.tokens, 2 * tile.rows * tile.tokens)]


def conv_tiles() -> list[conv.Tile]:
    """Tiles of convolutions: with all registers that they want, and with fewer, so that more threads run at once."""
    tiles = []
    for channels, warps, tokens in itertools.product((128, 256, 512, 1024), (1, 2, 4, 8), (4, 8, 16)):
        width = channels // (32 * warps)  # of a thread
        if width <= 4 and tokens <= 8:
            tiles.append(conv.Tile(channels, tokens, warps, 64 if width <= 2 else 96))
        if width <= 8:
            tiles.append(conv.Tile(channels, tokens, warps, 255))
    return tiles


def attention_settings(now: attention.Tiling, *, is_window: bool, is_decode: bool) -> list[attention.Tiling]:
    """What is worth a try beside `now`: how keys are cut, and how it is compiled."""
    if is_decode:
        chunk = "window_chunk" if is_window else "chunk"
        # Tiles of long rows are launched for decoding too, where they find none: with long blocks they must be lower to fit.
        longer = replace(now, block_n=128, long_block_m=min(64, now.long_block_m), long_stages=2)
        grid = itertools.product((now, longer), (128, 256, 512), (2, 4, 8), (2, 3, 4))
        tilings = [
            replace(base, short_warps=warps, short_stages=stages, **{chunk: keys})
            for base, keys, warps, stages in grid
            if base.block_n * stages <= 384
        ]
        tilings += [replace(now, split_above=shares) for shares in (0, 1, 2)]
        return tilings + [replace(now, short_programs=programs) for programs in (1, 2, 4, 8)]
    sizes = itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4))
    tilings = [
        replace(now, block_n=n, long_block_m=m, long_warps=warps, long_stages=stages)
        for n, m, warps, stages in sizes
        if m * n <= 2048 * warps  # or too many values a thread
    ]
    tilings.append(replace(now, **dict.fromkeys(chunk_fields(), 2048)))
    return tilings + [replace(now, long_programs=programs) for programs in (1, 2, 4, 8)]


def _fits(tile: linear.Tile | experts.Tile, rows: int, sums: int) -> bool:
    """Whether a tile that loads so many rows a step, and has so many sums, can be fast at all."""
    loaded = rows * linear.BLOCK_K[DTYPE] * 2 * tile.span * (tile.num_stages - 1)
    values = sums / (32 * tile.num_warps)
    return loaded <= HOPPER_SHARED and values <= 128 and (tile.num_warps == 4 or values >= 8)
