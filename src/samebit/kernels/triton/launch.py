"""How kernels are launched: counted, overlapped, and with the operand types that the place they run in can compute with.

From compute capability 9.0 on, a kernel is brought onto the device while the one before it still runs (programmatic dependent
launch), and `begin`, the first thing that each kernel does, waits until that one has ended and its writes are seen. So kernels
run one after the other, as always; only the time between them is saved. Under Triton's interpreter, which runs kernels on a
CPU, a product of bf16 operands is silently wrong: there they are widened. Knows no kernel.
"""

import functools
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

CAN_OVERLAP = tl.constexpr(
    not IS_INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0))
)
"""Whether the device can bring kernels in early; where there is none, kernels are only compiled, for one that can."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_launches = threading.local()

if IS_INTERPRETED:
    from samebit.kernels.triton.interpreted import install

    install()


@triton.jit
def begin():
    """Let the next kernel come, and wait until the kernels before this one have ended: the first statement of every kernel.

    What no kernel writes, such as weights, may be asked for before it.
    """
    if CAN_OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(first, length, end, THREADS: tl.constexpr):
    """Ask for ``length`` elements from pointer ``first`` on, each of THREADS threads for a part; none from pointer ``end`` on.

    They are brought into the device's L2. Pointers are multiples of 16 bytes, and there are as many bytes before ``end``.
    """
    if CAN_OVERLAP:
        width: tl.constexpr = first.dtype.element_ty.primitive_bitwidth // 8
        size = tl.cdiv(length * width, THREADS * 16) * 16
        address = first.to(tl.int64) + tl.arange(0, THREADS).to(tl.int64) * size
        address = tl.minimum(address, end.to(tl.int64) - size)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r", [address, size],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def dot_dtype(dtype: torch.dtype) -> Any:
    """The Triton type in which operands of a product of ``dtype`` values are handed to ``tl.dot``."""
    return tl.float32 if IS_INTERPRETED else _TYPES[dtype]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run ``kernel`` on ``grid``; a grid without programs launches nothing."""
    if not all(grid):
        return
    _launches.count = num_launches() + 1
    if CAN_OVERLAP.value:
        meta["launch_pdl"] = True
    kernel[grid](*args, **meta)


@functools.cache
def num_programs(device: torch.device, per_processor: int) -> int:
    """How many programs walk a list of items; two in the interpreter, so that each walks several."""
    return 2 if IS_INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count * per_processor


def num_launches() -> int:
    """Kernels that this thread has launched so far."""
    return int(getattr(_launches, "count", 0))
