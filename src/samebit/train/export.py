"""Writes a trained model as a folder that samebit and transformers load: the published Inkling layout, with all that goes with it.

Knows files; the chat template and generation defaults are those of the bundled nano.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from samebit.core.errors import ConfigError
from samebit.engine.model_source import resolve_model
from samebit.models.checkpoint import INDEX_FILE, read_json
from samebit.train.assessment import read_assessment
from samebit.train.card import card
from samebit.train.layout import load_model, published_tensors
from samebit.train.model import Inkling
from samebit.train.tokens import SPECIAL_TOKENS

SHARD_BYTES = 12_000_000
_COPIED = ("chat_template.jinja", "generation_config.json")


def export(
    model: Inkling,
    data_folder: Path,
    target: Path,
    history: Sequence[Mapping[str, Any]],  # Any: JSON
    *,
    name: str = "nano",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the checkpoint to `target`, which must be new or empty. Shards hold at most 12 MB unless one tensor is larger."""
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target}: is not empty")
    tokenizer = Tokenizer.from_file(str(data_folder / "tokenizer.json"))
    if tokenizer.get_vocab_size() != model.config.unpadded_vocab_size:
        raise ConfigError(
            f"{data_folder}: its tokenizer has {tokenizer.get_vocab_size()} tokens, the model {model.config.unpadded_vocab_size}"
        )
    target.mkdir(parents=True, exist_ok=True)
    write_weights(model, target, dtype)
    _write_json(target / "config.json", model.raw)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(model))
    for file in _COPIED:
        (target / file).write_bytes((resolve_model("nano") / file).read_bytes())
    manifest = read_json(data_folder / "manifest.json")
    (target / "README.md").write_text(card(model, manifest, history, name), encoding="utf-8")


def write_weights(model: Inkling, target: Path, dtype: torch.dtype) -> None:
    """Write all tensors of a checkpoint to `target`."""
    _write_shards({**published_tensors(model, dtype), **_tower_tensors(model, dtype)}, target)


def write_card(folder: Path, data_folder: Path, history: Path, assessment: Path | None) -> None:
    """Write the card of an exported model anew, with what `Assessment.write` has written."""
    found = None if assessment is None else read_assessment(assessment)
    try:
        stages = json.loads(history.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{history}: is not the history of a run ({error})") from error
    text = card(load_model(folder), read_json(data_folder / "manifest.json"), stages, folder.name, found)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _write_shards(tensors: Mapping[str, Tensor], target: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(target / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tower_tensors(model: Inkling, dtype: torch.dtype) -> dict[str, Tensor]:
    """Zero weights of the image and audio towers that the configuration names, which other loaders look for."""
    hidden = model.config.hidden_size
    audio = model.raw.get("audio_config")
    if audio is None:
        return {}
    rows = audio["n_mel_bins"] * audio["mel_vocab_size"]
    return {
        "model.audio.encoder.weight": torch.zeros(rows, hidden, dtype=dtype),
        "model.audio.final_norm.weight": torch.ones(hidden, dtype=dtype),
    }


def _tokenizer_config(model: Inkling) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.model_max_length,
        "eos_token": SPECIAL_TOKENS[model.raw["eos_token_id"]],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
