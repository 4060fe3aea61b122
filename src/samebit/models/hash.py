"""A model whose state is exact: every layer folds its inputs into 64-bit words, so that one wrong word changes the answer.

It has the same kinds of state as real architectures (paged keys and values with and without a window, short-convolution
streams) and no weights, and it is served like any of them. It serves to prove the engine, not to write text.

All arithmetic is on 64-bit words, modulo 2^64; `>>>` shifts in zeros. With `mix(x) = z ^ z >>> 29` where
`z = (x ^ x >>> 33) * M` (the multiplication and shifts are those of MurmurHash3's finaliser, Appleby, 2011):

    embedding   x_t = mix(token_t * A + t * B)
    mixer n     conv:       y_t = mix(n * A + sum over j < K of x_(t-K+1+j) * (2j + 1)), words before position 0 being 0
                attention:  k_t = mix(x_t + A), v_t = mix(x_t + B)
                            y_t = mix(n * A + x_t + B * sum over visible s of (k_s * A + v_s) * (2s + 1))
    logits      logit_v = (mix(mix(x + v * A)) >>> 40) / 2^20

The sum over a window is the difference of two prefix sums; wrapping integers make that exact. Knows no file but its
configuration, no request, and nothing about what kind of step it runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from samebit.core.errors import CheckpointError
from samebit.indexing import StepIndex
from samebit.kernels.values import ConvIndex
from samebit.models.checkpoint import read_json
from samebit.models.hidden import Hidden
from samebit.state.layout import ConvStream, KvLayer, PageGroup, StateLayout
from samebit.state.pools import ConvPool, KvPool, PoolPart

_A = 0x9E3779B97F4A7C15 - (1 << 64)
_B = 0xC2B2AE3D27D4EB4F - (1 << 64)
_M = 0xFF51AFD7ED558CCD - (1 << 64)

Mixer = Literal["conv", "full"] | int


class HashConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mixers` in order: "conv" (a short convolution), "full" (attention) or a window's width (attention).

    `kernel_size` K is that of every convolution.
    """

    mixers: tuple[Mixer, ...]
    kernel_size: int = 4
    vocab_size: int = 256
    max_length: int = 4096
    model_type: Literal["samebit_hash"] = "samebit_hash"

    def validate(self) -> None:
        """Raise CheckpointError naming the first value that is out of range."""
        for name, low in (("kernel_size", 2), ("vocab_size", 2), ("max_length", 2)):
            if getattr(self, name) < low:
                raise CheckpointError(f"{name}={getattr(self, name)}: must be at least {low}")
        windows = [mixer for mixer in self.mixers if mixer != "conv"]
        if not windows:
            raise CheckpointError(f"mixers={list(self.mixers)}: at least one must be attention")
        for window in windows:
            if isinstance(window, int) and window < 1:
                raise CheckpointError(f"mixers: a window of {window}: must be at least 1")

    @property
    def windows(self) -> list[int | None]:
        """Distinct windows, in order of appearance: the page groups."""
        found = dict.fromkeys(mixer for mixer in self.mixers if mixer != "conv")
        return [mixer if isinstance(mixer, int) else None for mixer in found]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a mixer's state is: conv stream `layer` (`group` -1), or `layer` of page group `group`."""

    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class _Sources:
    """Addresses that all streams share. T tokens, B rows, K taps; N = E * (K-1) checkpoint rows and B * (K-1) read rows.

    `row` [T]: batch row of each token. `taps` [T, K]: indices into the read rows followed by the step's words.
    `pool_rows`, `tokens`, `is_pooled`, `expected`, `dest`, `tags` [N]: what is kept of the past, from where, and where.
    """

    row: Tensor
    taps: Tensor
    pool_rows: Tensor
    tokens: Tensor
    is_pooled: Tensor
    expected: Tensor
    dest: Tensor
    tags: Tensor
    write_rows: Tensor


