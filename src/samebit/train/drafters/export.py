"""Writes a trained drafter as a folder that the engine loads: the published layout of its kind, and a card.

Knows files; block drafters get a folder of their own, draft depths one with the whole model that they belong to.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from samebit.speculative.block_weights import CALIBRATION_FILE
from samebit.train.assessment import table
from samebit.train.drafters.calibrate import Calibration
from samebit.train.drafters.evaluate import Acceptance
from samebit.train.drafters.loop import Learner
from samebit.train.export import write_weights
from samebit.train.model import Inkling

_TITLES = {"dflash": "DFlash", "dspark": "DSpark"}
_HEAD = """---
license: apache-2.0
---

# {title} drafter for {target}

It guesses {num_drafts} tokens a step for {target}, and for no other model. {size} parameters, without embedding and head, which are the
target's.

```
samebit generate {target} --speculative-config '{{"method": "{method}", "model": "FOLDER"}}' -p "def "
```
"""


def export_block(
    learner: Learner,
    raw: Mapping[str, Any],  # Any: JSON
    target_name: str,
    measured: Sequence[Acceptance],
    calibration: Calibration | None,
    history: Sequence[Mapping[str, Any]],
) -> Path:
    """Write a block drafter to the `model` folder in its learner's; bf16."""
    folder = learner.folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", torch.bfloat16).clone() for name, p in learner.student.parameters.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    if calibration is not None:
        (folder / CALIBRATION_FILE).write_text(json.dumps(dataclasses.asdict(calibration), indent=1) + "\n")
    size = sum(tensor.numel() for tensor in tensors.values())
    head = _HEAD.format(
        title=_TITLES[learner.method],
        target=target_name,
        method=learner.method,
        num_drafts=learner.student.num_drafts,
        size=f"{size / 1e6:.2f} M",
    )
    parts = [head, _measured(measured), _calibrated(calibration), _runs(history)]
    (folder / "README.md").write_text("\n".join(part for part in parts if part), encoding="utf-8")
    return folder


def export_depths(
    learner: Learner,
    target: Inkling,
    target_folder: Path,
    measured: Sequence[Acceptance],
    history: Sequence[Mapping[str, Any]],  # Any: JSON
) -> Path:
    """Write the whole model with its trained depths to the `model` folder in the learner's; all but weights and card as they were."""
    folder = learner.folder / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for path in target_folder.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    write_weights(target, folder, torch.bfloat16)
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.is_file() else ""
    added = f"# Draft depths, trained on\n\n{_measured(measured)}\n{_runs(history)}"
    card.write_text(f"{before}\n{added}", encoding="utf-8")
    return folder


def _measured(measured: Sequence[Acceptance]) -> str:
    rows = [
        (
            found.name,
            found.temperature,
            found.num_blocks,
            f"{found.length:.2f}",
            " ".join(f"{100 * share:.0f}" for share in found.accepted),
            f"{found.length_by_ratio:.2f}",
            " ".join(f"{100 * share:.0f}" for share in found.overlap),
        )
        for found in measured
    ]
    head = ("text", "temperature", "blocks", "length", "accepted, %", "by ratio", "in common, %")
    return "\n".join(
        [
            "## Acceptance\n",
            table(head, rows),
            "\nContinuations by the target itself, measured in the training model. *Length*: tokens a step, the target's own next one among",
            "them. *Accepted*: steps in which the guesses up to the first, second, ... position are all what the target draws, the noise being",
            "the same. *In common*: of the distributions of target and drafter at temperature 1, at each position after true tokens; *by ratio*:",
            "the length that acceptance by that share would give.\n",
        ]
    )


def _calibrated(calibration: Calibration | None) -> str:
    if calibration is None:
        return ""
    rows = [
        (k + 1, f"{t:.2f}", f"{100 * before:.1f} %", f"{100 * after:.1f} %")
        for k, (t, before, after) in enumerate(
            zip(calibration.temperatures, calibration.ece_before, calibration.ece_after, strict=True)
        )
    ]
    head = ("position", "temperature", "error before", "error after")
    return "\n".join(
        [
            "## Confidence\n",
            f"Temperatures of the confidence logits, fitted to {calibration.num_samples} blocks ({calibration.dataset}). *Error*: mean distance",
            "between the product of confidences and the share of accepted guesses, over 15 bins.\n",
            table(head, rows) + "\n",
        ]
    )


def _runs(history: Sequence[Mapping[str, Any]]) -> str:  # Any: JSON
    rows = [
        (
            entry["stages"],
            entry["steps"],
            f"{entry['tokens'] / 1e6:.1f} M",
            f"{entry['seconds']:.0f}",
            f"{entry['own_tokens'] / 1e6:.1f} M in {entry['own_seconds']:.0f} s",
            ", ".join(f"{name} {loss:.3f}" for name, loss in entry["losses"].items()),
        )
        for entry in history
    ]
    head = ("run", "steps", "tokens read", "seconds", "written by the target", "last losses")
    return f"## Training\n\n{table(head, rows)}\n\nSteps, tokens and seconds count from the start.\n"
