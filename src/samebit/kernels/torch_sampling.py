"""Sampling in plain torch: filters, Gumbel noise, log-probabilities. Knows nothing of requests or stop rules."""

import torch
from torch import Tensor

from samebit.kernels import exact
from samebit.kernels.noise import gumbel_noise


def log_softmax(logits: Tensor) -> Tensor:
    """fp32 log-softmax over the last axis."""
    shifted = logits - logits.amax(-1, keepdim=True)
    total = exact.sum_last(torch.exp(shifted), logits.shape[-1].bit_length())
    return shifted - torch.log(total).to(torch.float32)


def _kept(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens the filters leave, bool [L, V]; always at least the most likely one."""
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    vocab = scaled.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    likelihood = torch.exp(ordered - ordered[:, :1])
    inside = torch.arange(vocab)[None] < limit
    mass = torch.where(inside, likelihood, 0.0).to(torch.float64).cumsum(-1)
    needed = top_p[:, None].to(torch.float64) * mass[:, -1:]
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
    inside &= (before < needed) | (top_p[:, None] >= 1)
    inside &= likelihood >= min_p[:, None]
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter(1, order, inside)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    target: Tensor,
    threads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    finite = torch.isfinite(logits).all(-1)
    safe = torch.where(finite[:, None], logits, 0.0)
    greedy = temperature <= 0
    scaled = safe / torch.where(greedy, 1.0, temperature)[:, None]
    kept = _kept(scaled, top_k, top_p, min_p)
    noisy = scaled + gumbel_noise(seed, sample_index, position, logits.shape[1])
    drawn = noisy.masked_fill(~kept, -torch.inf)
    scores = torch.where(greedy[:, None], safe, drawn)
    # A stable sort, not argmax: argmax does not promise the lowest id among equals.
    token = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, 0]
    token = torch.where(finite, torch.where(target >= 0, target, token), 0).to(torch.int64)[:, None]
    chosen = safe.gather(1, token)
    ahead = (safe > chosen) | ((safe == chosen) & (torch.arange(logits.shape[1])[None] < token))
    ranks = 1 + ahead.sum(-1)
    logprobs = log_softmax(safe).gather(1, token)
    return token[:, 0].to(torch.int32), logprobs[:, 0], ranks.to(torch.int32), finite


def top_logprobs(logits: Tensor, n: int, threads: int) -> tuple[Tensor, Tensor]:
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :n]
    return ids.to(torch.int32), log_softmax(logits).gather(1, ids)
