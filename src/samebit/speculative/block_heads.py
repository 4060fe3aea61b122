"""Heads of DSpark over a block's hidden states: one that goes from token to token, and one that tells how sure the drafter is.

Formulas are those of the DeepSpec and SpecForge code bases. Knows hidden states and token ids; no block, no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.layers.linear import Embedding, Linear

MarkovMix = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the table's rows [P, R] for the tokens before, hidden states and the state: what the rows become, and the next state."""


def vanilla(row: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The row as it is: a bigram table of low rank."""
    del hidden
    return row, state


@dataclass(frozen=True, slots=True)
class Gated:
    """The row times sigmoid(gate [hidden; row] + bias); the bias is in double."""

    gate: Linear
    bias: Tensor

    def __call__(self, row: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return _sigmoid(self.gate(torch.cat([hidden, row], dim=1)) + self.bias) * row, state


@dataclass(frozen=True, slots=True)
class Recurrent:
    """tanh(o) with z, c, o = joint [state; row; hidden] + bias; the state becomes sigmoid(z) state + (1 - sigmoid(z)) tanh(c).

    The bias is in double.
    """

    joint: Linear
    bias: Tensor

    def __call__(self, row: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        z, c, o = (self.joint(torch.cat([state, row, hidden], dim=1)) + self.bias).chunk(3, dim=1)
        keep = _sigmoid(z)
        return _tanh(o), keep * state + (1 - keep) * _tanh(c)


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """What the token before, [P] int32, adds to the logits [P, V] of a guess. `rows` [V, R] is its table, `out` maps R to V.

    `zeros` [R] fp32 are a state before the first guess.
    """

    rows: Embedding
    mix: MarkovMix
    out: Linear
    zeros: Tensor

    def start(self, num_rows: int) -> Tensor:
        """The state before the first guess."""
        return self.zeros.expand(num_rows, -1)

    def __call__(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        mixed, state = self.mix(self.rows(before), hidden, state)
        return self.out(mixed), state


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """How likely the target draws a guess, if it draws those before it: sigmoid((proj [hidden; row] + bias) / temperature).

    `rows` is the Markov head's table, if its row for the token before is part of the input. `scale` and `shift` [D, 1] in double are
    1 / temperature and bias / temperature of each guess; temperatures are 1 where nobody calibrated them.
    """

    proj: Linear
    rows: Embedding | None
    scale: Tensor
    shift: Tensor

    def __call__(self, before: Tensor, hidden: Tensor) -> Tensor:
        """[D, P] fp32 for the tokens `before` each guess [D, P] int32 and hidden states [D, P, H]."""
        inputs, part = hidden.flatten(0, 1), slice(before.shape[0])
        if self.rows is not None:
            inputs = torch.cat([inputs, self.rows(before.flatten())], dim=1)
        return _sigmoid(torch.addcmul(self.shift[part], self.proj(inputs).view(before.shape), self.scale[part]))


def _sigmoid(x: Tensor) -> Tensor:
    """Of values in double, so that where a library takes vectors and where single elements rounds away: fp32."""
    assert x.dtype is torch.float64, x.dtype
    return torch.sigmoid(x, out=torch.empty(x.shape, dtype=torch.float32, device=x.device))


def _tanh(x: Tensor) -> Tensor:
    assert x.dtype is torch.float64, x.dtype
    return torch.tanh(x, out=torch.empty(x.shape, dtype=torch.float32, device=x.device))