class HashModel:
    """A `CausalLM` over int64 words; hidden rows are [T, 1] int64."""

    num_parameters = 0

    def __init__(self, config: HashConfig, device: torch.device) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_length = config.max_length
        self._places = _places(config)
        self._layout = state_layout(config)
        self._windows = config.windows
        self._weights = torch.arange(config.kernel_size, device=device) * 2 + 1
        self._vocabulary = torch.arange(config.vocab_size, device=device) * _A

    def state_layout(self) -> StateLayout:
        """What a request keeps: one word of K, V or conv input a mixer and position."""
        return self._layout

    def linear_shapes(self) -> set[tuple[int, int]]:
        """None: there are no linear maps."""
        return set()

    def forward(self, index: StepIndex, pools: PoolPart) -> Hidden:
        """`final` is [T, 1] int64 after the last mixer. Writes K, V and conv rows."""
        sources = _sources(index, self._layout.history)
        x = _mix(index.token_ids.long() * _A + index.positions * _B)
        for number, place in enumerate(self._places, start=1):
            if place.group < 0:
                folded = self._convolve(x, pools.conv[place.layer], index.conv, sources)
            else:
                pool, group = pools.kv[place.group][place.layer], pools.groups[place.group]
                folded = self._attend(x, pool, index, group, self._windows[place.group], sources.row)
            x = _mix(folded + _wrapped(number * _A))
        return Hidden(x[:, None])

    def logits(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """[L, V] fp32 for `rows` [L] int64 of final words [T, 1], or all of them: multiples of 2^-20 below 16, all exact."""
        found = hidden if rows is None else hidden.index_select(0, rows)
        words = _mix(_mix(found + self._vocabulary))
        return _shifted(words, 40).float() * 2.0**-20

    def _convolve(self, x: Tensor, pool: ConvPool, index: ConvIndex, sources: _Sources) -> Tensor:
        """Weighted sum of each token's K inputs. Everything is read before anything is written."""
        rows = pool.rows.view(-1)
        found = rows[sources.pool_rows]
        stale = torch.where(sources.is_pooled, pool.row_tags[sources.pool_rows] ^ sources.expected, 0)
        before = found[index.entry_dest.numel() :]
        inputs = torch.cat([before, x])[sources.taps]
        rows.index_copy_(0, sources.dest, torch.where(sources.is_pooled, found, x[sources.tokens]))
        pool.row_tags.index_copy_(0, sources.dest, sources.tags ^ stale)
        # After the past: a long chunk laps the ring.
        rows.index_copy_(0, sources.write_rows, x)
        pool.row_tags.index_copy_(0, sources.write_rows, index.write_tags)
        return (inputs * self._weights).sum(dim=1)

    def _attend(self, x: Tensor, pool: KvPool, index: StepIndex, group: int, window: int | None, row: Tensor) -> Tensor:
        """Each word plus the sum over the keys and values it sees, the step's own included."""
        kv, attn = index.kv[group], index.attn[group]
        slots, size = kv.write_slots.long(), pool.k.shape[2]
        pool.k.view(-1).index_copy_(0, slots, _mix(x + _A))
        pool.v.view(-1).index_copy_(0, slots, _mix(x + _B))
        pool.page_tags.index_copy_(0, kv.stamp_pages.long(), kv.stamp_tags)
        pages = attn.page_table[attn.row_slots]
        keys, values = (t.view(-1, size)[pages].flatten(1) for t in (pool.k, pool.v))
        position = torch.arange(keys.shape[1], device=x.device)
        sums = torch.cumsum((keys * _A + values) * (position * 2 + 1), dim=1)
        seen = sums[row, index.positions]
        if window is not None:
            last_unseen = index.positions - window
            seen = seen - torch.where(last_unseen >= 0, sums[row, last_unseen.clamp(min=0)], 0)
        return x + seen * _B


def load_hash(path: Path, device: torch.device) -> HashModel:
    """The hash model that config.json in folder `path` describes. Raises CheckpointError."""
    try:
        config = msgspec.convert(read_json(path / "config.json"), HashConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    config.validate()
    return HashModel(config, device)


def save_hash(folder: Path, config: HashConfig) -> Path:
    """Write what an engine needs to serve the model: the configuration, and a tokenizer of bytes and control tokens."""
    config.validate()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(config.vocab_size)), encoding="utf-8")
    return folder


def state_layout(config: HashConfig) -> StateLayout:
    """One word wide everywhere."""
    places = _places(config)
    groups = [
        PageGroup(window, (KvLayer(1, 1),) * sum(place.group == g for place in places))
        for g, window in enumerate(config.windows)
    ]
    streams = [ConvStream(f"mixers.{n}", 1) for n, mixer in enumerate(config.mixers) if mixer == "conv"]
    return StateLayout(tuple(groups), tuple(streams), config.kernel_size, "int64")


def _places(config: HashConfig) -> list[_Place]:
    groups = {"conv": -1} | {"full" if w is None else w: g for g, w in enumerate(config.windows)}
    return [_Place(groups[m], config.mixers[:n].count(m)) for n, m in enumerate(config.mixers)]


def _sources(index: StepIndex, history: int) -> _Sources:
    conv = index.conv
    num_rows, num_tokens = conv.read_rows.shape[0], index.token_ids.shape[0]
    number = torch.arange(num_tokens, device=index.token_ids.device)
    # Padding tokens count as the last row's: what they compute goes to the sinks.
    row = torch.searchsorted(conv.query_start[1:].long(), number, right=True).clamp(max=num_rows - 1)
    ahead = (number - conv.query_start[row])[:, None] + torch.arange(-history, 1, device=number.device)
    taps = torch.where(
        ahead >= 0, ahead + conv.query_start[row][:, None] + num_rows * history, (row + 1)[:, None] * history + ahead
    )
    entries, read_rows = conv.entry_sources.long().flatten(), conv.read_rows.long().flatten()
    entry_tags = conv.entry_tag[:, None].expand_as(conv.entry_sources)
    return _Sources(
        row=row,
        taps=taps,
        pool_rows=torch.cat([(-1 - entries).clamp(min=0), read_rows]),
        tokens=torch.cat([entries.clamp(min=0), torch.zeros_like(read_rows)]),
        is_pooled=torch.cat([entries < 0, torch.ones_like(read_rows, dtype=torch.bool)]),
        expected=torch.cat([conv.entry_source_tags.flatten(), conv.read_tags.flatten()]),
        dest=torch.cat([conv.entry_dest.flatten(), conv.store_rows.flatten()]).long(),
        tags=torch.cat([entry_tags.flatten(), conv.store_tags.flatten()]),
        write_rows=conv.write_rows.long(),
    )


def _shifted(x: Tensor, count: int) -> Tensor:
    """`x >>> count`."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _mix(x: Tensor) -> Tensor:
    z = (x ^ _shifted(x, 33)) * _M
    return z ^ _shifted(z, 29)


def _wrapped(word: int) -> int:
    """The signed 64-bit word equal to `word` modulo 2^64."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:  # Any: JSON
    """A tokenizer.json. Ids 0..255 are the bytes, spelled as byte-level BPE spells them; the ids above are control tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": f"<|control_{i}|>", **special} for i in range(256, vocab_size)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {alphabet[b]: b for b in range(256)}, "merges": []},
    }
