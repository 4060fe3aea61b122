"""What `samebit train` does: prepare a corpus, run a stage, export. Knows folders; prints through the log."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from samebit.core.errors import ConfigError
from samebit.engine.model_source import resolve_model
from samebit.train.corpus import collect
from samebit.train.dialogues import talk
from samebit.train.export import export
from samebit.train.loop import HISTORY_FILE, STATE_FILE, Trainer, stage_seed
from samebit.train.phases import Phases
from samebit.train.recipe import RECIPES, Recipe
from samebit.train.tokens import load_data, prepare, sentences, tokenizer_of
from samebit.train.writers import WriterProcesses

_NUM_TALKS = 200

_log = logging.getLogger(__name__)


def prepare_corpus(
    target: Path,
    sites: Sequence[Path],
    only: Sequence[str],
    max_files: int | None,
    max_tokens: int,
    recipe: str,
    tokenizer_of_model: str | None,
) -> None:
    """Collect, tokenise and write a corpus for a recipe's vocabulary, or in the tokens of a model."""
    _show_log()
    tokenizer = None if tokenizer_of_model is None else tokenizer_of(resolve_model(tokenizer_of_model))
    vocab_size = _recipe(recipe).raw["text_config"]["unpadded_vocab_size"]
    corpus = collect(sites, only, max_files=max_files)
    _log.info("%d packages, held out: %s", len(corpus.train), ", ".join(p.name for p in corpus.held_out))
    prose = sentences(corpus.train)
    talks = [talk(seed, prose) for seed in range(_NUM_TALKS)]
    prepare(corpus, talks, target, vocab_size=vocab_size, max_tokens=max_tokens, tokenizer=tokenizer)
    for path in sorted(target.iterdir()):
        _log.info("%10d bytes  %s", path.stat().st_size, path)


def run_stage(
    data_folder: Path,
    run_folder: Path,
    number: int,
    recipe: str,
    *,
    start: Path | None,
    workers: int | None,
    seconds: float | None,
    seed: int,
) -> None:
    """Run one stage, on a GPU where there is one, and leave state, history and evaluation in `run_folder`."""
    _show_log()
    phases = Phases()
    chosen = _recipe(recipe)
    length = chosen.stage(number).length
    # Three cores are left to the trainer and the system.
    count = max(1, (os.cpu_count() or 4) - 3) if workers is None else workers
    with ExitStack() as stack:
        source = None
        if count:
            # First, so that they start while data are read and a GPU wakes.
            of_stage = stage_seed(seed, number)
            source = stack.enter_context(WriterProcesses(data_folder, length=length, seed=of_stage, count=count))
        data = load_data(data_folder)
        phases.end("data")
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trainer = Trainer(chosen, run_folder, device, seed=seed, start=start)
        phases.end("model")
        done = trainer.progress.steps
        _log.info("%.2f M parameters on %s, %d steps so far", trainer.model.num_parameters() / 1e6, device, done)
        found = trainer.train(data, number, source=source, seconds=seconds, phases=phases)
    _log.info("stage %d: %d steps; %s", number, trainer.progress.steps, phases.line())
    _log.info("%s", found.line())


def export_run(data_folder: Path, run_folder: Path, target: Path, recipe: str) -> None:
    """Write the model that `run_folder` holds as a checkpoint."""
    _show_log()
    if not (run_folder / STATE_FILE).is_file():
        raise ConfigError(f"{run_folder}: no stage has ended here")
    trainer = Trainer(_recipe(recipe), run_folder, torch.device("cpu"))
    history = json.loads((run_folder / HISTORY_FILE).read_text())
    export(trainer.model, data_folder, target, history, name=target.name)
    _log.info("%s: %d bytes", target, sum(p.stat().st_size for p in target.iterdir()))


def _show_log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"recipe={name!r}: is not one of {', '.join(RECIPES)}")
    return RECIPES[name]
