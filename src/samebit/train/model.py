"""The Inkling text model as a differentiable torch module, with its draft depths (multi-token prediction).

One parameter for each that `stored_parameters` names, in fp32; matrix products follow autocast, everything else is fp32.
Knows configuration and tensors; knows no files, data or optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from samebit.core.errors import CheckpointError
from samebit.models.inkling import log_scaling
from samebit.models.inkling_config import InklingConfig, parse_config, parse_depths
from samebit.models.inkling_weights import head_shape, stored_parameters
from samebit.train.attention import full_attention, window_attention

# With these present, `stored_parameters` speaks the published spelling and expects an output matrix.
PUBLISHED = {"model.llm.embed.weight", "model.llm.unembed.weight"}
BUFFERS = ("router_bias",)

BlockResult = tuple[Tensor, Tensor | None]  # x [B, T, H]; loads [E] where there are experts


class Block(nn.Module):
    """`attend`: x + conv(attention(norm(x))), then `expand`: x + conv(mlp(norm(x))). `weights`: by their key within a layer."""

    def __init__(self, config: InklingConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.heads = head_shape(config, layer)
        self.is_dense = config.is_dense[layer]
        self.weights = nn.ParameterDict()
        prefix = f"{layer}."
        for key, stored in stored_parameters(config, PUBLISHED).items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in BUFFERS:
                self.weights[name] = nn.Parameter(torch.empty(stored.shapes[0]))
        if not self.is_dense:
            # No gradient reaches it: the training loop moves it to balance the experts.
            self.register_buffer("router_bias", torch.zeros(config.n_routed_experts))

    def attend(self, x: Tensor, tau: Tensor) -> Tensor:
        """The first half: x [B, T, H] with what attention adds; tau [T]."""
        w = self.weights
        h = rms_norm(x, w["attn_norm"], self.config.rms_norm_eps)
        return x + short_conv(self._attention(h, tau), w["attn_conv"])

    def expand(self, x: Tensor) -> BlockResult:
        """The second half: x [B, T, H] with what the MLP adds, and how many tokens chose each expert ([E]; None: dense)."""
        mixed, load = self.mix(x)
        return x + short_conv(mixed, self.weights["mlp_conv"]), load

    def mix(self, x: Tensor) -> BlockResult:
        """What the MLP makes of x [B, T, H], before its convolution; and the load."""
        h = rms_norm(x, self.weights["mlp_norm"], self.config.rms_norm_eps)
        return (self._dense(h), None) if self.is_dense else self._sparse(h)

    def _attention(self, x: Tensor, tau: Tensor) -> Tensor:
        w, heads, eps = self.weights, self.heads, self.config.rms_norm_eps
        q = torch.unflatten(functional.linear(x, w["q"]), -1, (heads.num_heads, heads.head_dim))
        r = torch.unflatten(functional.linear(x, w["r"]), -1, (heads.num_heads, heads.d_rel))
        k, v = (
            torch.unflatten(short_conv(functional.linear(x, w[n]), w[f"{n}_conv"]), -1, (-1, heads.head_dim))
            for n in "kv"
        )
        q, k = rms_norm(q, w["q_norm"], eps).to(r.dtype), rms_norm(k, w["k_norm"], eps).to(r.dtype)
        profile = r @ w["rel_proj"].to(r.dtype)
        v = v.to(r.dtype)
        out = window_attention(q, k, v, profile) if heads.window else full_attention(q, k, v, profile, tau)
        return functional.linear(out.flatten(2), w["o"])

    def _dense(self, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, self.weights["gate_up"]).chunk(2, dim=-1)
        hidden = functional.silu(gate.float()) * up.float()
        scaled: Tensor = functional.linear(hidden, self.weights["down"]).float() * self.weights["scale"]
        return scaled

    def _sparse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All experts are computed for all tokens, as one product; the weights of those not chosen are 0."""
        w, config = self.weights, self.config
        num_routed = config.n_routed_experts
        # Choices flip easily: the router is never rounded to bf16.
        with torch.autocast(x.device.type, enabled=False):
            gates = torch.sigmoid(functional.linear(x.float(), w["router"]))
        routed, shared = gates[..., :num_routed], gates[..., num_routed:]
        bias = self.get_buffer("router_bias")
        chosen = (routed.detach() + bias).topk(config.num_experts_per_tok, dim=-1).indices
        is_chosen = torch.zeros_like(routed).scatter(-1, chosen, 1.0)
        parts = torch.cat([routed * is_chosen, shared], dim=-1)
        parts = parts / parts.sum(-1, keepdim=True) * (config.route_scale * w["router_scale"])
        gate_up = torch.cat([w["experts_gate_up"], w["shared_gate_up"]])
        down = torch.cat([w["experts_down"], w["shared_down"]])
        projected = functional.linear(x, gate_up.flatten(0, 1))
        gate, up = torch.unflatten(projected, -1, gate_up.shape[:2]).chunk(2, dim=-1)
        hidden = functional.silu(gate.float()) * up.float() * parts[..., None]
        return functional.linear(hidden.flatten(-2), down.transpose(0, 1).flatten(1)), is_chosen.sum((0, 1))


