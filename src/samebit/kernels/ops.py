"""Schemas of the kernels as torch operators: what a recorder sees of a step.

A plain Python or ctypes call leaves no trace in a recorded step; an operator does, with the tensors it changes declared.
Every kernel set registers the same schemas under its own suffix (``samebit::linear_torch``). Knows no implementation.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from samebit.kernels.composed import composed

_CONV_INDEX = (
    "Tensor query_start, Tensor read_rows, Tensor read_tags, Tensor store_rows, Tensor store_tags, Tensor write_rows, "
    "Tensor write_tags, Tensor entry_sources, Tensor entry_source_tags, Tensor entry_dest, Tensor entry_tag"
)
SCHEMAS: Mapping[str, str] = {
    "step_index": "(Tensor[] fields, Tensor(a!)[] tables, Tensor(b!)[] results, int[] sizes) -> ()",
    "accept": "(Tensor drawn, Tensor token_ids, Tensor query_start, Tensor row_slots, Tensor row_start, Tensor row_drafts, "
    "Tensor row_first_draw, Tensor(a!) length, Tensor(b!) next_token, int max_drafts) -> Tensor",
    "draft_words": "(Tensor slots, Tensor samples, Tensor length, Tensor next_token, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, Tensor seed, Tensor sample_index, Tensor(a!)[] words, int filler) -> ()",
    "keep_drafts": "(Tensor tokens, Tensor slots, Tensor(a!) drafts) -> Tensor",
    "acknowledge": "(Tensor entry_rows, Tensor boundaries, Tensor tags, Tensor dest, Tensor row_slots, Tensor row_tags, Tensor[] found, "
    "Tensor[] table, Tensor[] stamps, int[] windows, int page_size) -> (Tensor, Tensor)",
    "linear": "(Tensor x, Tensor weight, int num_out, bool wide, bool library, int threads) -> Tensor",
    "addends": "(Tensor x, Tensor weight, int num_out, bool library, int threads) -> Tensor",
    "rms_norm": "(Tensor x, Tensor gain, float eps, int threads) -> Tensor",
    "add_norm": "(Tensor x, Tensor y, Tensor gain, float eps, int threads) -> (Tensor, Tensor)",
    "swiglu": "(Tensor z, int threads) -> Tensor",
    "normed_linear": "(Tensor x, Tensor y, Tensor gain, float eps, Tensor weight, int num_out, bool library, bool is_gated, int threads) "
    "-> (Tensor, Tensor)",
    "short_conv": f"(Tensor x, Tensor taps, Tensor(a!) rows, Tensor(b!) row_tags, {_CONV_INDEX}, Tensor? residual, "
    "int threads) -> Tensor",
    "short_conv_norm": f"(Tensor x, Tensor taps, Tensor(a!) rows, Tensor(b!) row_tags, {_CONV_INDEX}, Tensor residual, "
    "Tensor gain, float eps, int threads) -> (Tensor, Tensor)",
    "shift": f"(Tensor x, Tensor(a!) rows, Tensor(b!) row_tags, {_CONV_INDEX}, int threads) -> Tensor",
    "write_heads": "(Tensor q, Tensor k, Tensor v, Tensor q_gain, Tensor k_gain, float eps, Tensor(a!) k_pages, Tensor(b!) v_pages, "
    "Tensor(c!) page_tags, Tensor write_slots, Tensor stamp_pages, Tensor stamp_tags, Tensor? positions, Tensor? cos, "
    "Tensor? sin, int threads) -> Tensor",
    "conv_heads": f"(Tensor q, Tensor kv, Tensor taps, Tensor(a!) rows, Tensor(b!) row_tags, {_CONV_INDEX}, Tensor q_gain, Tensor k_gain, "
    "float eps, Tensor(c!) k_pages, Tensor(d!) v_pages, Tensor(e!) page_tags, Tensor write_slots, Tensor stamp_pages, "
    "Tensor stamp_tags, int threads) -> Tensor",
    "turn_heads": "(Tensor x, Tensor gains, float eps, Tensor positions, Tensor cos, Tensor sin, int threads) -> Tensor",
    "attention": "(Tensor q, Tensor rel, Tensor rel_proj, Tensor tau, Tensor k_pages, Tensor v_pages, "
    "Tensor query_start, Tensor row_start, Tensor row_slots, Tensor page_table, int longest, int window, float scale, "
    "int threads) -> Tensor",
    "block_attention": "(Tensor q, Tensor k, Tensor v, Tensor k_pages, Tensor v_pages, Tensor lengths, Tensor row_slots, "
    "Tensor page_table, int window, bool is_causal, float scale, int threads) -> Tensor",
    "route": "(Tensor logits, Tensor bias, int top_k, int num_shared, float scale, int threads) -> (Tensor, Tensor)",
    "mixture": "(Tensor x, Tensor logits, Tensor bias, int top_k, int num_shared, float scale, Tensor num_tokens, Tensor w13, "
    "Tensor w2, int intermediate, int threads) -> Tensor",
    "embedding": "(Tensor ids, Tensor table, int threads) -> Tensor",
    "take_rows": "(Tensor x, Tensor rows, float divisor) -> Tensor",
    "joined_sums": "(Tensor[] x, Tensor[] y) -> Tensor",
    "joined_bytes": "(Tensor[] parts) -> Tensor",
    "sample": "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, "
    "Tensor sample_index, Tensor position, Tensor target, int threads) -> (Tensor, Tensor, Tensor, Tensor)",
    "draw": "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor sample_index, "
    "Tensor position, Tensor target, int threads) -> Tensor",
    "top_logprobs": "(Tensor logits, int n, int threads) -> (Tensor, Tensor)",
}

_LIBRARY = torch.library.Library("samebit", "FRAGMENT")
_OPERATORS: dict[str, SimpleNamespace] = {}


def _shapes_only(name: str) -> Callable[..., Any]:
    """The operator on tensors without data: fresh outputs of the right shape."""

    def route(logits: Tensor, bias: Tensor, top_k: int, num_shared: int, *_: Any) -> tuple[Tensor, Tensor]:
        shape = (logits.shape[0], top_k + num_shared)
        return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)

    def sample(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
        dtypes = (torch.int32, torch.float32, torch.int32, torch.bool)
        return tuple(logits.new_empty(logits.shape[0], dtype=dtype) for dtype in dtypes)

    def top_logprobs(logits: Tensor, n: int, *_: Any) -> tuple[Tensor, Tensor]:
        shape = (logits.shape[0], n)
        return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)

    def acknowledge(entry_rows: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return tuple(entry_rows.new_empty(entry_rows.shape, dtype=torch.bool) for _ in range(2))

    def normed_linear(
        x: Tensor,
        y: Tensor,
        gain: Tensor,
        eps: float,
        weight: Tensor,
        num_out: int,
        library: bool,
        is_gated: bool,
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        total = x.new_empty(x.shape, dtype=torch.float32)
        return total, x.new_empty(x.shape[0], num_out // 2 if is_gated else num_out)

    functions: dict[str, Callable[..., Any]] = {
        "step_index": lambda *_: None,
        "accept": lambda drawn, token_ids, query_start, row_slots, *_: row_slots.new_empty(row_slots.shape),
        "draft_words": lambda *_: None,
        "acknowledge": acknowledge,
        "linear": lambda x, weight, num_out, *_: x.new_empty(x.shape[0], num_out),
        "addends": lambda x, weight, num_out, *_: x.new_empty(1, x.shape[0], num_out, dtype=torch.float32),
        "add_norm": lambda x, *_: (x.new_empty(x.shape, dtype=torch.float32), x.new_empty(x.shape)),
        "swiglu": lambda z, threads: z.new_empty(z.shape[0], z.shape[1] // 2),
        "normed_linear": normed_linear,
        "short_conv_norm": lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
        "route": route,
        "embedding": lambda ids, table, _: table.new_empty(ids.shape[0], table.shape[1], dtype=torch.float32),
        "take_rows": lambda x, rows, _: x.new_empty(rows.shape[0], x.shape[1]),
        "joined_bytes": lambda parts: parts[0].new_empty(sum(part.shape[0] for part in parts)),
        "joined_sums": lambda x, y: x[0].new_empty(x[0].shape[0], len(x) * x[0].shape[1]),
        "sample": sample,
        "draw": lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int32),
        "top_logprobs": top_logprobs,
    }
    return functions.get(name, lambda x, *_: x.new_empty(x.shape))


def _entry(operator: Callable[..., Any], implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The operator where somebody records, else its implementation at once: dispatch costs as much as a small kernel."""

    def enter(*arguments: Any) -> Any:
        return operator(*arguments) if is_in_torch_dispatch_mode() else implementation(*arguments)

    return enter


def operators(
    suffix: str, implementations: Mapping[str, Callable[..., Any]], devices: Sequence[str] = ("CPU",)
) -> SimpleNamespace:
    """Register every schema as ``samebit::<name>_<suffix>`` for ``devices`` once and return entries to them by plain name.

    What can be made of others need not be among ``implementations``; those that others are made of may be, without a schema.
    """
    implementations = {**composed(implementations), **implementations}
    assert implementations.keys() >= SCHEMAS.keys()
    if suffix not in _OPERATORS:
        found = {}
        for name, schema in SCHEMAS.items():
            full = f"{name}_{suffix}"
            _LIBRARY.define(full + schema)
            for device in devices:
                _LIBRARY.impl(full, implementations[name], device)
            _LIBRARY.impl(full, _shapes_only(name), "Meta")
            found[name] = _entry(getattr(torch.ops.samebit, full).default, implementations[name])
        _OPERATORS[suffix] = SimpleNamespace(**found)
    return _OPERATORS[suffix]
