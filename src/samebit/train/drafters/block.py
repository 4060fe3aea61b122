"""A block drafter (DFlash, DSpark) as a differentiable torch module: the function that the engine serves.

Its parameters have the published names and shapes, in fp32; matrix products follow autocast, everything else is fp32. Many
blocks of a sequence are computed at once, each as if it were alone. Knows no target, no data and no loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from samebit.core.errors import ConfigError
from samebit.speculative.block_config import BlockConfig
from samebit.train.model import rms_norm

_SPREAD = 0.02


class RmsNorm(nn.Module):
    """A gain; fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., width]."""
        return rms_norm(x, self.weight, self._eps)


class SelfAttention(nn.Module):
    """Rows of blocks look at the context's states and at their own block."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self._config = config
        hidden, hd = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * hd, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * hd, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * hd, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, hidden, bias=False)
        self.q_norm = RmsNorm(hd, config.rms_norm_eps)
        self.k_norm = RmsNorm(hd, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        """From x [B, Q, H] and context [B, S, H], at `angles` [B, S + Q, hd / 2], mask [B, 1, Q, S + Q] -> [B, Q, H]."""
        S, hd = context.shape[1], self._config.head_dim
        both = torch.cat([context, x], dim=1)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, hd)))
        k = self.k_norm(self.k_proj(both).unflatten(-1, (-1, hd)))
        v = self.v_proj(both).unflatten(-1, (-1, hd)).transpose(1, 2)
        q = rotated(q, angles[:, S:]).to(v.dtype).transpose(1, 2)
        k = rotated(k, angles).to(v.dtype).transpose(1, 2)
        groups = self._config.num_attention_heads // self._config.num_key_value_heads
        # Not every fused attention takes fewer heads of keys than of queries.
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, Q, H]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x).float()) * self.up_proj(x).float())
        return out


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). The context is not normalised anew."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, context: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        """[B, Q, H] fp32."""
        x = x + self.self_attn(self.input_layernorm(x), context, angles, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """What the token before adds to logits: a table of rank R."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, before: Tensor, vocab_size: int) -> Tensor:
        """For tokens [...], fp32 [..., vocab_size]."""
        return functional.linear(self.markov_w1(before), self.markov_w2.weight[:vocab_size]).float()


class ConfidenceHead(nn.Module):
    """How sure a guess is, as a logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> [...]; fp32."""
        with torch.autocast(features.device.type, enabled=False):
            found: Tensor = self.proj(features.float())
        return found[..., 0]


class BlockDrafter(nn.Module):
    """A drafter of `config`; weights are drawn from `seed`. The second Markov matrix and the confidence's map begin with 0."""

    def __init__(self, config: BlockConfig, seed: int = 0) -> None:
        super().__init__()
        if config.markov_rank and config.markov_head_type != "vanilla":
            raise ConfigError(f"markov_head_type={config.markov_head_type!r}: training supports only 'vanilla'")
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(hidden, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        has_markov = config.confidence_head_with_markov
        width = hidden + (config.markov_rank if has_markov else 0)
        self.confidence_head = ConfidenceHead(width) if config.enable_confidence_head else None
        self._initialise(seed)

    def forward(self, taps: Tensor, embedded: Tensor, anchors: Tensor) -> Tensor:
        """Final hidden rows [B, N, R, H] of N blocks at `anchors` [B, N], which are seen by none but themselves.

        taps [B, S, K * H] of the whole sequence; embedded [B, N, R, H]: raw embedding rows of the anchors' tokens and of masks.
        """
        B, S = taps.shape[:2]
        R = embedded.shape[2]
        context = self.hidden_norm(self.fc(taps))
        at = torch.arange(S, device=taps.device)
        places = (anchors[..., None] + torch.arange(R, device=taps.device)).flatten(1)
        angles = rotary_angles(
            torch.cat([at.expand(B, S), places], dim=1), self.config.head_dim, self.config.rope_theta
        )
        masks = {
            kind: block_mask(anchors, S, R, window=kind[0], is_causal=kind[1])
            for kind in dict.fromkeys(zip(self.config.windows, self.config.is_causal, strict=True))
        }
        x = (embedded * self.config.input_embedding_scale).float().flatten(1, 2)
        for i, layer in enumerate(self.layers):
            x = layer(x, context, angles, masks[self.config.windows[i], self.config.is_causal[i]])
        out: Tensor = self.norm(x).view(*embedded.shape)
        return out

    def corrected(self, logits: Tensor, before: Tensor) -> Tensor:
        """Add to logits [..., V] what the tokens before, [...], say of them."""
        return logits if self.markov_head is None else logits + self.markov_head(before, logits.shape[-1])

    def confidence_logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[...] fp32, for the rows `hidden` [..., H] that guess and the tokens before the guessed ones."""
        assert self.confidence_head is not None, "only asked of a drafter with a confidence head"
        parts = [hidden.float()]
        if self.config.confidence_head_with_markov and self.markov_head is not None:
            parts.append(self.markov_head.markov_w1(before).float())
        found: Tensor = self.confidence_head(torch.cat(parts, dim=-1))
        return found

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "confidence_head" in name or "markov_w2" in name:
                parameter.zero_()
            elif parameter.ndim > 1:
                parameter.copy_(_SPREAD * torch.randn(parameter.shape, generator=generator))


def rotary_angles(places: Tensor, head_dim: int, theta: float) -> Tensor:
    """[..., head_dim / 2] fp32 for places [...]."""
    exponents = torch.arange(0, head_dim, 2, device=places.device, dtype=torch.float32) / head_dim
    return places[..., None].float() * theta**-exponents


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Turn x [B, T, heads, hd] by angles [B, T, hd / 2]; a pair's members lie half a head apart. fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = angles.cos()[:, :, None], angles.sin()[:, :, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def block_mask(anchors: Tensor, num_context: int, num_rows: int, *, window: int, is_causal: bool) -> Tensor:
    """Bool [B, 1, N * R, S + N * R]: what rows of blocks at `anchors` [B, N] see of S states and of all blocks' rows.

    Of the context what lies before their anchor, within `window` if it is not 0; of the blocks their own, up to themselves if
    `is_causal`.
    """
    B, N = anchors.shape
    S, R = num_context, num_rows
    device = anchors.device
    offsets = torch.arange(R, device=device)
    at = torch.arange(S, device=device)
    seen = (at < anchors[..., None])[:, :, None, :].expand(B, N, R, S)
    if window:
        seen = seen & (at > (anchors[..., None] + offsets)[..., None] - window)
    own = offsets <= offsets[:, None] if is_causal else torch.ones(R, R, dtype=torch.bool, device=device)
    blocks = torch.eye(N, dtype=torch.bool, device=device)[:, None, :, None] & own[None, :, None, :]
    blocks = blocks.reshape(N * R, N * R).expand(B, N * R, N * R)
    return torch.cat([seen.reshape(B, N * R, S), blocks], dim=2)[:, None]
