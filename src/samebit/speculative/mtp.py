"""Inkling's own draft heads (multi-token prediction) as a drafter: a chain of small networks over the target's hidden states.

Row u of depth i joins token u with the hidden state before it, of depth i - 1 or, for depth 0, of the target; it predicts token
u + 1 without the target having seen the last i + 1 tokens. Every depth's row is thus an ordinary row at its token's position, and
keeps its keys, its convolutions' inputs and the hidden states that it shifts by one. Structure and norms are those of the
published checkpoints. Knows the target's embedding and head; no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.drafting import NO_BLOCK, DraftSteps
from samebit.indexing import StepIndex
from samebit.kernels.sets import KernelSet
from samebit.layers.linear import Linear
from samebit.layers.norm import RmsNorm
from samebit.models.hidden import Hidden
from samebit.models.inkling import (
    InklingLayer,
    InklingModel,
    Scaling,
    block_places,
    block_state,
    scaling_table,
    state_layout,
)
from samebit.models.inkling_config import InklingConfig
from samebit.models.inkling_weights import WeightBuilder
from samebit.speculative.drafter import Proposals
from samebit.state.layout import ConvStream, StateLayout
from samebit.state.pools import PoolPart

_OWN_STREAMS = 1


@dataclass(frozen=True, slots=True)
class MtpDepth:
    """`input_proj` maps the normalised hidden state before a token, then its normalised embedding, [T, 2H], to `block`'s input."""

    hidden_norm: RmsNorm
    embed_norm: RmsNorm
    input_proj: Linear
    block: InklingLayer


class MtpDrafter:
    """A `Drafter` of as many tokens as `depths`. `config` describes these as layers; `chain_norm` stands between them, if there is one."""

    def __init__(
        self,
        config: InklingConfig,
        depths: Sequence[MtpDepth],
        chain_norm: RmsNorm | None,
        target: InklingModel,
        kernels: KernelSet,
        builder: WeightBuilder,
        device: torch.device,
    ) -> None:
        self.max_drafts, self.block = len(depths), NO_BLOCK
        self.num_parameters = builder.num_parameters
        self._linear_shapes = builder.linear_shapes
        self._config, self._depths, self._chain_norm = config, depths, chain_norm
        self._target, self._kernels = target, kernels
        self._places = block_places(config.is_window)
        self._scaling = scaling_table(config).to(device)
        self._width = config.hidden_size

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(N, K) of every linear map."""
        return set(self._linear_shapes)

    def state_layout(self) -> StateLayout:
        """The depths' keys and convolutions, and one stream a depth for the hidden states before its rows."""
        layout = state_layout(self._config, self._target.state_layout().element)
        streams: list[ConvStream] = []
        per_block = len(layout.streams) // self.max_drafts
        for i in range(self.max_drafts):
            streams.append(ConvStream(f"mtp.{i}.before", self._width))
            block = layout.streams[per_block * i : per_block * (i + 1)]
            streams += [ConvStream(f"mtp.{i}.{stream.name.rpartition('.')[2]}", stream.width) for stream in block]
        return StateLayout(layout.groups, tuple(streams), layout.kernel_size, layout.element)

    def advance(self, index: StepIndex, hidden: Hidden, state: PoolPart) -> None:
        """Run all depths over the step's tokens."""
        self._run(index, hidden.final, 0, state)

    def propose(self, steps: DraftSteps, state: PoolPart) -> Proposals:
        """One guess a depth: the row of the last token goes through all of them, that of each guess through the later ones."""
        token_ids, tokens = steps.last_tokens, []
        # The hidden state of a token that the target has not run: nothing reads it before it is overwritten.
        unknown = torch.zeros(steps.num_rows, self._width, device=token_ids.device)
        for ahead in range(self.max_drafts):
            index = steps.at(self._kernels, ahead, token_ids)
            hidden = self._run(index, unknown, ahead, state)
            token_ids = self._kernels.draw(self._target.logits(hidden), steps.columns(ahead + 1))
            tokens.append(token_ids)
        return Proposals(torch.stack(tokens, dim=1), steps.no_opinion)

    def _run(self, index: StepIndex, hidden: Tensor, first: int, state: PoolPart) -> Tensor:
        """The step's tokens through depths `first` on, of which the first takes `hidden` [T, H]; that depth's own hidden states."""
        embedded = self._target.embedded(index.token_ids)
        scaling = Scaling(self._scaling, index.positions)
        found = hidden
        for i in range(first, self.max_drafts):
            depth = self._depths[i]
            place = block_state(state, self._places, i, _OWN_STREAMS)
            kept = state.conv[(len(place.streams) + _OWN_STREAMS) * i]
            before = self._kernels.shift(hidden, kept.rows, kept.row_tags, index.conv)
            joined = torch.cat([depth.hidden_norm(before), depth.embed_norm(embedded)], dim=1)
            tau = scaling.of(self._config.is_window[i])
            x = depth.input_proj(joined)
            _, hidden, _ = depth.block(x, depth.block.attn_norm(x), tau, index, place, self._chain_norm)
            found = hidden if i == first else found
        return found
