"""Makes Triton's interpreter compute as a device does where it does not (seen in Triton 3.6 with NumPy 2.4).

Loops may not have bounds that were computed; products go through a BLAS, whose order of summation depends on the tile; fp32
is cut off where it becomes bf16. Used where kernels are interpreted only. Knows no kernel.
"""

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


def _dot(_builder: Any, a: Any, b: Any, c: Any, *_: Any) -> Any:
    """``c + a @ b``, one term after the other for each element."""
    total = c.data.copy()
    with np.errstate(all="ignore"):
        for k in range(a.data.shape[-1]):
            total += a.data[..., :, k, None] * b.data[..., None, k, :]
    return interpreter.TensorHandle(total, c.dtype.scalar)


def install() -> None:
    """Put the repairs in place, for this process; there is no public hook for any of them."""
    builder, patch_tensor = interpreter.InterpreterBuilder, interpreter._patch_lang_tensor  # noqa: SLF001 - see above
    cast = builder.cast_impl

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def cast_to_nearest(self: Any, src: Any, dst_type: Any) -> Any:
        if not (src.dtype.scalar.is_fp32() and dst_type.scalar.is_bf16()):
            return cast(self, src, dst_type)
        nearest = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.uint16).numpy()
        return interpreter.TensorHandle(nearest.reshape(src.data.shape), dst_type.scalar)

    interpreter._patch_lang_tensor = patch_tensor_with_index  # noqa: SLF001 - see above
    builder.cast_impl, builder.create_dot = cast_to_nearest, _dot
