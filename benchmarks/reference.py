"""The same weights in transformers: the peer that benchmarks compare with."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def load_reference(folder: Path) -> Any:  # Any: from_pretrained has no usable type
    """The model of the same files in transformers, with the smallest towers where the configuration names none."""
    # Here, because only --reference needs them.
    from safetensors.torch import load_file, save_file  # noqa: PLC0415
    from transformers import InklingConfig, InklingForConditionalGeneration, logging  # noqa: PLC0415

    logging.set_verbosity_error()
    raw = json.loads((folder / "config.json").read_text())
    raw.setdefault("vision_config", {"num_hidden_layers": 3, "patch_size": 2, "temporal_patch_size": 2})
    raw.setdefault("audio_config", {"n_mel_bins": 1, "mel_vocab_size": 1})
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    with tempfile.TemporaryDirectory() as copy:
        # A scale may be stored without a dimension, which transformers does not accept.
        save_file({name: t if t.dim() else t[None] for name, t in tensors.items()}, f"{copy}/model.safetensors")
        (Path(copy) / "generation_config.json").write_text("{}")
        loaded: Any = InklingForConditionalGeneration.from_pretrained(
            copy,
            config=InklingConfig(**raw),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    model, report = loaded
    missing = {name for name in report["missing_keys"] if "_tower." not in name}
    if missing or report["unexpected_keys"]:
        raise SystemExit(f"transformers did not load {missing or report['unexpected_keys']}")
    return model.eval()
