"""Block drafters (DFlash, arXiv 2602.06036, and DSpark): all guesses of a row in one pass, over keys made of the target's layers.

A block is the last token and mask tokens behind it. Its rows see one another and, in every layer, keys and values that are plain
projections of the target's residual streams: the drafter's state at a position depends on the target's there and on nothing
else. Knows the target's embedding and head; no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.drafting import DraftBlock, DraftSteps
from samebit.indexing import StepIndex
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import BlockIndex, SampleColumns, Turn
from samebit.layers.linear import Linear
from samebit.layers.norm import RmsNorm
from samebit.layers.rotary import Rotary
from samebit.models.hidden import Hidden
from samebit.models.inkling import InklingModel, block_places
from samebit.speculative.block_config import BlockConfig
from samebit.speculative.block_heads import ConfidenceHead, MarkovHead
from samebit.speculative.drafter import Proposals
from samebit.state.layout import KvLayer, PageGroup, StateLayout
from samebit.state.pools import KvPool, PoolPart


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)). `qkv` maps to queries, keys and values side by side, `gate_up`
    to the terms of a gated activation.

    `window` 0: none. Heads of queries and keys are normalised, with gains [nh + nk, hd], then turned.
    """

    kernels: KernelSet
    attn_norm: RmsNorm
    qkv: Linear
    out: Linear
    head_gains: Tensor
    k_norm: RmsNorm
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear
    num_heads: int
    window: int
    is_causal: bool

    def __call__(self, x: Tensor, fused: Tensor, turn: Turn, pool: KvPool, index: BlockIndex) -> tuple[Tensor, Tensor]:
        """Block rows `x` [P * N, H] behind what `pool` holds for them, and their `qkv`: both terms of the next `x`."""
        width, num_turned = self.head_gains.shape[1], self.head_gains.numel()
        turned = self.kernels.turn_heads(fused[:, :num_turned], self.head_gains, self.k_norm.eps, turn)
        q, k = turned.tensor_split([self.num_heads * width], dim=1)
        attended = self.kernels.block_attention(
            q, k, fused[:, num_turned:], pool.k, pool.v, index, self.window, width**-0.5, is_causal=self.is_causal
        )
        x, activated = self.gate_up.of_norm(self.mlp_norm, x, self.out(attended), is_gated=True)
        return x, self.down(activated)


@dataclass(frozen=True, slots=True)
class BlockParts:
    """All weights in their layers; see BlockConfig for the heads.

    `fc` maps the target's residual streams side by side to H, and `kv` the norm of that to each layer's keys and values in turn,
    by weights that the layers' `qkv` hold as well.
    """

    fc: Linear
    hidden_norm: RmsNorm
    kv: Linear
    layers: Sequence[BlockLayer]
    norm: RmsNorm
    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    linear_shapes: frozenset[tuple[int, int]]
    num_parameters: int


