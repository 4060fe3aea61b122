"""Writes how rows that are summed lie over threads in two kernels, compiled for a Hopper device: [[behind a convolution, alone], ...].

No device is needed, but Triton must not be interpreting.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from samebit.kernels.triton import conv, rows

WIDE_INDEX = {"row_tags", "read_tags", "store_tags", "write_tags", "entry_source_tags", "entry_tag"}
POINTERS = {"x", "y", "taps", "rows", "residual", "gain", "total", "out", "normed_out"}
SIZES = {"num_tokens", "num_rows", "num_entries", "x_stride", "y_stride", "residual_stride"}


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


def main() -> None:
    pairs = []
    for channels, dtype in [(2048, "bf16"), (256, "fp32")]:
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
        behind = layouts(conv.convolve_kernel, dtypes, meta, options)
        pairs.append((behind, alone))
    sys.stdout.write(json.dumps(pairs))


if __name__ == "__main__":
    main()
