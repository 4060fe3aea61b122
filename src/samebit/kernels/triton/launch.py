"""How kernels are launched: counted, and with the operand types that the place they run in can compute with.

Under Triton's interpreter, which runs kernels on a CPU, a product of bf16 operands is silently wrong: there they are widened.
Knows no kernel.
"""

import threading
from typing import Any

import torch
import triton
import triton.language as tl

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_launches = threading.local()


def _let_the_interpreter_count() -> None:
    """Let loops have bounds that were computed or loaded, which Triton 3.6's interpreter cannot with NumPy 2.4.

    It keeps scalars as arrays of one element, which no longer become integers by themselves.
    """
    from triton.runtime import interpreter  # noqa: PLC0415 - a module that is of use where kernels are interpreted only

    patch = interpreter._patch_lang_tensor  # noqa: SLF001 - there is no public hook

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index  # noqa: SLF001 - as above


if IS_INTERPRETED:
    _let_the_interpreter_count()


def dot_dtype(dtype: torch.dtype) -> Any:
    """The Triton type in which operands of a product of ``dtype`` values are handed to ``tl.dot``."""
    return tl.float32 if IS_INTERPRETED else _TYPES[dtype]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run ``kernel`` on ``grid``; a grid without programs launches nothing."""
    if not all(grid):
        return
    _launches.count = num_launches() + 1
    kernel[grid](*args, **meta)


def num_launches() -> int:
    """Kernels that this thread has launched so far."""
    return int(getattr(_launches, "count", 0))