class BlockDrafter:
    """A `Drafter` of `max_drafts` tokens, at most those of a whole block. A target made with other taps than the config's is an error."""

    def __init__(
        self,
        config: BlockConfig,
        parts: BlockParts,
        max_drafts: int,
        target: InklingModel,
        kernels: KernelSet,
        device: torch.device,
    ) -> None:
        assert max_drafts <= config.num_drafts, "a block has so many rows"
        self.max_drafts = max_drafts
        self.num_parameters = parts.num_parameters
        self._config, self._parts = config, parts
        self._target, self._kernels = target, kernels
        first = config.first_draft_row
        self.block = DraftBlock(max_drafts + first, first, config.mask_token_id)
        self._rotary = Rotary(config.head_dim, config.rope_theta, target.max_length + config.num_rows, device)
        self._places = block_places(config.windows)

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(N, K) of every linear map."""
        return set(self._parts.linear_shapes)

    def state_layout(self) -> StateLayout:
        """Keys and values of every layer; the target's kernel size and element, as there is no convolution."""
        config, target = self._config, self._target.state_layout()
        each = KvLayer(config.num_key_value_heads, config.head_dim)
        counts = Counter(config.windows)
        groups = tuple(PageGroup(window or None, (each,) * count) for window, count in counts.items())
        return StateLayout(groups, (), target.kernel_size, target.element)

    def advance(self, index: StepIndex, hidden: Hidden, state: PoolPart) -> None:
        """Project the target's residual streams to every layer's keys and values."""
        parts = self._parts
        streams, mixed = zip(*hidden.taps, strict=True)
        context = parts.hidden_norm(parts.fc(self._kernels.joined_sums(list(streams), list(mixed))))
        turn = self._rotary.at(index.positions)
        for i, layer_kv in enumerate(parts.kv(context).chunk(len(parts.layers), dim=1)):
            (pool, group), norm = self._place(i, state), parts.layers[i].k_norm
            k, v = layer_kv.chunk(2, dim=1)
            gains, nothing = (norm.gain, norm.gain), k[:, :0]
            ix, tags = index.kv[group], pool.page_tags
            self._kernels.write_heads(nothing, k, v, gains, norm.eps, pool.k, pool.v, tags, ix, turn)

    def propose(self, steps: DraftSteps, state: PoolPart) -> Proposals:
        """One pass over a block for each row, then the heads."""
        hidden = self.block_hidden(steps, state)
        logits, columns = self._target.logits(hidden.flatten(0, 1), steps.guess_rows), steps.columns(1, self.max_drafts)
        by_guess = hidden[:, self.block.first_guess :].transpose(0, 1)
        if self._parts.markov is None:
            # Nothing asks for the tokens before: the confidence head looks them up in the Markov head's table.
            tokens = before = self._kernels.draw(logits, columns).view(by_guess.shape[:2])
        else:
            by_guess = by_guess.contiguous()
            drawn = self._drawn_in_turn(self._parts.markov, by_guess, logits, steps.last_tokens, columns)
            before, tokens = drawn[:-1], drawn[1:]
        if self._parts.confidence is None:
            return Proposals(tokens.T, steps.no_opinion)
        return Proposals(tokens.T, self._parts.confidence(before, by_guess).T)

    def block_hidden(self, steps: DraftSteps, state: PoolPart) -> Tensor:
        """[P, N, H] fp32 after the final norm, for the last token of each row and the masks behind it."""
        config, parts = self._config, self._parts
        turn = self._rotary.at(steps.block_positions)
        x = self._target.embedding_rows(steps.block_tokens)
        if config.input_embedding_scale != 1:
            x = x * config.input_embedding_scale
        fused = parts.layers[0].qkv(parts.layers[0].attn_norm(x))
        for i, (layer, following) in enumerate(zip(parts.layers, [*parts.layers[1:], None], strict=True)):
            pool, group = self._place(i, state)
            x, added = layer(x, fused, turn, pool, steps.behind(group))
            if following is not None:
                x, fused = following.qkv.of_norm(following.attn_norm, x, added)
        return parts.norm.after_adding(x, added)[1].view(steps.num_rows, self.block.num_tokens, -1)

    def _drawn_in_turn(
        self, markov: MarkovHead, hidden: Tensor, logits: Tensor, last_tokens: Tensor, columns: SampleColumns
    ) -> Tensor:
        """[1 + D, P]: the last tokens, then guesses from left to right, each with what the one before adds to its logits, for `hidden` [D, P, H]."""
        past, tokens, num_rows = markov.start(last_tokens.shape[0]), [last_tokens], last_tokens.shape[0]
        for k in range(self.max_drafts):
            rows = slice(k * num_rows, (k + 1) * num_rows)
            added, past = markov(tokens[-1], hidden[k], past)
            tokens.append(self._kernels.draw(logits[rows] + added, columns.part(rows)))
        return torch.stack(tokens)

    def _place(self, layer: int, state: PoolPart) -> tuple[KvPool, int]:
        """Where a layer keeps its keys, and the number of their group in a step's index."""
        group, place = self._places[layer]
        return state.kv[group][place], state.groups[group]
