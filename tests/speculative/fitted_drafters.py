"""Drafters of every method for a model: its own draft heads, and block drafters, of random weights where none are bundled."""

from __future__ import annotations

from pathlib import Path

from samebit.core.config import SpeculativeConfig
from samebit.engine.model_source import bundled_drafter, resolve_model
from samebit.models.checkpoint import read_json
from tests.speculative.block_checkpoint import METHODS, write_drafter


def fitted_drafters(target: str, base: Path) -> dict[str, SpeculativeConfig]:
    """By method, those that the model `target` can have; the folders of block drafters are made in `base`."""
    raw = read_json(resolve_model(target) / "config.json")
    sizes = raw["text_config"]
    found = {"ngram": SpeculativeConfig(method="ngram")}
    if raw.get("mtp_config"):
        found["mtp"] = SpeculativeConfig(method="mtp")
    for method, config in METHODS.items():
        if bundled_drafter(target, method):
            found[method] = SpeculativeConfig(method=method)
            continue
        fitted = config | {key: sizes[key] for key in ("hidden_size", "vocab_size")}
        fitted |= {
            "num_target_layers": sizes["num_hidden_layers"],
            "max_position_embeddings": sizes["model_max_length"],
        }
        fitted["dflash_config"] = config["dflash_config"] | {"mask_token_id": sizes["vocab_size"] - 3}
        folder: Path = write_drafter(base / method, fitted)[0]
        found[method] = SpeculativeConfig(method=method, model=str(folder))
    return found
