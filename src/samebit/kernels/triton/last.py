"""The last program of a group: it finds all that the others stored, and goes on where a launch of its own would. Knows no kernel.

A group has a number of shares and a counter that is 0. Whoever has stored a share asks ``is_last`` once for it; the one that asks last
learns so, whichever it is, and may load all shares, with ``PAST_L1``. Nobody waits, so there may be more programs than fit on
a device. What comes of the shares must not depend on who is last.

That it sees them follows from PTX's memory model. The stores of all threads of a program come before its barrier, and so before the
atomic addition of one thread behind it, which releases and acquires at the scope of the device. The additions to a counter are one
chain, so all stores of the group happen before its last addition, that before the second barrier, and that before the loads of all
threads behind it. The acquire also empties the first level cache; ``PAST_L1`` does not look there at all.

The last one puts the counter back to 0 when nobody else will add to it, and the next launch, later in the same stream, finds it so:
nothing has to be zeroed, and a captured graph can be launched again.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebit.kernels.branches import in_branch

MAX_COUNTERS = 16384
"""Groups that a launch has at most."""
PAST_L1 = tl.constexpr(".cg")
"""The ``cache_modifier`` for loads of what other programs of the same launch stored."""


@triton.jit
def is_last(counter, size):
    """Whether all but one of a group's ``size`` shares were told of before. All threads of a program must come here."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == size - 1
    if last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return last


def counters(device: torch.device) -> Tensor:
    """[MAX_COUNTERS] int32 for all launches on ``device``, 0 between any two of them, at one address, which graphs keep.

    No two launches use it at the same time, since an engine has one stream, and all that run in a process have the same one; launches
    in a branch, which run beside those, have another.
    """
    return _counters(device, in_branch())


@functools.cache
def _counters(device: torch.device, is_beside: bool) -> Tensor:
    del is_beside  # a place of its own is all that it is for
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not is_capturing, "a step runs once before it is captured"
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
