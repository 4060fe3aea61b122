"""The tokenizer of a corpus, and the corpus as streams of token ids in a folder.

A byte-level BPE with Inkling's message tokens as its first ids. Streams are uint16, compressed; every document begins with
`<|endoftext|>`. Knows texts and tokens, no model.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from samebit.core.errors import ConfigError
from samebit.models.checkpoint import read_json
from samebit.train.corpus import Corpus, Package

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>",
    "<|content_model_end_sampling|>", "<|content_thinking|>", "<|end_message|>", "<|content_invoke_tool_json|>",
    "<|content_xml|>", "<|content_tool_error|>", "<|unused_0|>", "<|unused_1|>", "<|unused_2|>", "<|unused_3|>",
)  # fmt: skip
DOCUMENT_START = 0
VOCAB_SIZE = 4096

# Digits one by one, so that numbers are recalled and not guessed; an indent is a token with its line break.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n[ ]*(?=[^\s])|\s*[\r\n]+|\s+(?!\S)|\s+"
_LONGEST_TOKEN = 24
_SAMPLE_SHARE = 40 / 256
_BATCH = 512
# Units of two bytes, and a window that spans most of a stream.
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 27, "lc": 3, "lp": 1, "pb": 1},
]
# A string that begins a line is nearly always one; parsing all files would take minutes.
_DOCSTRING = re.compile(r'^ *[rR]?"""(.*?)"""', re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)\s+|\n\s*\n")
_SENTENCE = re.compile(r"(?!.*--)[A-Z][A-Za-z0-9 ,.'()`-]*[.]")

TokenStream = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A prepared corpus. `sentences`: prose from docstrings; `bytes_per_token`: of the held-out stream."""

    tokenizer: Tokenizer
    train: TokenStream
    held_out: TokenStream
    sentences: list[str]
    bytes_per_token: float


def prepare(
    corpus: Corpus,
    talk: Sequence[str],
    folder: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    max_tokens: int,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Train a tokenizer of `vocab_size` on the corpus and `talk`, unless one is given, and write everything that `load_data` reads.

    At most `max_tokens` training tokens are kept, thinning every package alike by whole files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for package in corpus.train for text in package.texts]
    if tokenizer is None:
        sample = [text for text in texts if _fraction(f"tokenizer: {text}") < _SAMPLE_SHARE] or texts
        tokenizer = train_tokenizer([*sample, *talk], vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    train, train_bytes = _encoded(tokenizer, texts, max_tokens)
    held_out, held_out_bytes = _encoded(tokenizer, [text for package in corpus.held_out for text in package.texts])
    streams = {"train": train, "held_out": held_out}
    for name, stream in streams.items():
        (folder / f"{name}.u16.xz").write_bytes(lzma.compress(stream.tobytes(), filters=_FILTERS))
    (folder / "sentences.txt").write_text("\n".join(sentences(corpus.train)), encoding="utf-8")
    manifest = corpus.manifest() | {
        "vocab_size": tokenizer.get_vocab_size(),
        "train_tokens": len(streams["train"]),
        "held_out_tokens": len(streams["held_out"]),
        "train_bytes_per_token": train_bytes / len(streams["train"]),
        "held_out_bytes_per_token": held_out_bytes / len(streams["held_out"]),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def load_data(folder: Path) -> TrainingData:
    """What `prepare` wrote. Raises CheckpointError or ConfigError if a part is missing."""
    manifest = read_json(folder / "manifest.json")
    try:
        return TrainingData(
            tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
            train=_stream(folder / "train.u16.xz"),
            held_out=_stream(folder / "held_out.u16.xz"),
            sentences=(folder / "sentences.txt").read_text(encoding="utf-8").split("\n"),
            bytes_per_token=float(manifest["held_out_bytes_per_token"]),
        )
    except (OSError, lzma.LZMAError) as error:
        raise ConfigError(f"{folder}: is not a prepared corpus ({error})") from error


def tokenizer_of(model: Path) -> Tokenizer:
    """That of a model's folder. Raises ConfigError without one, or if its first tokens are not those that dialogues are made of."""
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # the library has no kind of its own
        raise ConfigError(f"{model}: has no tokenizer.json that can be read ({error})") from error
    for number, token in enumerate(SPECIAL_TOKENS):
        if tokenizer.token_to_id(token) != number:
            raise ConfigError(
                f"{model}: token {number} of its tokenizer is {tokenizer.id_to_token(number)!r}, not {token!r}"
            )
    if tokenizer.get_vocab_size() > 1 << 16:
        raise ConfigError(
            f"{model}: its tokenizer has {tokenizer.get_vocab_size()} tokens, more than the {1 << 16} of a stream"
        )
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens, the special ones first. Raises ConfigError if the text is too short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_LONGEST_TOKEN,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(f"vocab_size={vocab_size}: the text has only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def sentences(packages: Sequence[Package], most: int = 24_000) -> list[str]:
    """Sentences of docstrings, without repetition, in an order fixed by their hashes, from every package about alike."""
    enough = min(800, 4 * most // max(1, len(packages)))
    found: set[str] = set()
    for package in packages:
        of_package: set[str] = set()
        for text in package.texts:
            for docstring in _DOCSTRING.findall(text):
                parts = (" ".join(part.split()) for part in _SENTENCE_END.split(docstring))
                of_package.update(
                    p for p in parts if 45 <= len(p) <= 170 and p.count(" ") > 5 and _SENTENCE.fullmatch(p)
                )
            if len(of_package) >= enough:
                break
        found |= of_package
    return sorted(found, key=_fraction)[:most]


def _encoded(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: float = math.inf) -> tuple[TokenStream, int]:
    """Texts, each after a start token, and their bytes: as many as fit, taken by their hashes, in the order given."""
    order = sorted(range(len(texts)), key=lambda i: _fraction(f"keep: {texts[i]}"))
    parts: dict[int, TokenStream] = {}
    total = num_bytes = 0
    for first in range(0, len(order), _BATCH):
        batch = order[first : first + _BATCH]
        encodings = tokenizer.encode_batch([texts[i] for i in batch], add_special_tokens=False)
        for i, encoding in zip(batch, encodings, strict=True):
            total += 1 + len(encoding.ids)
            if total > max_tokens:
                break
            parts[i] = np.array([DOCUMENT_START, *encoding.ids], dtype=np.uint16)
            num_bytes += len(texts[i].encode())
        if total > max_tokens:
            break
    return np.concatenate([parts[i] for i in sorted(parts)]), num_bytes


def _stream(path: Path) -> TokenStream:
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)


def _fraction(text: str) -> float:
    """A number in [0, 1) that is a function of the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
