"""Measures a drafter by generating with the engine: tokens a step, on what `evaluate` continues, greedily and at temperature 1.

The engine's own counts, with its own noise. Knows the engine; any method that it serves can be measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebit.core.errors import ConfigError
from samebit.core.request import SamplingParams, SpeculationCounts
from samebit.engine.llm import LLM
from samebit.models.checkpoint import read_json
from samebit.speculative.block_config import parse_block_config
from samebit.train.assessment import table
from samebit.train.drafters.evaluate import prompts
from samebit.train.drafters.recipe import METHODS, drafter_recipe
from samebit.train.tokens import load_data

# A block drafter's method names the one that is bundled with the target.
_NAMED = (*METHODS, "ngram")


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of text: steps that verified guesses, tokens of such a step, tokens a step of all, with or without guesses, and the
    share of the steps with guesses in which so many were accepted.
    """

    name: str
    temperature: float
    num_drafts: int
    length: float
    length_of_all: float
    accepted: list[float]


def assess(
    target: str, drafter: str, data_folder: Path, recipe: str, *, num_threads: int | None = None
) -> list[Measured]:
    """Measure `drafter`, a folder, "mtp" or "ngram", for `target` on a prepared corpus.

    Raises ConfigError if an answer differs from the one without guesses.
    """
    texts = prompts(load_data(data_folder), drafter_recipe(recipe).measures)
    longest = max(max(map(len, begun)) + new for begun, new in texts.values())
    settings: dict[str, Any] = {"num_threads": num_threads, "max_model_len": longest, "enable_prefix_caching": False}
    plain, guessing = LLM(target, **settings), LLM(target, speculative_config=_settings(drafter), **settings)
    found = []
    for name, (begun, new) in texts.items():
        for temperature in (0.0, 1.0):
            params = [SamplingParams(temperature=temperature, max_tokens=new, seed=i) for i in range(len(begun))]
            expected, outputs = plain.generate(begun, params), guessing.generate(begun, params)
            if any(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in zip(expected, outputs, strict=True)):
                raise ConfigError(f"{drafter}: changed an answer of {target}, which is a fault of the engine")
            counts = sum((o.metrics.speculation for o in outputs if o.metrics is not None), SpeculationCounts())
            drafts = max(1, counts.num_drafts)
            accepted = [num / drafts for num in counts.accepted_per_position]
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            of_all = num_tokens / (num_tokens - counts.num_accepted_tokens)
            length = counts.mean_acceptance_length
            found.append(Measured(name, temperature, counts.num_drafts, length, of_all, accepted))
    return found


def run(
    target: str, drafter: str, data_folder: Path, recipe: str, json_file: Path | None, *, num_threads: int | None = None
) -> str:
    """What `assess` finds as a Markdown table; also written to `json_file`."""
    found = assess(target, drafter, data_folder, recipe, num_threads=num_threads)
    if json_file is not None:
        json_file.write_text(json.dumps([dataclasses.asdict(measured) for measured in found], indent=1) + "\n")
    return _markdown(found)


def _settings(drafter: str) -> dict[str, Any]:
    # All guesses are verified, whatever they cost.
    settings: dict[str, Any] = {"token_cost": 0.0}
    if drafter in _NAMED:
        return settings | {"method": drafter}
    folder = Path(drafter)
    if not folder.is_dir():
        raise ConfigError(f"drafter={drafter!r}: is no folder, nor one of {', '.join(_NAMED)}")
    return settings | {"method": parse_block_config(read_json(folder / "config.json")).method, "model": drafter}


def _markdown(found: Sequence[Measured]) -> str:
    rows = [
        (
            *(m.name, m.temperature, m.num_drafts, f"{m.length:.2f}", f"{m.length_of_all:.2f}"),
            " ".join(f"{100 * share:.0f}" for share in m.accepted),
        )
        for m in found
    ]
    head = ("text", "temperature", "steps with guesses", "tokens a step of these", "of all", "accepted, %")
    return table(head, rows)
