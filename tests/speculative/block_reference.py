"""Block drafters in plain torch and double precision, written from the papers' formulas; shares no code with the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Target:
    """What drafters borrow: rows of the embedding as stored, and the head with its divisor, over tokens that exist."""

    embedding: Tensor
    head: Tensor
    divisor: float


class Reference:
    """`raw` is a whole config.json, nested or flat; `tensors` have the published names."""

    def __init__(self, raw: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> None:
        self.c = {**raw, **raw.get("dflash_config", {}), **raw.get("dspark_config", {})}
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        self.target = target
        self.layers = self.c.get("num_hidden_layers") or self.c["num_draft_layers"]
        self.is_dspark = "DSpark" in raw["architectures"][0]
        self.from_anchor = self.c.get("sample_from_anchor", self.is_dspark)

    def hidden(self, taps: Tensor, last_token: int, num_drafts: int) -> Tensor:
        """[num_drafts, H]: the rows that guess, behind `taps` [n, K * H] of everything before the last token."""
        count = num_drafts + (0 if self.from_anchor else 1)
        ids = [last_token] + [self.c["mask_token_id"]] * (count - 1)
        x = self.target.embedding.double()[ids] * (self.c.get("input_embedding_scale") or 1.0)
        context = self.norm(taps.double() @ self.t["fc.weight"].T, "hidden_norm")
        for i in range(self.layers):
            name = f"layers.{i}."
            x = x + self.attention(i, self.norm(x, name + "input_layernorm"), context)
            u = self.norm(x, name + "post_attention_layernorm")
            gate, up = (u @ self.t[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.t[f"{name}mlp.down_proj.weight"].T
        return self.norm(x, "norm")[0 if self.from_anchor else 1 :]

    def attention(self, i: int, u: Tensor, context: Tensor) -> Tensor:
        n, count = len(context), len(u)
        behind = torch.arange(n, n + count)
        everywhere = torch.cat([torch.arange(n), behind])
        q = self.turned(self.heads(i, "q", u), behind)
        both = torch.cat([context, u])
        k, v = self.turned(self.heads(i, "k", both), everywhere), self.heads(i, "v", both)
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) / self.c["head_dim"] ** 0.5
        slides = self.c["layer_types"][i] == "sliding_attention"
        causal = self.c.get("is_causal")
        causal = slides if causal is None else causal
        distance = behind[:, None] - everywhere
        seen = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            seen &= distance >= 0
        if slides:
            seen &= distance.abs() < self.c["sliding_window"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1)).flatten(1)
        return mixed @ self.t[f"layers.{i}.self_attn.o_proj.weight"].T

    def heads(self, i: int, which: str, rows: Tensor) -> Tensor:
        found = (rows @ self.t[f"layers.{i}.self_attn.{which}_proj.weight"].T).unflatten(1, (-1, self.c["head_dim"]))
        return found if which == "v" else self.norm(found, f"layers.{i}.self_attn.{which}_norm")

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Complex numbers: element i and element i + width / 2 are one, turned by its angle."""
        half = self.c["head_dim"] // 2
        angle = positions[:, None].double() * self.c["rope_theta"] ** (-torch.arange(half).double() / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.t[f"{name}.weight"]

    def logits(self, hidden: Tensor, last_token: int, guesses: list[int]) -> Tensor:
        """[D, V] for guesses that follow `last_token`, each with the ones before it given."""
        base = (hidden / self.target.divisor) @ self.target.head.double().T
        if not self.c.get("markov_rank"):
            return base
        w1, w2 = self.t["markov_head.markov_w1.weight"], self.t["markov_head.markov_w2.weight"][: base.shape[1]]
        state = torch.zeros(w1.shape[1], dtype=torch.double)
        added = []
        for h, token in zip(hidden, [last_token, *guesses[:-1]], strict=True):
            e = w1[token]
            if self.c["markov_head_type"] == "gated":
                e = torch.sigmoid(self.map("markov_head.gate_proj", torch.cat([h, e]))) * e
            elif self.c["markov_head_type"] == "rnn":
                z, c, o = self.map("markov_head.joint_proj", torch.cat([state, e, h])).chunk(3)
                state, e = torch.sigmoid(z) * state + (1 - torch.sigmoid(z)) * torch.tanh(c), torch.tanh(o)
            added.append(w2 @ e)
        return base + torch.stack(added)

    def confidence(self, hidden: Tensor, last_token: int, guesses: list[int], temperatures: list[float]) -> Tensor:
        """[D]: 1 without a head."""
        if not self.c.get("enable_confidence_head"):
            return torch.ones(len(hidden), dtype=torch.double)
        found = []
        for h, token, temperature in zip(hidden, [last_token, *guesses[:-1]], temperatures, strict=True):
            parts = [h]
            if self.c["confidence_head_with_markov"]:
                parts.append(self.t["markov_head.markov_w1.weight"][token])
            found.append(torch.sigmoid(self.map("confidence_head.proj", torch.cat(parts)) / temperature)[0])
        return torch.stack(found)

    def map(self, name: str, x: Tensor) -> Tensor:
        return self.t[f"{name}.weight"] @ x + self.t[f"{name}.bias"]
