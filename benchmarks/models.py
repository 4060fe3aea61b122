"""Models of real shapes with random weights, for work on speed and on exactness at size.

    python -m benchmarks.models bench-8b /tmp/bench-8b
    python -m benchmarks.models bench-8b /tmp/slice --layers 4

Speed does not depend on what weights say, but for the routing of experts, which random weights spread evenly.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from samebit.engine.model_source import resolve_model
from samebit.models.checkpoint import INDEX_FILE
from samebit.models.inkling_config import parse_config
from samebit.models.inkling_weights import Stored, stored_parameters

_COMMON: dict[str, Any] = {
    "d_rel": 16,
    "rel_extent": 1024,
    "sliding_window_size": 512,
    "head_dim": 128,
    "swa_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 2.5,
    "sconv_kernel_size": 4,
    "rms_norm_eps": 1e-6,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
}
# Text configs in the published spelling, in which the dense layers' width has a name of its own.
SHAPES: dict[str, dict[str, Any]] = {
    # 7.64 B parameters, 1.27 B of them active.
    "bench-8b": _COMMON
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 16,
        "dense_mlp_idx": 1,
        "dense_intermediate_size": 6144,
        "intermediate_size": 768,
        "n_routed_experts": 64,
        "logits_mup_width_multiplier": 8.0,
        "vocab_size": 32768,
        "unpadded_vocab_size": 32768,
        "model_max_length": 32768,
    },
    # The shapes of Inkling-Small, 6 layers of 42.
    "inkling-small-layer": _COMMON
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "swa_num_attention_heads": 32,
        "dense_mlp_idx": 2,
        "dense_intermediate_size": 16384,
        "intermediate_size": 2048,
        "n_routed_experts": 256,
        "logits_mup_width_multiplier": 16.0,
        "vocab_size": 201024,
        "unpadded_vocab_size": 200058,
        "model_max_length": 1048576,
    },
}
_FULL_EVERY = 6
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def config_json(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """A whole config.json object; one layer in six has full attention, the last of each six."""
    text = dict(SHAPES[name])
    text["num_hidden_layers"] = num_layers or text["num_hidden_layers"]
    text["local_layer_ids"] = [i for i in range(text["num_hidden_layers"]) if (i + 1) % _FULL_EVERY]
    if num_layers is not None and num_layers < _FULL_EVERY:
        text["local_layer_ids"] = list(range(num_layers - 1))
    return {"model_type": "inkling_mm_model", "eos_token_id": 6, "torch_dtype": "bfloat16", "text_config": text}


def make(name: str, folder: Path, *, num_layers: int | None = None, seed: int = 0) -> Path:
    """Write a checkpoint in bf16, a file a layer, with nano's tokenizer; on a GPU if there is one."""
    raw = config_json(name, num_layers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    for file in _COPIED:
        shutil.copy(resolve_model("nano") / file, folder / file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    files: dict[str, dict[str, Tensor]] = {}
    index: dict[str, str] = {}
    stored = stored_parameters(parse_config(raw), {"model.llm.embed.weight", "model.llm.unembed.weight"})
    for key, parameter in stored.items():
        part, dot, _ = key.partition(".")
        file = f"model-{part if dot else 'trunk'}.safetensors"
        tensors = {tensor: _random(key, parameter, generator) for tensor in parameter.names}
        files.setdefault(file, {}).update(tensors)
        index |= dict.fromkeys(tensors, file)
    total = sum(value.nbytes for tensors in files.values() for value in tensors.values())
    for file, tensors in files.items():
        save_file({tensor: value.cpu() for tensor, value in tensors.items()}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return folder


def _random(key: str, parameter: Stored, generator: torch.Generator) -> Tensor:
    shape = parameter.shapes[0]
    if key.endswith(("norm", "scale")):
        return torch.ones(shape, dtype=torch.bfloat16, device=generator.device)
    spread = 0.1 if key.endswith("conv") else 0.02
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16) * spread
    return values.float() if key.endswith("router_bias") else values


def main() -> None:
    """Write the model that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="so many layers instead of all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make(arguments.name, arguments.folder, num_layers=arguments.layers, seed=arguments.seed))


if __name__ == "__main__":
    main()
