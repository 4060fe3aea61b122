"""Which kernel set a host has, and how each is put together. Knows implementations by name; no kernel."""

import logging
from typing import Literal

import torch

from samebit.kernels import torch_set
from samebit.kernels.native import bindings
from samebit.kernels.native.build import NativeUnavailableError, host_isas, load_library
from samebit.kernels.ops import operators
from samebit.kernels.sets import KernelSet
from samebit.kernels.values import Element

_log = logging.getLogger(__name__)
KernelKind = Literal["auto", "native", "torch"]
TORCH_SET, TRITON_SET = "torch", "triton"


def torch_kernels(num_threads: int) -> KernelSet:
    """The set in plain torch."""
    ops = operators("torch", torch_set.IMPLEMENTATIONS)
    return KernelSet(TORCH_SET, num_threads, {}, torch_set.pack_linear, ops)


def native_kernels(isa: str, num_threads: int) -> KernelSet:
    """The set compiled for an instruction set of ``native.build.host_isas``. Raises NativeUnavailableError."""
    library = load_library(isa)
    ops = operators(isa, bindings.implementations(library))
    details = {"build": library.build, "compiler": library.compiler}
    name, pack = f"native-{isa}", bindings.make_pack(library)
    return KernelSet(name, num_threads, details, pack, ops, _count_launches=bindings.launch_counter(library))


def triton_kernels(element: Element, device: torch.device, max_rows: int) -> KernelSet:
    """The set for a CUDA device, for activations of ``element`` and launches of up to ``max_rows`` tokens.

    Raises ImportError without Triton, and RuntimeError if its kernels cannot run on ``device``.
    """
    from samebit.kernels.triton import set as triton_set  # noqa: PLC0415 - Triton is not there on every machine

    triton_set.check_device(device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[element]
    ops = operators(f"triton_{element}", triton_set.implementations(dtype), ("CPU", "CUDA"))
    return KernelSet(
        TRITON_SET,
        1,
        triton_set.describe(device),
        triton_set.make_pack(dtype),
        ops,
        _count_launches=triton_set.num_launches,
        element=element,
        _library_rows=triton_set.make_library_rows(dtype, device, max_rows),
        limits=triton_set.LIMITS,
        _compile_for=triton_set.compile_for,
    )


def select_kernels(kind: KernelKind, num_threads: int) -> KernelSet:
    """The best kernel set for this host.

    Raises ValueError for an unknown ``kind`` or fewer than one thread, and NativeUnavailableError where
    ``kind="native"`` cannot be built; ``"auto"`` then warns and gives the torch set.
    """
    if kind not in ("auto", "native", "torch"):
        raise ValueError(f"kernels must be 'auto', 'native' or 'torch', got {kind!r}")
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    if kind == "torch":
        return torch_kernels(num_threads)
    try:
        return native_kernels(host_isas()[0], num_threads)
    except NativeUnavailableError as error:
        if kind == "native":
            raise
        _log.warning("native kernels are unavailable (%s); using the slower torch kernels", error)
        return torch_kernels(num_threads)
