"""Text to token ids and back, for byte-level BPE checkpoints.

Knows nothing of requests, chat roles or models, and imports neither torch nor transformers.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from samebit.core.errors import CheckpointError, InvalidRequestError
from samebit.engine.model_source import read_json

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class Tokenizer:
    """The tokenizer of one checkpoint. Immutable after construction, so threads may share it.

    A *special* token is a control token such as an end-of-message marker. Text that merely spells
    one is encoded as ordinary text unless the caller says `allow_special=True`.
    """

    def __init__(self, folder: Path) -> None:
        """Read `tokenizer.json` and, if present, `tokenizer_config.json` from a checkpoint folder.

        Raises CheckpointError if a file is missing or unreadable, or not byte-level BPE.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder}: no tokenizer.json")
        try:
            document = path.read_text(encoding="utf-8")
            self._marked = _Backend.from_str(document)
            self._plain = _Backend.from_str(document)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from error
        if not _is_byte_level(json.loads(document).get("decoder")):
            raise CheckpointError(f"{path}: only byte-level BPE tokenizers are supported")
        self._plain.encode_special_tokens = True
        added = self._marked.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        """Ids of the control tokens."""
        self._bytes_of = _byte_table(self._marked, {i: t.content for i, t in added.items()}, path)
        self.vocab_size: int = len(self._bytes_of)
        """One more than the highest id that has a token."""
        # What the checkpoint puts before plain text: usually nothing or one begin-of-text token.
        self._bos_ids: list[int] = self._marked.encode("").ids
        self.named_tokens: dict[str, str] = _named_tokens(folder / "tokenizer_config.json")
        """Texts of `bos_token`, `eos_token` and so on, as chat templates know them."""

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Token ids of `text`; nothing is put before or after it.

        With `allow_special`, text that spells a control token becomes that token; without, it stays
        text. Raises InvalidRequestError if the text has no UTF-8 form (a lone surrogate).
        """
        check_text(text)
        backend = self._marked if allow_special else self._plain
        # Unlike `encode`, this one lets other threads run meanwhile.
        result: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not allow_special and not self.special_ids.isdisjoint(result):
            # Possible only where a vocabulary lists its control tokens among its ordinary words.
            raise InvalidRequestError("the text spells a control token of this model")
        return result

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt to be continued: `text` as ordinary text, after what the checkpoint puts before it."""
        return [*self._bos_ids, *self.encode(text, allow_special=False)]

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`: their bytes, joined; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; a control token's are its spelling.

        No bytes for an id without a token: a model may have more ids than its tokenizer, and may draw them.
        """
        return (self._bytes_of[token_id] or b"") if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token alone as text, for logprob reports; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary, or None."""
        token_id: int | None = self._marked.token_to_id(token)
        return token_id

    def special_tokens(self) -> dict[str, int]:
        """Spelling and id of every control token."""
        return {self.token_bytes(i).decode("utf-8"): i for i in sorted(self.special_ids)}


def check_text(text: str, param: str | None = None) -> None:
    """Raise InvalidRequestError if `text` holds a lone surrogate, which has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            param=param,
        ) from None


def _is_byte_level(decoder: Any) -> bool:  # Any: a JSON value
    """Whether a tokenizer.json decoder is ByteLevel or a sequence that holds one."""
    if not isinstance(decoder, dict):
        return False
    nested = decoder.get("decoders", [])
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(item) for item in nested)


def _byte_alphabet() -> dict[int, int]:
    """Code point → byte for the alphabet in which byte-level BPE writes its tokens.

    Printable bytes stand for themselves; the others, in order, for U+0100 and up (GPT-2's rule).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {b: b for b in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


def _byte_table(backend: _Backend, added: dict[int, str], path: Path) -> list[bytes | None]:
    """Bytes by token id; None where an id has no token."""
    alphabet = _byte_alphabet()
    vocab = backend.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        if token_id in added:
            table[token_id] = added[token_id].encode("utf-8")
            continue
        try:
            table[token_id] = bytes([alphabet[ord(character)] for character in token])
        except KeyError:
            raise CheckpointError(f"{path}: token {token_id} ({token!r}) is not written in the byte alphabet") from None
    return table


def _named_tokens(path: Path) -> dict[str, str]:
    config = read_json(path)
    values = {name: config.get(name) for name in _NAMED}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
