"""Differentiable attention over whole sequences, with Inkling's relative bias, in plain torch.

Scores are dot products divided by the head size plus a bias that the query gives to each distance; sliding-window layers
are computed in blocks of one window. Knows tensors only. Not row-pure: training has no need for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def full_attention(q: Tensor, k: Tensor, v: Tensor, profile: Tensor, tau: Tensor) -> Tensor:
    """[B, T, nh, hd]: causal attention in which tau [T] multiplies the scores of each query.

    q [B, T, nh, hd]; k, v [B, T, nk, hd]; profile [B, T, nh, E]: bias for distances 0 .. E - 1, beyond it is 0.
    """
    B, T, nh, hd = q.shape
    nk = k.shape[2]
    g = nh // nk
    grouped = torch.unflatten(q, 2, (nk, g)).permute(0, 2, 3, 1, 4)
    scores = (grouped.reshape(B, nk, g * T, hd) @ k.permute(0, 2, 3, 1)).view(B, nk, g, T, T)
    bias = _bias_of_keys(torch.unflatten(profile[..., :T], 2, (nk, g)).permute(0, 2, 3, 1, 4))
    scores = (scores.float() / hd + bias.float()) * tau[:, None]
    at = torch.arange(T, device=q.device)
    weights = scores.masked_fill(at > at[:, None], -math.inf).softmax(-1).to(v.dtype)
    out = (weights.view(B, nk, g * T, T) @ v.transpose(1, 2)).view(B, nk, g, T, hd)
    return out.permute(0, 3, 1, 2, 4).reshape(B, T, nh, hd)


def window_attention(q: Tensor, k: Tensor, v: Tensor, profile: Tensor) -> Tensor:
    """[B, T, nh, hd]: attention to the W keys that end with the query's own. Shapes as in `full_attention`, E = W."""
    B, T, nh, hd = q.shape
    nk, W = k.shape[2], profile.shape[-1]
    g, num_blocks = nh // nk, -(-T // W)
    q, k, v, profile = (functional.pad(t, (0, 0, 0, 0, 0, num_blocks * W - T)) for t in (q, k, v, profile))
    grouped = q.view(B, num_blocks, W, nk, g, hd).permute(0, 3, 1, 4, 2, 5)
    keys, values = (_with_block_before(t, W) for t in (k, v))
    scores = grouped.reshape(B, nk, num_blocks, g * W, hd) @ keys.transpose(-1, -2)
    scores = scores.view(B, nk, num_blocks, g, W, 2 * W)
    bias = _bias_of_two_blocks(profile.view(B, num_blocks, W, nk, g, W).permute(0, 3, 1, 4, 2, 5))
    scores = scores.float() / hd + bias.float()
    row = torch.arange(W, device=q.device)[:, None]
    column = torch.arange(2 * W, device=q.device)
    block = torch.arange(num_blocks, device=q.device)[:, None, None]
    visible = (column > row) & (column <= row + W) & ((block > 0) | (column >= W))
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1).to(v.dtype)
    out = (weights.view(B, nk, num_blocks, g * W, 2 * W) @ values).view(B, nk, num_blocks, g, W, hd)
    return out.permute(0, 2, 4, 1, 3, 5).reshape(B, num_blocks * W, nh, hd)[:, :T]


def _bias_of_keys(profile: Tensor) -> Tensor:
    """[..., T, E] by distance -> [..., T, T] by key: every row is turned round and moved one column further than the last."""
    T, E = profile.shape[-2:]
    rows = functional.pad(profile.flip(-1), (0, T)).flatten(-2)[..., : T * (T + E - 1)]
    return torch.unflatten(rows, -1, (T, T + E - 1))[..., E - 1 :]


def _bias_of_two_blocks(profile: Tensor) -> Tensor:
    """[..., W, W] by distance -> [..., W, 2W] by key of the block before and of the own block."""
    W = profile.shape[-1]
    rows = functional.pad(profile.flip(-1), (1, W)).flatten(-2)[..., : 2 * W * W]
    return torch.unflatten(rows, -1, (W, 2 * W))


def _with_block_before(keys: Tensor, W: int) -> Tensor:
    """[B, T, nk, hd] -> [B, nk, T / W, 2W, hd]: each block of W positions behind the one before it (zeros at first)."""
    blocks = torch.unflatten(functional.pad(keys, (0, 0, 0, 0, W, 0)), 1, (-1, W))
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2).permute(0, 3, 1, 2, 4)
