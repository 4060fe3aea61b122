"""Logprobs in the shapes that OpenAI's and vLLM's clients read. Knows tokens; does not know where answers begin or end."""

import codecs
from collections.abc import Sequence

from samebit.core.request import TokenLogprobs
from samebit.engine.tokenizer import Tokenizer
from samebit.server.response_models import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprobs,
)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """The tokens of an answer, or of a piece of it, in the chat shape."""

    def shape(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(tokenizer.token_text(token_id), logprob, list(tokenizer.token_bytes(token_id)))

    content = []
    for item in tokens:
        own = shape(item.token_id, item.logprob)
        tops = [shape(*pair) for pair in zip(item.top_ids, item.top_logprobs, strict=True)]
        content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, tops))
    return ChatLogprobs(content)


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Logprobs of a prompt in vLLM's shape: by token id, the chosen one always among them; None for the first token."""
    result: PromptLogprobs = [None]
    for item in tokens:
        tops = zip(item.top_ids, item.top_logprobs, strict=True)
        entry = {
            str(token_id): PromptLogprob(logprob, rank, tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(tops, start=1)
        }
        own = PromptLogprob(item.logprob, item.rank, tokenizer.token_text(item.token_id))
        result.append({**entry, str(item.token_id): own})
    return result


class LegacyLogprobs:
    """Builds the completions shape piece by piece; owned by one choice. `offset`: characters before its first token."""

    def __init__(self, tokenizer: Tokenizer, *, skips_special: bool, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skips_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def prompt(self, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """A prompt's tokens. `tokens` begins at the second one, because the first has no logprob."""
        first = self._name(token_ids[0])
        offset = self._advance(token_ids[0])
        rest = self.answer(tokens)
        return CompletionLogprobs(
            [first, *rest.tokens],
            [None, *rest.token_logprobs],
            [None, *rest.top_logprobs],
            [offset, *rest.text_offset],
        )

    def answer(self, tokens: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The next tokens."""
        return CompletionLogprobs(
            [self._name(item.token_id) for item in tokens],
            [item.logprob for item in tokens],
            [self._tops(item) for item in tokens],
            [self._advance(item.token_id) for item in tokens],
        )

    def _tops(self, item: TokenLogprobs) -> TopLogprobs:
        tops: TopLogprobs = {}
        for token_id, logprob in zip(item.top_ids, item.top_logprobs, strict=True):
            tops.setdefault(self._name(token_id), logprob)
        tops.setdefault(self._name(item.token_id), item.logprob)
        return tops

    def _name(self, token_id: int) -> str:
        """A token's text, or `bytes:` and its bytes where it is not text by itself: names must tell tokens apart."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _advance(self, token_id: int) -> int:
        """Where the token begins, in characters that were certain before it."""
        offset = self._offset
        if token_id not in self._skipped:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return offset


def join(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Two pieces in a row as one."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
