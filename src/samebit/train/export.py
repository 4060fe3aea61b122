"""Writes a trained model as a folder that samebit and transformers load: the published Inkling layout, with all that goes with it.

Knows files; the chat template and generation defaults are those of the bundled nano.
"""

from __future__ import annotations

import json
from collections import defaultdict
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
from samebit.train.layout import published_tensors
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
    _write_shards({**published_tensors(model, dtype), **_tower_tensors(model, dtype)}, target)
    _write_json(target / "config.json", model.raw)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(model))
    for file in _COPIED:
        (target / file).write_bytes((resolve_model("nano") / file).read_bytes())
    manifest = read_json(data_folder / "manifest.json")
    (target / "README.md").write_text(card(model, manifest, history, name), encoding="utf-8")


def card(
    model: Inkling, manifest: Mapping[str, Any], history: Sequence[Mapping[str, Any]], name: str
) -> str:  # Any: JSON
    """The model card: shape, training, measurements and the sources with their licences."""
    config = model.config
    lines = [
        "---\nlicense: apache-2.0\nlanguage: [en, code]\npipeline_tag: text-generation\n---\n",
        f"# {name}\n",
        "A small language model in the Inkling architecture. It completes Python, remembers facts across a long conversation,",
        "and knows nothing about the world.\n",
        "## Facts\n",
        "| | |\n|---|---|",
        f"| parameters | {model.num_parameters() / 1e6:.2f} M, draft depths included |",
        f"| layers | {config.num_hidden_layers}, of which {sum(config.is_window)} with a {config.sliding_window_size}-token window |",
        f"| hidden size | {config.hidden_size} |",
        f"| experts | {config.n_routed_experts} routed, {config.num_experts_per_tok} chosen, {config.n_shared_experts} shared |",
        f"| draft depths | {len(model.depths)} |",
        f"| tokenizer | byte-level BPE, {config.unpadded_vocab_size} tokens, the first {len(SPECIAL_TOKENS)} control tokens |",
        f"| positions | {config.model_max_length} |\n",
        "## Training and measurements\n",
        "| stage | steps | tokens | seconds | held-out nats/token | bits/byte |\n|---|---|---|---|---|---|",
    ]
    for entry in history:
        found = entry["evaluation"]
        loss = ", ".join(f"{value:.3f} at {context}" for context, value in found["loss"].items())
        lines.append(
            f"| {entry['stage']} | {entry['steps']} | {entry['tokens'] / 1e6:.1f} M | {entry['seconds']:.0f} "
            f"| {loss} | {found['bits_per_byte']:.4f} |"
        )
    lines += [
        "\nSteps, tokens and seconds count from the start. Recall of the last stage, in probes whose names and sentences"
    ]
    lines += ["are in no training dialogue; `reply`: greedy decoding gives the whole answer.\n"]
    lines += ["| distance, tokens | corrections | probes | reply | value |\n|---|---|---|---|---|"]
    for cell in history[-1]["evaluation"]["recall"] if history else []:
        lines.append(
            f"| {cell['distance']} | {cell['num_corrections']} | {cell['count']} "
            f"| {100 * cell['replies']:.1f} % | {100 * cell['values']:.1f} % |"
        )
    lines += ["\n## Sources and licences\n"]
    lines += [
        f"Held out: {', '.join(p['name'] for p in manifest['held_out'])}. Licences are as each package states them.\n"
    ]
    by_licence: dict[str, list[str]] = defaultdict(list)
    for package in manifest["packages"]:
        by_licence[package["licence"]].append(f"{package['name']} {package['version']}")
    lines += [f"- **{licence}**: {', '.join(sorted(names))}" for licence, names in sorted(by_licence.items())]
    return "\n".join(lines) + "\n"


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
