"""All results of a step as one run of bytes: packed by the step itself, so that one copy brings them to the host. Knows no plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebit.runner.step import StepTensors

_FIELDS = [field.name for field in fields(StepTensors)]
_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float32: np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a field lies among the bytes, and what it is there."""

    name: str
    part: slice
    dtype: np.dtype[Any]  # Any: numpy's parameter for what an element is
    shape: tuple[int, ...]


class Results:
    """Where the results of a bucket's steps lie, and the host memory that they are copied to, for two steps in turn."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._hosts = [torch.empty(0, dtype=torch.uint8)] * 2

    def pack(self, result: StepTensors) -> Tensor:
        """The bytes of `result` [N] uint8 on its device, wide elements first, so that every field is aligned."""
        found = {name: getattr(result, name) for name in _FIELDS}
        names = sorted(_FIELDS, key=lambda name: -found[name].itemsize)
        parts = [found[name].contiguous().view(-1).view(torch.uint8) for name in names]
        self._places, end = [], 0
        for name, part in zip(names, parts, strict=True):
            first, end = end, end + part.shape[0]
            self._places.append(_Place(name, slice(first, end), _DTYPES[found[name].dtype], tuple(found[name].shape)))
        return torch.cat(parts)

    def copy(self, packed: Tensor) -> Callable[[], dict[str, np.ndarray]]:
        """Begin to copy what `pack` gave to the host. What is returned waits for it, and gives the fields of StepTensors by name.

        They are overwritten by the copy after the next.
        """
        if packed.device.type == "cpu":
            own = packed.clone()  # a replay of the same step writes to the same place
            return lambda: self._fields(own)
        self._hosts.reverse()
        if self._hosts[0].shape != packed.shape:
            self._hosts[0] = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        host, done = self._hosts[0], torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        host.copy_(packed, non_blocking=True)
        done.record()

        def read() -> dict[str, np.ndarray]:
            done.synchronize()
            return self._fields(host)

        return read

    def _fields(self, host: Tensor) -> dict[str, np.ndarray]:
        raw = host.numpy()
        return {place.name: raw[place.part].view(place.dtype).reshape(place.shape) for place in self._places}
