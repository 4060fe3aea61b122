"""Work beside other work: on a GPU, a second stream that leaves the first at one point and comes back to it at another. Knows no kernel.

A step whose kernels fill a small part of a device is as long as its longest chain of launches. What no launch of the rest needs may be a
branch; a captured graph keeps it as one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_here = threading.local()


def in_branch() -> bool:
    """Whether what this thread launches now runs beside other work: memory that launches share has to be another there."""
    return getattr(_here, "in_branch", False)


@contextmanager
def beside(work: Callable[[], None], device: torch.device) -> Iterator[None]:
    """Run `work` beside what the body launches: both begin behind what was launched before, and what is launched later waits for both.

    Neither may write what the other reads or writes. What `work` makes must not outlive it, as memory of a stream goes back to that
    stream; what it holds itself is held until the body ends. On a CPU it runs before the body. There is one branch at a time.
    """
    assert not in_branch(), "a branch of a branch"
    if device.type != "cuda":
        _run(work)
        yield
        return
    main, branch = torch.cuda.current_stream(device), _branch(device)
    branch.wait_stream(main)
    try:
        with torch.cuda.stream(branch):
            _run(work)
        yield
    finally:
        main.wait_stream(branch)


def _run(work: Callable[[], None]) -> None:
    _here.in_branch = True
    try:
        work()
    finally:
        _here.in_branch = False


@functools.cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    """The stream of all branches on a device."""
    return torch.cuda.Stream(device)
