"""How kernels are launched: counted, and with the operand types that the place they run in can compute with.

Under Triton's interpreter, which runs kernels on a CPU, a product of bf16 operands is silently wrong: there they are widened.
Knows no kernel.
"""

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_map_only

from samebit.kernels.modes import DispatchMode

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

HOPPER_SHARED = 227 << 10
"""Bytes of shared memory that a program of a Hopper device can have."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_here = threading.local()

if IS_INTERPRETED:
    from samebit.kernels.triton.interpreted import install

    install()


def dot_dtype(dtype: torch.dtype) -> Any:
    """The Triton type in which operands of a product of ``dtype`` values are handed to ``tl.dot``."""
    return tl.float32 if IS_INTERPRETED else _TYPES[dtype]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run ``kernel`` on ``grid``; a grid without programs launches nothing. In ``compile_for`` it is compiled only."""
    if not all(grid):
        return
    _here.count = num_launches() + 1
    wanted = _wanted()
    if wanted is None:
        kernel[grid](*args, **meta)
    else:
        wanted.append(kernel.warmup(*args, grid=grid, **meta))


class _Idle(DispatchMode):
    """What a kernel would write are zeros, as any other index might be out of bounds; what exists is not changed by torch either."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: torch's protocol
        schema = func._schema  # noqa: SLF001 - torch tells nowhere else what an operation writes to
        if func.namespace == "aten" and schema.is_mutable:
            given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | (kwargs or {})
            written = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            return tuple(written) if len(schema.returns) > 1 else written[0] if schema.returns else None
        made = func(*args, **(kwargs or {}))
        if func.namespace == "samebit" or "empty" in func.name():
            tree_map_only(Tensor, Tensor.zero_, made)
        return made


def compile_for(run: Callable[[], object]) -> None:
    """Compile, side by side, the kernels that ``run`` launches in this thread, and launch none; nothing that exists is changed.

    Raises what the compiler raises for the first that it cannot compile.
    """
    if IS_INTERPRETED:
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        _here.wanted = []
        try:
            # What cannot be compiled is told below: told in there, it would leave Triton compiling for later for good.
            with triton.AsyncCompileMode(executor, ignore_errors=True), _Idle():
                run()
            compiled = {
                kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel for kernel in _here.wanted
            }
        finally:
            _here.wanted = None
        device = triton.runtime.driver.active.get_current_device()
        list(executor.map(functools.partial(_load, device), compiled))


def _wanted() -> list[Any] | None:
    """What has been asked to be compiled in this thread, while that is all that is wanted."""
    return getattr(_here, "wanted", None)


def _load(device: int, kernel: Any) -> None:
    """Have the C code that launches a kernel compiled, and the kernel loaded."""
    triton.runtime.driver.active.set_current_device(device)  # each thread has its own
    _ = kernel.run


@functools.cache
def num_programs(device: torch.device, per_processor: int) -> int:
    """How many programs walk a list of items; two in the interpreter, so that each walks several."""
    return 2 if IS_INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count * per_processor


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; where there is no GPU, those of a Hopper device."""
    if device.type != "cuda":
        return HOPPER_SHARED
    # As Triton itself asks before it launches a kernel.
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def num_launches() -> int:
    """Kernels that this thread has launched so far."""
    return int(getattr(_here, "count", 0))