class Depth(nn.Module):
    """A draft depth: `join`s the hidden state before it with the next token's embedding, then runs a dense `block`."""

    def __init__(self, config: InklingConfig, depth: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self._eps = config.rms_norm_eps
        self.weights = nn.ParameterDict(
            {
                "hidden_norm": nn.Parameter(torch.empty(hidden)),
                "embed_norm": nn.Parameter(torch.empty(hidden)),
                "input_proj": nn.Parameter(torch.empty(hidden, 2 * hidden)),
            }
        )
        self.block = Block(config, depth)

    def join(self, before: Tensor, embedded: Tensor) -> Tensor:
        """before, embedded [B, T, H] -> what the depth's block takes."""
        w = self.weights
        parts = [rms_norm(before, w["hidden_norm"], self._eps), rms_norm(embedded, w["embed_norm"], self._eps)]
        return functional.linear(torch.cat(parts, dim=-1), w["input_proj"])


class Inkling(nn.Module):
    """The whole model of a config.json object `raw`; weights are drawn from `seed`."""

    def __init__(self, raw: Mapping[str, Any], seed: int = 0) -> None:  # Any: JSON
        super().__init__()
        self.raw = dict(raw)
        self.config = parse_config(raw)
        self.weights = nn.ParameterDict(
            {
                key: nn.Parameter(torch.empty(stored.shapes[0]))
                for key, stored in stored_parameters(self.config, PUBLISHED).items()
                if "." not in key
            }
        )
        self.blocks = nn.ModuleList(Block(self.config, i) for i in range(self.config.num_hidden_layers))
        if (raw.get("mtp_config") or {}).get("chain_hidden_post_norm"):
            raise CheckpointError("chain_hidden_post_norm=True: training supports only False")
        drafts = parse_depths(raw)
        num_depths = 0 if drafts is None else drafts.num_hidden_layers
        self.depths = nn.ModuleList(Depth(drafts, j) for j in range(num_depths) if drafts is not None)
        self.register_buffer("_tau", log_scaling(self.config), persistent=False)
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        initialise(self, seed)

    def compile_parts(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile for training; evaluation, whose lengths vary, stays eager.

        What is compiled are halves of blocks, as functions of a block and tensors: one code for each kind of half and shape,
        which all layers and depths of the kind share. Whole blocks would be more kinds, and each as large as two halves.
        """
        parts = (Block.attend, Block.expand, Depth.join)
        self._compiled = {part: torch.compile(part, dynamic=False, backend=backend) for part in parts}

    def forward(self, token_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """From ids [B, T], hidden [B, T, H] after the final norm, not yet divided by muP; the load of each layer with experts."""
        x = self.embedded(token_ids)
        tau = self.get_buffer("_tau")[: token_ids.shape[1]]
        loads = []
        for block in self.blocks:
            x, load = self._through(block, x, tau)
            loads += [] if load is None else [load]
        return rms_norm(x, self.weights["norm"], self.config.rms_norm_eps), loads

    def tapped(self, token_ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`forward`'s hidden [B, T, H], and the taps of `layers` beside each other, [B, T, len(layers) * H].

        A tap is a layer's output without its last convolution, as the engine's model gives it to drafters. Never compiled.
        """
        x = self.embedded(token_ids)
        tau = self.get_buffer("_tau")[: token_ids.shape[1]]
        taps = {}
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block), "a model is made of blocks"
            x = block.attend(x, tau)
            mixed, _ = block.mix(x)
            if i in layers:
                taps[i] = x + mixed
            x = x + short_conv(mixed, block.weights["mlp_conv"])
        hidden = rms_norm(x, self.weights["norm"], self.config.rms_norm_eps)
        return hidden, torch.cat([taps[i] for i in layers], dim=-1)

    def draft(self, hidden: Tensor, token_ids: Tensor) -> list[Tensor]:
        """For `forward`'s result, each depth's hidden states [B, T, H]; like the model's, row u predicts token u + 1.

        A row of depth j joins token u with the hidden state before it: of depth j - 1, or of the model for depth 0. So depth j
        knows j + 1 tokens that the model has not seen. Before the first row the hidden state is 0. No gradient reaches the
        embedding from here.
        """
        tau = self.get_buffer("_tau")[: token_ids.shape[1]]
        embedded = self.embedded(token_ids).detach()
        found = []
        for depth in self.depths:
            before = functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
            joined = self._part(Depth.join)(depth, before, embedded)
            hidden, _ = self._through(depth.get_submodule("block"), joined, tau)
            found.append(hidden)
        return found

    def embedded(self, token_ids: Tensor) -> Tensor:
        """What the first block takes for ids [...]: [..., H], normalised."""
        rows = functional.embedding(token_ids, self.weights["embed"])
        return rms_norm(rows, self.weights["embed_norm"], self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] fp32 over the true vocabulary."""
        scaled = hidden / self.config.logits_mup_width_multiplier
        return functional.linear(scaled, self.weights["unembed"][: self.config.unpadded_vocab_size]).float()

    def num_parameters(self) -> int:
        """All elements that an exported checkpoint holds."""
        state = self.state_dict()
        return sum(tensor.numel() for tensor in state.values())

    def _through(self, block: nn.Module, x: Tensor, tau: Tensor) -> BlockResult:
        result: BlockResult = self._part(Block.expand)(block, self._part(Block.attend)(block, x, tau))
        return result

    def _part(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """A part of the forward pass, as it is or compiled."""
        return self._compiled.get(part, part) if self.training else part


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Gives x / sqrt(mean(x²) + eps) · gain over the last dimension, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def short_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Adds to x [B, T, C] its causal depthwise convolution with taps [C, 1, K], of which the last is the current token's; fp32."""
    T, K = x.shape[1], taps.shape[-1]
    x = x.float()
    padded = functional.pad(x, (0, 0, K - 1, 0))
    return x + sum((taps[:, 0, j] * padded[:, j : j + T] for j in range(K)), start=torch.zeros_like(x))


@torch.no_grad()
def initialise(model: Inkling, seed: int) -> None:
    """Draw all weights. Maps keep the scale of their input; branch outputs are small, so that a fresh block changes little."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    hidden = config.hidden_size**-0.5
    branch = 0.5 / math.sqrt(config.num_hidden_layers)
    # The scale of scores is 1 / head size, so the gains of q and k carry how sharp attention is.
    constant = {"q_norm": 3.0, "k_norm": 3.0}
    spread = {"embed": 0.1, "unembed": 0.5 * hidden, "r": 0.5 * hidden, "router": 0.5 * hidden, "o": branch * hidden}
    for name, parameter in model.named_parameters():
        key = name.rpartition(".")[2]
        if key.endswith("_conv"):
            parameter.zero_()
        elif key == "rel_proj":
            # Each of the query's features speaks for distances up to a reach of its own.
            num_features, extent = parameter.shape
            reach = torch.logspace(0, math.log10(extent), num_features)[:, None]
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * torch.exp(-torch.arange(extent) / reach) + 0.01 * noise)
        elif parameter.ndim == 1:
            parameter.fill_(constant.get(key, 1.0))
        else:
            scale = branch if key.endswith("down") else 1.0
            scale *= parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread.get(key, scale))
