"""Writes how rows that are summed lie over threads in two kernels, compiled for a Hopper device: [[behind a convolution, alone], ...].

No device is needed, but Triton must not be interpreting.
"""

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from samebit.kernels.triton import conv, conv_heads, normed_linear, pages, rows
from samebit.kernels.triton.launch import dot_dtype
from samebit.kernels.triton.linear import BLOCK_K, tile_of

WIDE_INDEX = {
    "row_tags", "read_tags", "store_tags", "write_tags", "entry_source_tags", "entry_tag", "page_tags", "stamp_tags",
}  # fmt: skip
POINTERS = {
    "x", "y", "q", "k", "v", "taps", "rows", "residual", "gain", "q_gain", "k_gain", "total", "out", "normed_out", "k_pages", "v_pages", "weight",
}  # fmt: skip
SIZES = {"num_out", "num_in", "num_tokens", "num_rows", "num_entries", "x_stride", "y_stride", "residual_stride"}


def layouts(
    kernel: Any, dtypes: dict[str, str], meta: dict[str, Any], options: dict[str, Any]
) -> list[str]:  # Any: a jit function
    """The shape and layout of each sum over fp32 rows; operands in ``POINTERS`` are aligned, and fp32 or as ``dtypes`` say."""

    def type_of(name: str) -> str:
        if name in POINTERS:
            return "*" + dtypes.get(name, "fp32")
        if name in meta:
            return "constexpr"
        return "fp32" if name == "eps" else "i32" if name in SIZES else "*i64" if name in WIDE_INDEX else "*i32"

    names = kernel.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in names if name in POINTERS or "stride" in name
    }
    values = {(names.index(name),): value for name, value in meta.items()}
    source = ASTSource(kernel, {name: type_of(name) for name in names}, constexprs=values, attrs=aligned)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    known = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    return [f"{shape} {known[name]}" for shape, name in re.findall(r"}\) : \(tensor<([\dx]+)xf32, (#\w+)>\)", text)]


def behind_and_alone(channels: int, dtype: str) -> tuple[list[str], list[str]]:
    """A norm of rows."""
    block, num_rows, num_warps = rows.norm_tile(channels)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    meta = {"WIDTH": channels, "PARTS": 1, "ROWS": num_rows, "BLOCK": block, "ADDS": False}
    alone = layouts(rows.norm_kernel, {"out": dtype}, meta, options)
    tile = conv.normed_tile(channels)
    options |= {"num_warps": tile.num_warps, "maxnreg": tile.registers}
    meta = {
        "TAPS": 4, "CHANNELS": channels, "IS_SHIFT": False, "HAS_RESIDUAL": True, "HAS_NORM": True,
        "IS_SPARSE": True, "BLOCK_T": tile.tokens, "BLOCK_C": tile.channels, "BLOCK_K": max(tile.tokens, conv.FEW.tokens),
        "BLOCK_H": 4, "SCAN": conv.SCAN, "ROW_BLOCK": conv.ROW_BLOCK,
    }  # fmt: skip
    dtypes = dict.fromkeys(("x", "rows", "normed_out"), dtype)
    return layouts(conv.convolve_kernel, dtypes, meta, options), alone


def heads_behind_and_alone(heads: int, kv_heads: int, width: int, dtype: str) -> tuple[list[str], list[str]]:
    """A norm of heads that are written into pages."""
    block, num_rows, num_warps = rows.norm_tile(width)
    options, page = {"num_warps": num_warps, "enable_fp_fusion": False}, width * 64
    meta = {
        "Q_STRIDE": (heads + 3 * kv_heads) * width, "PAGE_STRIDE": kv_heads * page, "HEAD_STRIDE": page,
        "ROW_STRIDE": width, "PAGE_SIZE": 64, "HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "ROWS": num_rows,
    }  # fmt: skip
    dtypes = dict.fromkeys(("x", "q", "k", "v", "rows", "out", "k_pages", "v_pages"), dtype)
    strides = {"K_STRIDE": 2 * kv_heads * width, "V_STRIDE": 2 * kv_heads * width}
    unturned = {"BLOCK": block, "IS_TURNED": False, "positions": None, "cos": None, "sin": None}
    alone = layouts(pages.write_heads_kernel, dtypes, meta | strides | unturned, options)
    meta |= {"TAPS": 4, "IS_SPARSE": True, "BLOCK_K": conv.FEW.tokens, "BLOCK_H": 4, "SCAN": conv.SCAN}
    kernel = conv_heads.convolve_heads_kernel
    return layouts(kernel, dtypes, meta | {"ROW_BLOCK": conv.ROW_BLOCK}, options), alone


def with_product_and_alone(width: int, x_dtype: str, dtype: str, *, is_gated: bool) -> tuple[list[str], list[str]]:
    """A norm of a sum, of which a product is made, for a few rows and some hundred columns of it."""
    activation = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    block, num_rows, num_warps = rows.norm_tile(width)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    meta = {"WIDTH": width, "PARTS": 1, "ROWS": num_rows, "BLOCK": block, "ADDS": True}
    alone = layouts(rows.norm_kernel, {"x": x_dtype, "y": dtype, "out": dtype}, meta, options)
    tile = tile_of(8, 1152, width, activation)
    meta = {
        "WIDTH": width, "BLOCK": block, "BLOCK_N": tile.weights, "BLOCK_T": tile.tokens, "BLOCK_K": BLOCK_K[activation],
        "IS_GATED": is_gated, "DOT": dot_dtype(activation),
    }  # fmt: skip
    dtypes = dict.fromkeys(("y", "weight", "out"), dtype) | {"x": x_dtype}
    return layouts(normed_linear.normed_linear_kernel, dtypes, meta, options), alone


def main() -> None:
    if sys.argv[1:] == ["products"]:
        widths, dtypes = (64, 128, 192, 256), (("fp32", "bf16"), ("bf16", "bf16"), ("fp32", "fp32"))
        pairs = [with_product_and_alone(width, *dtype, is_gated=width > 64) for width in widths for dtype in dtypes]
    elif sys.argv[1:] == ["heads"]:
        pairs = [heads_behind_and_alone(16, 8, 128, "bf16"), heads_behind_and_alone(4, 2, 64, "fp32")]
    else:
        pairs = [behind_and_alone(2048, "bf16"), behind_and_alone(256, "fp32")]
    sys.stdout.write(json.dumps(pairs))


if __name__ == "__main__":
    main()
