"""A tokenizer's vocabulary as llguidance takes it. Knows bytes of tokens, no text and no request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The `size` tokens that a model can draw: their bytes (none where an id has no token), control tokens by their spelling.

    `encode`: what a text is usually cut into. Where a grammar leaves one text only, that is how it is written.
    """

    size: int
    token_bytes: Callable[[int], bytes]
    special_tokens: Mapping[str, int]
    encode: Callable[[str], list[int]]

    def free(self) -> str:
        """All tokens but control tokens, as the body of a rule of a grammar."""
        spans, first = [], 0
        for edge in [*sorted(self.special_tokens.values()), self.size]:
            if edge > first:
                spans.append(f"{first}-{edge - 1}")
            first = edge + 1
        return f"<[{','.join(spans)}]>"

    def tokenizer(self) -> LLTokenizer:
        """The library's form of it, with one token more, which stands for the end of every grammar and is never drawn."""
        tokens = [self.token_bytes(token_id) for token_id in range(self.size)]
        return LLTokenizer(_Wrapper(tokens, self.special_tokens.values(), self.encode))  # type: ignore[arg-type]  # taken by its attributes


class _Wrapper:
    """What the library reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Collection[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<|end_of_grammar|>"]
        self.special_token_ids = [*special_ids, self.eos_token_id]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text."""
        return self._encode(text if isinstance(text, str) else text.decode())
