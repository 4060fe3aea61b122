"""All results of a step as one run of bytes: packed by the step itself, so that one copy brings them to the host. Knows no plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samebit.kernels.sets import KernelSet
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


class _Host:
    """Memory of the host for the results of one step, its fields, and on a GPU what tells that they have come."""

    def __init__(self, places: Sequence[_Place], packed: Tensor) -> None:
        on_device = packed.device.type != "cpu"
        self._bytes = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=on_device)
        self._come = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]  # torch has no types here
        raw = self._bytes.numpy()
        self._fields = {place.name: raw[place.part].view(place.dtype).reshape(place.shape) for place in places}

    def begin(self, packed: Tensor) -> None:
        """Begin to copy results to here, over those that are."""
        self._bytes.copy_(packed, non_blocking=True)
        if self._come is not None:
            self._come.record()

    def read(self) -> dict[str, np.ndarray]:
        """Wait for what was begun; the fields by name."""
        if self._come is not None:
            self._come.synchronize()
        return self._fields


class Results:
    """Where the results of a bucket's steps lie, and the host memory that they are copied to, for two steps in turn."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._places: list[_Place] = []
        self._hosts: deque[_Host] = deque(maxlen=2)

    def pack(self, result: StepTensors) -> Tensor:
        """The bytes of `result` [N] uint8 on its device, wide elements first, so that every field is aligned.

        All steps of a bucket have results of the same shapes: where a field lies is settled by the first.
        """
        if not self._places:
            self._places = _places(result)
        return self._kernels.joined_bytes([_bytes_of(result, place) for place in self._places])

    def copy(self, packed: Tensor) -> Callable[[], dict[str, np.ndarray]]:
        """Begin to copy what `pack` gave to the host. What is returned waits for it, and gives the fields of StepTensors by name.

        They are overwritten by the copy after the next.
        """
        if len(self._hosts) < 2:
            self._hosts.append(_Host(self._places, packed))
        else:
            self._hosts.rotate()
        self._hosts[-1].begin(packed)
        return self._hosts[-1].read


def _places(result: StepTensors) -> list[_Place]:
    found: list[_Place] = []
    end = 0
    for name in sorted(_FIELDS, key=lambda name: -getattr(result, name).itemsize):
        tensor = getattr(result, name)
        first, end = end, end + tensor.nbytes
        found.append(_Place(name, slice(first, end), _DTYPES[tensor.dtype], tuple(tensor.shape)))
    return found


def _bytes_of(result: StepTensors, place: _Place) -> Tensor:
    tensor: Tensor = getattr(result, place.name)
    assert tensor.shape == place.shape, "a bucket's results have the same shapes in each step"
    return tensor.contiguous().view(-1).view(torch.uint8)
