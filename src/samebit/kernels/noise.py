"""Sampling noise as a function of counters: Philox4x32-10 (Salmon et al., 2011) in integer tensor arithmetic.

Knows nothing of logits. The formula from words to Gumbel noise is part of the public contract of sampling.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds over int64 tensors that hold 32-bit words (broadcast together); returns the four output words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(seed: Tensor, sample_index: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [L, vocab] fp32 for every token of every row.

    key = (low, high 32 bits of ``seed``); counter = (token // 4, position, sample_index, 0), each modulo 2^32; the
    token's word w is word token % 4; u = ((w >> 9) + 0.5) * 2^-23; the noise is -log(-log(u)).
    """
    seed, sample = seed.to(torch.int64)[:, None], sample_index.to(torch.int64)[:, None] & _MASK
    place = position.to(torch.int64)[:, None] & _MASK
    group = torch.arange((vocab + 3) // 4, dtype=torch.int64)[None]
    words = philox((seed & _MASK, (seed >> 32) & _MASK), (group, place, sample, torch.zeros_like(group)))
    word = torch.stack(words, -1).flatten(1)[:, :vocab]
    uniform = ((word >> 9).to(torch.float64) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform)).to(torch.float32)
