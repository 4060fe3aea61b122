"""A step as a CUDA graph: captured once for a bucket, launched again as one. Knows no plan.

The rules are those of ``graphs``: capture runs on inert inputs, nothing that it would freeze may happen, the step launches the same
operations and the same number of kernels as when it runs eagerly, and no buffer moves afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samebit.core.errors import GraphError
from samebit.runner.graphs import Manifest, check_manifest, watched


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Graphs of an engine that nobody holds any more may wait for the collector; to free one now would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaRecording:
    """A captured step. All graphs of a runner take their memory from one `pool`, so its result lasts until the next replay of any."""

    def __init__(
        self,
        step: Callable[[], Tensor],
        count_launches: Callable[[], int],
        addresses: Callable[[], tuple[int, ...]],
        pool: Any,  # Any: torch's private handle
    ) -> None:
        """Capture `step`, whose inputs must be inert; `addresses` are those of the buffers that it works on."""
        before = count_launches()
        _, eager = watched(step)  # kernels are compiled and loaded here, which must not happen while capturing
        torch.cuda.synchronize()
        launched = count_launches() - before
        self._graph = torch.cuda.CUDAGraph()
        try:
            with _no_garbage_collection(), torch.cuda.graph(self._graph, pool=pool):
                before = count_launches()
                self._result, self.manifest = watched(step)
                captured = count_launches() - before
        except RuntimeError as error:
            raise GraphError(f"a step cannot be captured: {error}") from error
        self.check(eager)
        if captured != launched:
            raise GraphError(f"a step launches {launched} kernels and its recording {captured}: some left no trace")
        self._addresses, self._captured_at = addresses, addresses()

    def replay(self) -> Tensor:
        """Launch the graph; its result, which the device has yet to write. Raises GraphError if a buffer has moved."""
        if self._addresses() != self._captured_at:
            raise GraphError("a buffer has moved since the step was captured")
        self._graph.replay()
        return self._result

    def check(self, manifest: Manifest) -> None:
        """Raise GraphError, naming the operations, unless an eager step did just what was captured."""
        check_manifest(manifest, self.manifest)
