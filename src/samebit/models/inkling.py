"""The Inkling text model: layers in order over one step's tokens.

Knows configuration and layers; knows no files, no request, and nothing about what kind of step it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.indexing import StepIndex
from samebit.kernels.sets import KernelSet
from samebit.layers.attention import Attention, AttentionState
from samebit.layers.linear import Embedding, Linear
from samebit.layers.mlp import DenseMlp, MoeMlp
from samebit.layers.norm import RmsNorm
from samebit.layers.short_conv import ShortConv
from samebit.models.hidden import Hidden
from samebit.models.inkling_config import InklingConfig
from samebit.state.layout import ConvStream, Element, KvLayer, PageGroup, StateLayout
from samebit.state.pools import ConvPool, KvPool, PoolPart

STREAMS = ("kv", "attn", "mlp")


@dataclass(frozen=True, slots=True)
class InklingLayer:
    """One block: x + conv(attention(norm(x))), then x + conv(mlp(norm(x))); each conv adds its own input as well.

    Called with x [T, H] fp32, what `attn_norm` makes of it, tau [T], where its state is and the norm that follows, it gives
    the next x, what that norm makes of it (x itself without one), and both terms of what x would be without the last
    convolution.
    """

    attn_norm: RmsNorm
    attention: Attention
    attn_conv: ShortConv
    mlp_norm: RmsNorm
    mlp: DenseMlp | MoeMlp
    mlp_conv: ShortConv

    def __call__(
        self, x: Tensor, normed: Tensor, tau: Tensor, index: StepIndex, state: BlockState, next_norm: RmsNorm | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        kv_rows, attn_rows, mlp_rows = state.streams
        attention = AttentionState(state.kv, kv_rows, index.conv, index.kv[state.group], index.attn[state.group])
        attended = self.attention(normed, tau, attention)
        x, normed = self.attn_conv.normed(attended, attn_rows, index.conv, x, self.mlp_norm)
        mixed = self.mlp(normed, index.num_tokens)
        y, normed = self.mlp_conv.normed(mixed, mlp_rows, index.conv, x, next_norm)
        return y, normed, (x, mixed)


@dataclass(frozen=True, slots=True)
class BlockState:
    """Where a block keeps its state: its pages, the number of their group in the step's index, and its three conv streams."""

    kv: KvPool
    group: int
    streams: tuple[ConvPool, ...]


@dataclass(frozen=True, slots=True)
class InklingParts:
    """All weights in their layers. `linear_shapes`: (N, K) of every linear map; `num_parameters`: elements in use."""

    embedding: Embedding
    embed_norm: RmsNorm
    layers: Sequence[InklingLayer]
    norm: RmsNorm
    head: Linear
    linear_shapes: frozenset[tuple[int, int]]
    num_parameters: int


class InklingModel:
    """A `CausalLM`. Page groups are numbered by their first layer; conv streams are kv, attn, mlp of each layer in turn.

    `taps` are layers whose residual stream is wanted too, as it is before the MLP's convolution is added: that is what
    published drafters for this architecture were trained on.
    """

    def __init__(
        self,
        config: InklingConfig,
        parts: InklingParts,
        kernels: KernelSet,
        device: torch.device,
        taps: Sequence[int] = (),
    ) -> None:
        self.config = config
        self._kernels = kernels
        self._taps = tuple(taps)
        self.vocab_size = config.unpadded_vocab_size
        self.max_length = config.model_max_length
        self.num_parameters = parts.num_parameters
        self._parts = parts
        self._mup = config.logits_mup_width_multiplier
        self._layout = state_layout(config, kernels.element)
        self._places = block_places(config.is_window)
        self._scaling = scaling_table(config).to(device)

    def state_layout(self) -> StateLayout:
        """What a request keeps: K and V of every layer and three conv streams a layer."""
        return self._layout

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(N, K) of every linear map."""
        return set(self._parts.linear_shapes)

    def forward(self, index: StepIndex, pools: PoolPart) -> Hidden:
        """`final` is after the final norm, not yet divided by the muP multiplier. Writes K, V and conv rows."""
        layers = self._parts.layers
        next_norms = [*(layer.attn_norm for layer in layers[1:]), self._parts.norm]
        x = self.embedded(index.token_ids)
        normed = layers[0].attn_norm(x)
        scaling = Scaling(self._scaling, index.positions)
        taps: dict[int, tuple[Tensor, Tensor]] = {}
        for i, layer in enumerate(layers):
            tau, state = scaling.of(self.config.is_window[i]), block_state(pools, self._places, i)
            x, normed, parts = layer(x, normed, tau, index, state, next_norms[i])
            if i in self._taps:
                taps[i] = parts
        return Hidden(normed, tuple(taps[i] for i in self._taps))

    def embedded(self, token_ids: Tensor) -> Tensor:
        """What the first layer takes for token ids [T] int32: [T, H] fp32, normalised."""
        return self._parts.embed_norm(self.embedding_rows(token_ids))

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the embedding table, padding rows too, as they are stored: [T, H] fp32 for ids [T] int32."""
        return self._parts.embedding(token_ids)

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """[L, V] fp32 over the true vocabulary for `rows` [L] int64 of final hidden states [T, H], or for all of them."""
        scaled = hidden / self._mup if rows is None else self._kernels.take_rows(hidden, rows, self._mup)
        return self._parts.head(scaled)


