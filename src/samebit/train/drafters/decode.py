"""Lets the trainable model speak: one token a step for many rows at once, with keys, values and convolutions' inputs kept.

The same function as the model's forward pass. For text to train on and to measure with; the engine serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from samebit.train.model import Block, Inkling, rms_norm

Draw = Callable[[Tensor, int], Tensor]  # logits [B, V] and the place of the token to draw -> tokens [B]


class Decoder:
    """Owner of what B rows of at most `length` tokens keep."""

    def __init__(self, model: Inkling, num_rows: int, length: int) -> None:
        device = model.weights["embed"].device
        self._model, self._tau = model, model.get_buffer("_tau")
        self._blocks = [_BlockDecoder(block, num_rows, length, device) for block in model.blocks]
        self._place = 0

    def step(self, token_ids: Tensor) -> Tensor:
        """Take in one token a row, [B]; the model's final hidden states [B, H]."""
        x = self._model.embedded(token_ids[:, None])
        for block in self._blocks:
            x = block.step(x, self._place, self._tau[self._place])
        self._place += 1
        return rms_norm(x[:, 0], self._model.weights["norm"], self._model.config.rms_norm_eps)


class _BlockDecoder:
    def __init__(self, block: torch.nn.Module, num_rows: int, length: int, device: torch.device) -> None:
        assert isinstance(block, Block), "a model is made of blocks"
        self._block, heads = block, block.heads
        nk = block.weights["k"].shape[0] // heads.head_dim
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._keys = torch.zeros(num_rows, nk, length, heads.head_dim, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self._inputs: dict[str, Tensor] = {}

    def step(self, x: Tensor, place: int, tau: Tensor) -> Tensor:
        """One token a row, x [B, 1, H]."""
        block = self._block
        h = rms_norm(x, block.weights["attn_norm"], block.config.rms_norm_eps)
        x = x + self._convolved("attn_conv", self._attention(h, place, tau))
        return x + self._convolved("mlp_conv", block.mix(x)[0])

    def _attention(self, x: Tensor, place: int, tau: Tensor) -> Tensor:
        w, heads, eps = self._block.weights, self._block.heads, self._block.config.rms_norm_eps
        hd, nk = heads.head_dim, self._keys.shape[1]
        q = rms_norm(torch.unflatten(functional.linear(x, w["q"]), -1, (nk, -1, hd)), w["q_norm"], eps)[:, 0]
        r = torch.unflatten(functional.linear(x, w["r"]), -1, (nk, -1, heads.d_rel))[:, 0]
        k, v = (self._convolved(f"{n}_conv", functional.linear(x, w[n])).view(len(x), nk, hd) for n in "kv")
        self._keys[:, :, place] = rms_norm(k, w["k_norm"], eps).to(self._keys.dtype)
        self._values[:, :, place] = v.to(self._values.dtype)
        first = max(0, place + 1 - heads.window) if heads.window else 0
        keys, values = (kept[:, :, first : place + 1] for kept in (self._keys, self._values))
        profile = r @ w["rel_proj"][:, : keys.shape[2]].to(r.dtype)
        bias = functional.pad(profile, (0, keys.shape[2] - profile.shape[-1])).flip(-1)
        scores = (q.to(keys.dtype) @ keys.mT).float() / hd + bias.float()
        scores = scores if heads.window else scores * tau
        out = scores.softmax(-1).to(values.dtype) @ values
        return functional.linear(out.flatten(1)[:, None], w["o"])

    def _convolved(self, name: str, x: Tensor) -> Tensor:
        """Add to x [B, 1, C] its convolution over the inputs before it."""
        taps = self._block.weights[name][:, 0].T
        x = x.float()
        before = self._inputs.get(name)
        if before is None:
            before = x.new_zeros(len(x), len(taps) - 1, x.shape[-1])
        window = torch.cat([before, x], dim=1)
        self._inputs[name] = window[:, 1:]
        found: Tensor = x + (window * taps).sum(1, keepdim=True)
        return found


@torch.no_grad()
def continued(model: Inkling, prompts: Tensor, lengths: Tensor, total: int, draw: Draw) -> Tensor:
    """Texts [B, total] that begin with the first `lengths` [B] tokens of `prompts` [B, P]; `draw` chooses all others."""
    device = model.weights["embed"].device
    ids = functional.pad(prompts.to(device), (0, max(0, total - prompts.shape[1])))[:, :total]
    lengths = lengths.to(device)
    shortest = int(lengths.min())
    decoder = Decoder(model, len(ids), total)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for place in range(1, total):
            hidden = decoder.step(ids[:, place - 1])
            if place >= shortest:
                drawn = draw(model.logits(hidden), place)
                ids[:, place] = torch.where(place < lengths, ids[:, place], drawn)
    return ids


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Noise whose addition to logits makes the largest one a draw from their softmax; fp32."""
    uniform = torch.rand(shape, device=generator.device, generator=generator).clamp(1e-10, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))
