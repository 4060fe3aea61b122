"""A trainable model to and from the tensors of the published Inkling layout.

Knows names, shapes and dtypes; writes no files (export.py does).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from samebit.models.checkpoint import Checkpoint, read_json
from samebit.models.inkling_config import parse_depths
from samebit.models.inkling_weights import Stored, stored_depths, stored_parameters
from samebit.train.model import PUBLISHED, Block, Inkling

# Published checkpoints keep these two in fp32 whatever the rest is.
_ALWAYS_FP32 = ("mlp.gate.bias", "mlp.gate.global_scale")


def load_model(folder: Path) -> Inkling:
    """The model in `folder`, trainable, in fp32. Raises CheckpointError for a missing or misshapen tensor."""
    model = Inkling(read_json(folder / "config.json"))
    with Checkpoint(folder) as checkpoint, torch.no_grad():
        for stored, tensor in stored_tensors(model):
            checkpoint.check(stored.names[0], stored.shapes)
            tensor.copy_(stored.join([checkpoint.take(stored.names[0])]).view_as(tensor))
    return model


def published_tensors(model: Inkling, dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies on the CPU under their published names, gate and up rows interleaved, of `dtype` where the layout is free."""
    found = {}
    for stored, tensor in stored_tensors(model):
        name = stored.names[0]
        value = tensor.detach().to("cpu", torch.float32 if name.endswith(_ALWAYS_FP32) else dtype)
        if ".w13_" in name or ".shared_w13_" in name:
            value = torch.unflatten(value, -2, (2, -1)).transpose(-3, -2).flatten(-3, -2)
        found[name] = value.contiguous().clone()
    return found


def stored_tensors(model: Inkling) -> Iterator[tuple[Stored, Tensor]]:
    """Every parameter and buffer of the model with where a published checkpoint keeps it."""
    stored = stored_parameters(model.config, PUBLISHED)
    for key, tensor in model.weights.items():
        yield stored[key], tensor
    yield from _of_blocks(model.blocks, stored)
    drafts = parse_depths(model.raw)
    if drafts is None:
        return
    stored = stored_depths(drafts)
    yield from _of_blocks((depth.get_submodule("block") for depth in model.depths), stored)
    for i, depth in enumerate(model.depths):
        for key, tensor in depth.get_submodule("weights").named_parameters():
            yield stored[f"{i}.{key}"], tensor


def _of_blocks(blocks: Iterable[torch.nn.Module], stored: Mapping[str, Stored]) -> Iterator[tuple[Stored, Tensor]]:
    for i, block in enumerate(blocks):
        assert isinstance(block, Block), "a model is made of blocks"
        for key, tensor in [*block.weights.items(), *block.named_buffers(recurse=False)]:
            yield stored[f"{i}.{key}"], tensor
