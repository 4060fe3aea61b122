"""A trainable model to and from the tensors of the published Inkling layout.

Knows names, shapes and dtypes; writes no files (export.py does).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from samebit.models.checkpoint import Checkpoint, read_json
from samebit.models.inkling_config import InklingConfig
from samebit.models.inkling_weights import Stored, stored_parameters
from samebit.train.model import PUBLISHED, Block, Inkling, depth_config

_DEPTH_NAMES = {
    "hidden_norm": "hidden_norm.weight",
    "embed_norm": "embed_norm.weight",
    "input_proj": "input_proj.weight",
}
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
    yield from _of_blocks(list(model.blocks), stored, {})
    drafts = depth_config(model.raw)
    if drafts is not None:
        yield from _of_depths(model, drafts)


def _of_depths(model: Inkling, drafts: InklingConfig) -> Iterator[tuple[Stored, Tensor]]:
    blocks, renamed = [], {}
    for j, depth in enumerate(model.depths):
        prefix = f"model.mtp.layers.{j}."
        for key, tensor in depth.get_submodule("weights").named_parameters():
            yield Stored((prefix + _DEPTH_NAMES[key],), (tuple(tensor.shape),), lambda tensors: tensors[0]), tensor
        blocks.append(depth.get_submodule("block"))
        renamed[f"model.llm.layers.{j}."] = f"{prefix}transformer_block."
    yield from _of_blocks(blocks, stored_parameters(drafts, PUBLISHED), renamed)


def _of_blocks(
    blocks: list[torch.nn.Module], stored: dict[str, Stored], renamed: dict[str, str]
) -> Iterator[tuple[Stored, Tensor]]:
    for i, block in enumerate(blocks):
        assert isinstance(block, Block), "a model is made of blocks"
        for key, tensor in [*block.weights.items(), *block.named_buffers(recurse=False)]:
            place = stored[f"{i}.{key}"]
            name = place.names[0]
            for before, after in renamed.items():
                name = after + name.removeprefix(before) if name.startswith(before) else name
            yield Stored((name,), place.shapes, place.join), tensor
