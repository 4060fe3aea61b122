"""How kernels are launched: counted, and with the operand types that the place they run in can compute with.

Under Triton's interpreter, which runs kernels on a CPU, a product of bf16 operands is silently wrong: there they are widened.
Knows no kernel.
"""

import functools
import threading
from typing import Any

import torch
import triton
import triton.language as tl

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_launches = threading.local()

if IS_INTERPRETED:
    from samebit.kernels.triton.interpreted import install

    install()


def dot_dtype(dtype: torch.dtype) -> Any:
    """The Triton type in which operands of a product of ``dtype`` values are handed to ``tl.dot``."""
    return tl.float32 if IS_INTERPRETED else _TYPES[dtype]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run ``kernel`` on ``grid``; a grid without programs launches nothing."""
    if not all(grid):
        return
    _launches.count = num_launches() + 1
    kernel[grid](*args, **meta)


@functools.cache
def num_programs(device: torch.device, per_processor: int) -> int:
    """How many programs walk a list of items; two in the interpreter, so that each walks several."""
    return 2 if IS_INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count * per_processor


def num_launches() -> int:
    """Kernels that this thread has launched so far."""
    return int(getattr(_launches, "count", 0))
