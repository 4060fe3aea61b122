"""The set for CUDA devices, put together from its families. Knows which kernels there are, and what their bits depend on."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from samebit.kernels.triton import (
    acknowledgement,
    attention,
    block_attention,
    conv,
    conv_heads,
    experts,
    filters,
    heads,
    index,
    launch,
    linear,
    normed_linear,
    pages,
    routing,
    rows,
    sampling,
    words,
)

num_launches = launch.num_launches
compile_for = launch.compile_for
# With fewer rows a library gains nothing, or splits sums over K.
_LEAST_LIBRARY_ROWS = 32
# Elements of a product that is tried: 1 GiB in fp32.
_MOST_RESULTS = 1 << 28

LIMITS = {
    "page groups": index.MAX_GROUPS,
    "columns of a head": attention.MAX_WIDTH,
    "columns of a norm": max(rows.NORM_WARPS),
    "tokens of a vocabulary": filters.MAX_VOCAB,
}
"""The largest sizes that there are kernels for."""


def implementations(activation: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Every kernel, for activations of this dtype."""
    return {
        **linear.implementations(activation),
        **rows.implementations(activation),
        **words.implementations(activation),
        "normed_linear": partial(normed_linear.normed_linear, activation),
        **conv.implementations(activation),
        "step_index": index.step_index,
        "accept": index.accept,
        "acknowledge": acknowledgement.acknowledge,
        "write_heads": pages.write_heads,
        "conv_heads": conv_heads.conv_heads,
        "turn_heads": partial(heads.turn_heads, activation),
        "attention": attention.attention,
        "block_attention": block_attention.block_attention,
        "route": routing.route,
        "mixture": experts.mixture,
        "sample": sampling.sample,
        "draw": sampling.draw,
        "top_logprobs": sampling.top_logprobs,
    }


def check_device(device: torch.device) -> None:
    """Raise RuntimeError if kernels cannot run on ``device``."""
    if (device.type == "cpu") != launch.IS_INTERPRETED:
        wanted = "a CUDA device, or TRITON_INTERPRET=1 to interpret them on a CPU"
        raise RuntimeError(f"Triton kernels need {wanted}; this is {device}, interpreted: {launch.IS_INTERPRETED}")


def make_pack(activation: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The packing function, for weights [..., N, K]."""
    return partial(linear.pack_linear, activation=activation)


def make_library_rows(
    activation: torch.dtype, device: torch.device, max_rows: int
) -> Callable[[Tensor], frozenset[int]]:
    """Tells for a packed weight [N, K] at which row counts up to ``max_rows`` the library may stand in; each shape is tried once."""
    counts = {max_rows, *(1 << power for power in range(max_rows.bit_length()))}
    counts = {count for count in counts if count >= _LEAST_LIBRARY_ROWS}
    found: dict[torch.Size, frozenset[int]] = {}

    def library_rows(weight: Tensor) -> frozenset[int]:
        # fp32 products of a library follow a switch of torch that anybody may turn.
        if launch.IS_INTERPRETED or not weight.dtype is activation is torch.bfloat16:
            return frozenset()
        # No library adds up segments as we do.
        if linear.num_segments(weight.shape[0], weight.shape[1], activation) > 1:
            return frozenset()
        if weight.shape not in found:
            wanted = [count for count in counts if count * weight.shape[0] <= _MOST_RESULTS]
            found[weight.shape] = linear.certified_row_counts(
                (weight.shape[0], weight.shape[1]), activation, wanted, device
            )
        return found[weight.shape]

    return library_rows


def describe(device: torch.device) -> Mapping[str, str]:
    """What the numerics profile records of this set."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    found = {"triton": str(triton.__version__), "build": digest.hexdigest()}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found |= {"gpu": torch.cuda.get_device_name(device), "compute_capability": f"{major}.{minor}"}
        found |= {"cuda": str(torch.version.cuda)}
    return found
