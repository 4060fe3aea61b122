"""The hash model spelled out in plain integers, one token after the other: the oracle. Shares no code with the engine.

See samebit/models/hash.py for the formulas.
"""

from __future__ import annotations

A, B, M = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD
WORD = (1 << 64) - 1


def mix(x: int) -> int:
    x &= WORD
    z = (x ^ (x >> 33)) * M & WORD
    return z ^ (z >> 29)


class ColdModel:
    """`past[n]` is what mixer n has taken in at each position: words for "conv", (k, v) for attention."""

    def __init__(self, mixers: list, kernel_size: int, vocab_size: int) -> None:
        self.mixers, self.kernel_size, self.vocab_size = mixers, kernel_size, vocab_size
        self.past: list[list] = [[] for _ in mixers]
        self.num_tokens = 0
        self.word = 0

    def feed(self, token: int) -> None:
        """Take in one more token."""
        x = mix(token * A + self.num_tokens * B)
        self.num_tokens += 1
        for number, (mixer, past) in enumerate(zip(self.mixers, self.past, strict=True), start=1):
            if mixer == "conv":
                past.append(x)
                padded = [0] * self.kernel_size + past
                total = sum(word * (2 * j + 1) for j, word in enumerate(padded[-self.kernel_size :]))
            else:
                past.append((mix(x + A), mix(x + B)))
                first = 0 if mixer == "full" else max(0, self.num_tokens - mixer)
                total = x + B * sum((past[s][0] * A + past[s][1]) * (2 * s + 1) for s in range(first, self.num_tokens))
            x = mix(number * A + total)
        self.word = x

    def logits(self) -> list[float]:
        """Of the token after those taken in."""
        return [(mix(mix(self.word + v * A)) >> 40) / (1 << 20) for v in range(self.vocab_size)]


def greedy(model: ColdModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens after `prompt`, ties to the lower id."""
    for token in prompt:
        model.feed(token)
    tokens: list[int] = []
    for _ in range(count):
        logits = model.logits()
        tokens.append(logits.index(max(logits)))
        model.feed(tokens[-1])
    return tokens
