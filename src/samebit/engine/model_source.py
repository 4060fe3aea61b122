"""Turns a model name into a checkpoint folder and reads what the folder says about generation.

Knows where files are; does not read weights or build models.
"""

import importlib.resources
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebit.core.errors import CheckpointError, ModelNotFoundError

BUNDLED_MODELS = ("nano",)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# The last belongs to some drafters, and is to be seen so that it can be refused.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "mask_embedding.pt"]


def resolve_model(name: str) -> Path:
    """The checkpoint folder for a bundled model's name, a path, or a Hugging Face `org/name`.

    A folder wins over a hub name that looks the same; a bundled model wins over a folder. Files
    of a hub model are downloaded unless they are in the local cache. Raises ModelNotFoundError.
    """
    if name in BUNDLED_MODELS:
        return _assets() / name
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"model {name!r}: the folder has no config.json")
        return folder
    if not _HUB_NAME.fullmatch(name):
        raise ModelNotFoundError(
            f"model {name!r}: not a bundled model ({', '.join(BUNDLED_MODELS)}), "
            "not a folder, and not of the form org/name"
        )
    return _from_hub(name)


def bundled_drafter(name: str, method: str) -> Path | None:
    """The folder of the drafter that is bundled with a bundled model, if there is one."""
    folder = _assets() / f"{name}-{method}"
    return folder if name in BUNDLED_MODELS and folder.is_dir() else None


def _assets() -> Path:
    return Path(str(importlib.resources.files("samebit"))) / "assets"


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, rarely needed

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, permission and naming errors share no base class
        raise ModelNotFoundError(
            f"model {name!r}: no folder of that name, and the hub did not deliver it ({type(error).__name__}: {error})"
        ) from error


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a checkpoint recommends. None means that it says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def sampling(self) -> dict[str, Any]:  # Any: a number or a whole number
        """The sampling parameters that it does recommend, by the names of SamplingParams."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read `generation_config.json`; end tokens come from `config.json` if they are only there.

    Raises CheckpointError if a value has the wrong type.
    """
    generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    sources = [generation, config, text_config if isinstance(text_config, dict) else {}]
    eos: object = next((s["eos_token_id"] for s in sources if s.get("eos_token_id") is not None), [])
    given = eos if isinstance(eos, list) else [eos]
    eos_ids = [token_id for token_id in given if type(token_id) is int]
    if len(eos_ids) < len(given):
        raise CheckpointError(f"{folder}: eos_token_id={eos!r}: must be an integer or a list of them")
    sampled = generation.get("do_sample") is not False
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        temperature=_number(generation, "temperature", folder) if sampled else 0.0,
        top_p=_number(generation, "top_p", folder),
        top_k=_whole(generation, "top_k", folder),
        min_p=_number(generation, "min_p", folder),
        repetition_penalty=_number(generation, "repetition_penalty", folder),
    )


def read_json(path: Path) -> dict[str, Any]:  # Any: a JSON object
    """The JSON object in a file that a checkpoint may lack: then it is empty. Raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return value


def _number(source: dict[str, Any], name: str, folder: Path) -> float | None:
    value = source.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{folder}: {name}={value!r}: must be a number")
    return float(value)


def _whole(source: dict[str, Any], name: str, folder: Path) -> int | None:
    value = _number(source, name, folder)
    if value is not None and not value.is_integer():
        raise CheckpointError(f"{folder}: {name}={value!r}: must be a whole number")
    return None if value is None else int(value)