def state_layout(config: InklingConfig, element: Element) -> StateLayout:
    """Page groups and conv streams of the model, of numbers of one kind."""
    full = KvLayer(config.num_key_value_heads, config.head_dim)
    window = KvLayer(config.swa_num_key_value_heads, config.swa_head_dim)
    groups = tuple(
        PageGroup(
            window=config.sliding_window_size if is_window else None,
            layers=tuple(window if w else full for w in config.is_window if w == is_window),
        )
        for is_window in dict.fromkeys(config.is_window)
    )
    streams = []
    for i, is_window in enumerate(config.is_window):
        kv = window if is_window else full
        widths = (2 * kv.num_kv_heads * kv.head_dim, config.hidden_size, config.hidden_size)
        streams += [ConvStream(f"layers.{i}.{name}", width) for name, width in zip(STREAMS, widths, strict=True)]
    return StateLayout(groups, tuple(streams), config.sconv_kernel_size, element)


def log_scaling(config: InklingConfig) -> Tensor:
    """The factor tau [max_length] fp32 of full layers: 1 + alpha ln(max((position + 1) / n_floor, 1)); all ones without a floor.

    A table, because a vectorised logarithm may round differently depending on where in a tensor its operand lies.
    """
    tau = torch.ones(config.model_max_length)
    floor = config.log_scaling_n_floor
    if floor is not None and floor < config.model_max_length:
        scaled = range(floor, config.model_max_length)
        tau[floor:] = torch.tensor([1 + config.log_scaling_alpha * math.log((p + 1) / floor) for p in scaled])
    return tau


def scaling_table(config: InklingConfig) -> Tensor:
    """[2, max_length] fp32: ones, for windows, and the factors of full layers."""
    tau = log_scaling(config)
    return torch.stack([torch.ones_like(tau), tau])


class Scaling:
    """The factors of a step's scores: those of `scaling_table` at `positions` [T], for full layers and for windows."""

    def __init__(self, table: Tensor, positions: Tensor) -> None:
        # Not an `index_select`, which on a GPU walks few indices one after the other.
        self._none, self._full = table.gather(1, positions.expand(2, -1)).unbind()

    def of(self, is_window: bool) -> Tensor:
        """[T] fp32 for layers of a kind."""
        return self._none if is_window else self._full


def block_state(pools: PoolPart, places: Sequence[tuple[int, int]], layer: int, other_streams: int = 0) -> BlockState:
    """Where block `layer` keeps its state, if each block's streams stand behind `other_streams` of its own kind."""
    group, place = places[layer]
    first = (len(STREAMS) + other_streams) * layer + other_streams
    return BlockState(pools.kv[group][place], pools.groups[group], pools.conv[first : first + len(STREAMS)])


def block_places(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """(page group, place in the group) of each layer, when layers of a kind share a group."""
    groups = list(dict.fromkeys(kinds))
    return [(groups.index(kind), list(kinds[:i]).count(kind)) for i, kind in enumerate(kinds)]
