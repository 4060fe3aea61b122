"""What `samebit train drafter` does: train, measure, calibrate, write. Knows folders; prints through the log."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from samebit.core.errors import ConfigError
from samebit.engine.model_source import resolve_model
from samebit.train.drafters.calibrate import calibrated
from samebit.train.drafters.evaluate import Acceptance, Continuations, Samples, acceptance, continuations
from samebit.train.drafters.export import export_block, export_depths
from samebit.train.drafters.loop import DrafterTrainer, Learner, read_history
from samebit.train.drafters.recipe import BLOCK_METHODS, DrafterRecipe, block_config_json, drafter_recipe
from samebit.train.layout import load_model
from samebit.train.phases import Phases
from samebit.train.tokens import TrainingData, load_data, tokenizer_of
from samebit.train.writers import WriterProcesses

MEASURES_FILE = "acceptance.json"

_log = logging.getLogger(__name__)


def train_drafters(
    target_name: str,
    data_folder: Path,
    run_folder: Path,
    methods: Sequence[str],
    recipe_name: str,
    *,
    seconds: float | None,
    own_share: float | None,
    start: Path | None,
    workers: int | None,
    seed: int,
) -> None:
    """Train drafters for a target side by side, on a GPU where there is one; leave each in `run_folder` under its method's name."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    phases, recipe = Phases(), drafter_recipe(recipe_name)
    # Three cores are left to the trainer and the system.
    count = max(1, (os.cpu_count() or 4) - 3) if workers is None else workers
    with ExitStack() as stack:
        source = None
        if count:
            # First, so that they start while data are read and a GPU wakes.
            source = stack.enter_context(WriterProcesses(data_folder, length=recipe.row_length, seed=seed, count=count))
        data = load_data(data_folder)
        folder = resolve_model(target_name)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        target = load_model(folder)
        num_tokens, wanted = data.tokenizer.get_vocab_size(), target.config.unpadded_vocab_size
        if num_tokens != wanted or data.tokenizer.get_vocab() != tokenizer_of(folder).get_vocab():
            raise ConfigError(f"{data_folder}: its tokenizer is not that of {target_name}")
        trainer = DrafterTrainer(recipe, target, run_folder, methods, device, start=start, seed=seed)
        phases.end("data and models")
        for learner in trainer.learners:
            size = sum(p.numel() for p in learner.student.parameters.values())
            _log.info("%s: %.2f M parameters, %d steps so far", learner.method, size / 1e6, learner.progress.steps)
        trainer.train(data, source=source, seconds=seconds, own_share=own_share, phases=phases)
    finish(trainer, recipe, data, folder, target_name, phases)
    _log.info("%s", phases.line())


def finish(
    trainer: DrafterTrainer, recipe: DrafterRecipe, data: TrainingData, folder: Path, target_name: str, phases: Phases
) -> None:
    """Measure what has been trained as it will be stored, and write it."""
    for learner in trainer.learners:
        _round(learner)
    texts = continuations(trainer.target, data, recipe.measures)
    phases.end("continuations")
    for learner in trainer.learners:
        measured, samples = _measured(trainer, learner, recipe, texts)
        history = read_history(learner.folder)
        if learner.method in BLOCK_METHODS:
            drawn = [of for found, of in zip(measured, samples, strict=True) if found.temperature]
            calibration = None
            if learner.method == "dspark":
                logits, accepted = (
                    torch.cat(parts) for parts in zip(*((s.logits, s.accepted) for s in drawn), strict=True)
                )
                calibration = calibrated(logits, accepted, "held-out code and dialogues, drawn at temperature 1")
            raw = block_config_json(learner.method, recipe.shape, trainer.target.config)
            written = export_block(learner, raw, Path(target_name).name, measured, calibration, history)
        else:
            written = export_depths(learner, trainer.target, folder, measured, history)
        _log.info("%s: %d bytes", written, sum(p.stat().st_size for p in written.iterdir()))
    phases.end("evaluation")


def _measured(
    trainer: DrafterTrainer, learner: Learner, recipe: DrafterRecipe, texts: Sequence[Continuations]
) -> tuple[list[Acceptance], list[Samples]]:
    """The acceptance on each kind of text, which also goes into the log and into the learner's folder."""
    found = [acceptance(trainer.target, learner.student, recipe.shape.taps, kind) for kind in texts]
    for measured, _ in found:
        shares = " ".join(f"{100 * share:.0f}" for share in measured.accepted)
        _log.info(
            "%s, %s, temperature %g: length %.2f (accepted %s), %.2f by ratio",
            learner.method, measured.name, measured.temperature, measured.length, shares, measured.length_by_ratio,
        )  # fmt: skip
    values = [dataclasses.asdict(measured) for measured, _ in found]
    (learner.folder / MEASURES_FILE).write_text(json.dumps(values, indent=1) + "\n")
    return [measured for measured, _ in found], [samples for _, samples in found]


@torch.no_grad()
def _round(learner: Learner) -> None:
    """What is measured shall be what is stored, in bf16."""
    for parameter in learner.student.parameters.values():
        parameter.copy_(parameter.to(torch.bfloat16))
