"""One copy from the device for all results of a step. Knows no plan."""

from __future__ import annotations

from dataclasses import fields
from math import prod

import torch
from torch import Tensor

from samebit.runner.step import StepTensors

_ALIGNMENT = 8


def on_host(result: StepTensors) -> StepTensors:
    """`result` in host memory, as views of one buffer; as it is, if it is there already."""
    found = {field.name: getattr(result, field.name) for field in fields(StepTensors)}
    if result.tokens.device.type == "cpu":
        return result
    parts = [_as_bytes(tensor) for tensor in found.values()]
    device = torch.cat(parts)
    host = torch.empty(device.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(device, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    ends = torch.tensor([part.shape[0] for part in parts]).cumsum(0).tolist()
    views = {}
    for (name, tensor), part, end in zip(found.items(), parts, ends, strict=True):
        first = end - part.shape[0]
        size = prod(tensor.shape) * tensor.dtype.itemsize
        views[name] = host[first : first + size].view(tensor.dtype).view(tensor.shape)
    return StepTensors(**views)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, padded so that what follows is aligned."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.shape[0] % _ALIGNMENT))
