"""The operators of the native sets: tensors in, addresses to C, tensors out.

Checks only what would make C read or write where it must not: dtypes, contiguity, and ids that C reports as out of
range. Index bundles were checked when they were made (values.py). Knows nothing of how sets are chosen.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samebit.kernels.native.build import NativeLibrary
from samebit.kernels.torch_index import acknowledge, index_counts
from samebit.kernels.values import check_dense

_FLOAT = torch.float32
# p: address, l: long, d: double
_SIGNATURES = {
    "step_index": "pppp",
    "accept": "p" * 10 + "l",
    "linear": "ppplllll",
    "rms_norm": "pppllll" + "dl",
    "swiglu": "pplll",
    "short_conv": "p" * 17 + "l" * 7,
    "write_kv": "p" * 8 + "l" * 6,
    "embedding": "pppllll",
    "attention": "p" * 11 + "l" * 12 + "dl",
    "block_attention": "p" * 9 + "l" * 12 + "dl",
    "route": "pppplllld",
    "moe": "p" * 7 + "l" * 7,
    "sample": "p" * 13 + "lll",
    "top_logprobs": "pppllll",
    "num_launches": "",
}
_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_long, "d": ctypes.c_double}


def _function(library: NativeLibrary, name: str) -> Callable[..., int]:
    function = getattr(library.functions, name)
    function.argtypes = [_KINDS[kind] for kind in _SIGNATURES[name]]
    function.restype = ctypes.c_long if name in {"embedding", "moe", "sample", "num_launches"} else None
    found: Callable[..., int] = function
    return found


def _dense(x: Tensor) -> Tensor:
    assert x.dtype is _FLOAT, x.dtype
    return x.contiguous()


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """``x`` [T, C] with dense columns, and how far apart its rows are."""
    assert x.dtype is _FLOAT, x.dtype
    if x.stride(1) != 1:
        x = x.contiguous()
    return x, x.stride(0)


def launch_counter(library: NativeLibrary) -> Callable[[], int]:
    """How many kernels the calling thread has launched."""
    return _function(library, "num_launches")


def make_pack(library: NativeLibrary) -> Callable[[Tensor], Tensor]:
    """The packing function: [..., N, K] to panels [..., N / columns, K, columns], fp32 or bf16."""
    columns = int(library.functions.panel_columns())

    def pack(weight: Tensor) -> Tensor:
        weight = weight if weight.dtype is torch.bfloat16 else weight.to(_FLOAT)
        missing = -weight.shape[-2] % columns
        padded: Tensor = torch.nn.functional.pad(weight, (0, 0, 0, missing))
        panels: Tensor = padded.unflatten(-2, (-1, columns)).mT
        return panels.contiguous()

    return pack


def _row_operators(library: NativeLibrary) -> dict[str, Callable[..., Any]]:
    c_linear, c_norm, c_swiglu = (_function(library, n) for n in ("linear", "rms_norm", "swiglu"))
    c_embedding, c_route = _function(library, "embedding"), _function(library, "route")

    def linear(x: Tensor, weight: Tensor, num_out: int, wide: bool, library: bool, threads: int) -> Tensor:
        x = _dense(x)
        tokens, width = x.shape
        y = torch.empty(tokens, num_out)
        half = weight.dtype is torch.bfloat16
        c_linear(x.data_ptr(), weight.data_ptr(), y.data_ptr(), tokens, num_out, width, half, threads)
        return y

    def rms_norm(x: Tensor, gain: Tensor, eps: float, threads: int) -> Tensor:
        x, stride = _rows(x)
        check_dense(_FLOAT, gain)
        tokens, columns = x.shape
        width = gain.shape[0]
        y = torch.empty(tokens, columns)
        c_norm(
            x.data_ptr(), gain.data_ptr(), y.data_ptr(), tokens, columns // width, width, stride, eps, threads
        )  # fmt: skip
        return y

    def swiglu(z: Tensor, threads: int) -> Tensor:
        z = _dense(z)
        tokens, doubled = z.shape
        y = torch.empty(tokens, doubled // 2)
        c_swiglu(z.data_ptr(), y.data_ptr(), tokens, doubled // 2, threads)
        return y

    def embedding(ids: Tensor, table: Tensor, threads: int) -> Tensor:
        check_dense(torch.int32, ids)
        check_dense(table.dtype, table)
        tokens, (vocab, width) = ids.shape[0], table.shape
        y = torch.empty(tokens, width)
        half = table.dtype is torch.bfloat16
        if c_embedding(ids.data_ptr(), table.data_ptr(), y.data_ptr(), tokens, vocab, width, half):
            raise ValueError(f"a token id is outside 0..{vocab - 1}: {ids.aminmax()}")
        return y

    def route(
        logits: Tensor, bias: Tensor, top_k: int, num_shared: int, scale: float, threads: int
    ) -> tuple[Tensor, Tensor]:
        logits = _dense(logits)
        tokens, routed = logits.shape[0], bias.shape[0]
        ids = torch.empty(tokens, top_k + num_shared, dtype=torch.int32)
        weights = torch.empty(tokens, top_k + num_shared)
        check_dense(_FLOAT, bias)
        c_route(
            logits.data_ptr(), bias.data_ptr(), ids.data_ptr(), weights.data_ptr(),
            tokens, routed, top_k, num_shared, scale,
        )  # fmt: skip
        return ids, weights

    return {
        "linear": linear,
        "rms_norm": rms_norm,
        "swiglu": swiglu,
        "embedding": embedding,
        "route": route,
    }


def _state_operators(library: NativeLibrary) -> dict[str, Callable[..., Any]]:
    c_conv = _function(library, "short_conv")

    def short_conv(
        x: Tensor,
        taps: Tensor,
        rows: Tensor,
        row_tags: Tensor,
        query_start: Tensor,
        read_rows: Tensor,
        read_tags: Tensor,
        store_rows: Tensor,
        store_tags: Tensor,
        write_rows: Tensor,
        write_tags: Tensor,
        entry_sources: Tensor,
        entry_source_tags: Tensor,
        entry_dest: Tensor,
        entry_tag: Tensor,
        residual: Tensor | None,
        threads: int,
    ) -> Tensor:
        index = (
            query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
            entry_sources, entry_source_tags, entry_dest, entry_tag,
        )  # fmt: skip
        return convolve(x, taps, rows, row_tags, index, residual, threads)

    def convolve(
        x: Tensor,
        taps: Tensor | None,
        rows: Tensor,
        row_tags: Tensor,
        index: Sequence[Tensor],
        residual: Tensor | None,
        threads: int,
    ) -> Tensor:
        x, stride = _rows(x)
        check_dense(_FLOAT, rows, *([] if taps is None else [taps]))
        check_dense(torch.int64, row_tags)
        tokens, channels = x.shape
        y = torch.empty(tokens, channels)
        extra = None if residual is None else _dense(residual)
        num_rows, history = index[1].shape
        c_conv(
            x.data_ptr(), None if taps is None else taps.data_ptr(), rows.data_ptr(), row_tags.data_ptr(),
            *[i.data_ptr() for i in index], None if extra is None else extra.data_ptr(), y.data_ptr(),
            tokens, channels, history + 1, num_rows, index[-1].shape[0], stride, threads,
        )  # fmt: skip
        return y

    def shift(
        x: Tensor,
        rows: Tensor,
        row_tags: Tensor,
        query_start: Tensor,
        read_rows: Tensor,
        read_tags: Tensor,
        store_rows: Tensor,
        store_tags: Tensor,
        write_rows: Tensor,
        write_tags: Tensor,
        entry_sources: Tensor,
        entry_source_tags: Tensor,
        entry_dest: Tensor,
        entry_tag: Tensor,
        threads: int,
    ) -> Tensor:
        index = (
            query_start, read_rows, read_tags, store_rows, store_tags, write_rows, write_tags,
            entry_sources, entry_source_tags, entry_dest, entry_tag,
        )  # fmt: skip
        return convolve(x, None, rows, row_tags, index, None, threads)

    return {"short_conv": short_conv, "shift": shift}


def _attention_operators(library: NativeLibrary) -> dict[str, Callable[..., Any]]:
    names = ("write_kv", "attention", "block_attention")
    c_write, c_attention, c_block = (_function(library, name) for name in names)

    def write_kv(
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_tags: Tensor,
        write_slots: Tensor,
        stamp_pages: Tensor,
        stamp_tags: Tensor,
        threads: int,
    ) -> None:
        (k, k_stride), (v, v_stride) = _rows(k), _rows(v)
        check_dense(_FLOAT, k_pages, v_pages)
        check_dense(torch.int64, page_tags)
        _, heads, page, width = k_pages.shape
        c_write(
            k.data_ptr(), v.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), page_tags.data_ptr(),
            write_slots.data_ptr(), stamp_pages.data_ptr(), stamp_tags.data_ptr(), k.shape[0], heads, page, width,
            k_stride, v_stride,
        )  # fmt: skip

    def attention(
        q: Tensor, rel: Tensor, rel_proj: Tensor, tau: Tensor, k_pages: Tensor, v_pages: Tensor, query_start: Tensor,
        row_start: Tensor, row_slots: Tensor, page_table: Tensor, longest: int, window: int, scale: float, threads: int,
    ) -> Tensor:  # fmt: skip
        (q, q_stride), (rel, rel_stride) = _rows(q), _rows(rel)
        check_dense(_FLOAT, rel_proj, tau, k_pages, v_pages)
        tokens, columns = q.shape
        d_rel, extent = rel_proj.shape
        _, kv_heads, page, width = k_pages.shape
        y = torch.empty(tokens, columns)
        c_attention(
            q.data_ptr(), rel.data_ptr(), rel_proj.data_ptr(), tau.data_ptr(), k_pages.data_ptr(),
            v_pages.data_ptr(), query_start.data_ptr(), row_start.data_ptr(), row_slots.data_ptr(),
            page_table.data_ptr(), y.data_ptr(), tokens, row_start.shape[0], columns // width, kv_heads, width, d_rel, extent,
            page, page_table.shape[1], window, q_stride, rel_stride, scale, threads,
        )  # fmt: skip
        return y

    def block_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        lengths: Tensor,
        row_slots: Tensor,
        page_table: Tensor,
        window: int,
        is_causal: bool,
        scale: float,
        threads: int,
    ) -> Tensor:
        (q, q_stride), (k, k_stride), (v, v_stride) = _rows(q), _rows(k), _rows(v)
        check_dense(_FLOAT, k_pages, v_pages)
        (rows, columns), num_blocks = q.shape, lengths.shape[0]
        _, kv_heads, page, width = k_pages.shape
        y = torch.empty(rows, columns)
        c_block(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), k_pages.data_ptr(), v_pages.data_ptr(), lengths.data_ptr(),
            row_slots.data_ptr(), page_table.data_ptr(), y.data_ptr(), num_blocks, rows // max(1, num_blocks), columns // width,
            kv_heads, width, page, page_table.shape[1], window, is_causal, q_stride, k_stride, v_stride, scale, threads,
        )  # fmt: skip
        return y

    return {"write_kv": write_kv, "attention": attention, "block_attention": block_attention}


def _other_operators(library: NativeLibrary) -> dict[str, Callable[..., Any]]:
    c_moe, c_sample, c_top = (_function(library, n) for n in ("moe", "sample", "top_logprobs"))

    def moe(
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        num_tokens: Tensor,
        w13: Tensor,
        w2: Tensor,
        intermediate: int,
        threads: int,
    ) -> Tensor:
        x, weights = _dense(x), _dense(weights)
        check_dense(torch.int32, expert_ids, num_tokens)
        tokens, hidden = x.shape
        y = torch.empty_like(x)
        failed = c_moe(
            x.data_ptr(), expert_ids.data_ptr(), weights.data_ptr(), num_tokens.data_ptr(), w13.data_ptr(),
            w2.data_ptr(), y.data_ptr(), tokens, hidden, intermediate, expert_ids.shape[1], w13.shape[0],
            w13.dtype is torch.bfloat16, threads,
        )  # fmt: skip
        assert not failed, "an expert id is out of range"
        return y

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
        logits = _dense(logits)
        columns = (temperature, top_k, top_p, min_p, seed, sample_index, position, target)
        rows, vocab = logits.shape
        out = (
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows),
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows, dtype=torch.bool),
        )
        addresses = [x.data_ptr() for x in (logits, *columns, *out)]
        if c_sample(*addresses, rows, vocab, threads):
            raise ValueError(f"a target token is not below {vocab}: {int(target.max())}")
        return out

    def top_logprobs(logits: Tensor, n: int, threads: int) -> tuple[Tensor, Tensor]:
        logits = _dense(logits)
        rows, vocab = logits.shape
        assert 0 <= n <= vocab
        ids, logprobs = torch.empty(rows, n, dtype=torch.int32), torch.empty(rows, n)
        c_top(logits.data_ptr(), ids.data_ptr(), logprobs.data_ptr(), rows, vocab, n, threads)
        return ids, logprobs

    return {"moe": moe, "sample": sample, "top_logprobs": top_logprobs}


def _index_operators(library: NativeLibrary) -> dict[str, Callable[..., Any]]:
    c_index, c_accept = _function(library, "step_index"), _function(library, "accept")

    def step_index(fields: list[Tensor], tables: list[Tensor], results: list[Tensor], sizes: list[int]) -> None:
        counts = index_counts(fields, tables)
        addresses = []
        for group in (fields, tables, results):
            for x in group:
                assert x.is_contiguous(), x.stride()
            addresses.append((ctypes.c_void_p * len(group))(*[x.data_ptr() for x in group]))
        c_index(*addresses, (ctypes.c_long * (len(counts) + len(sizes)))(*counts, *sizes))

    def accept(
        drawn: Tensor,
        token_ids: Tensor,
        query_start: Tensor,
        row_slots: Tensor,
        row_start: Tensor,
        row_drafts: Tensor,
        row_first_draw: Tensor,
        length: Tensor,
        next_token: Tensor,
        max_drafts: int,
    ) -> Tensor:
        accepted = torch.empty_like(row_slots)
        operands = (drawn, token_ids, query_start, row_slots, row_start, row_drafts, row_first_draw, length, next_token)
        c_accept(*[x.data_ptr() for x in operands], accepted.data_ptr(), row_slots.shape[0])
        return accepted

    return {"step_index": step_index, "accept": accept, "acknowledge": acknowledge}


def implementations(library: NativeLibrary) -> dict[str, Callable[..., Any]]:
    """Every operator by its plain name."""
    found = _index_operators(library) | _row_operators(library) | _state_operators(library)
    return found | _attention_operators(library) | _other_operators(library)
