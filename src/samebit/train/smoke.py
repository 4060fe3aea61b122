"""The whole path at toy size: a small corpus, two stages with a resume between them, export, an answer from the engine.

Runs what the commands run, on what samebit depends on and the standard library.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from samebit.core.errors import ConfigError
from samebit.core.request import SamplingParams
from samebit.engine.llm import LLM
from samebit.train.command import export_run, prepare_corpus, run_stage
from samebit.train.corpus import STANDARD_LIBRARY
from samebit.train.evaluate import held_out_loss
from samebit.train.loop import HISTORY_FILE
from samebit.train.model import Inkling
from samebit.train.recipe import RECIPES
from samebit.train.tokens import load_data

RECIPE = "toy"
_PACKAGES = ("fastapi", "jinja2", "numpy", "pydantic", "rich", "typer", "uvicorn", STANDARD_LIBRARY)
_FILES_OF_EACH = 6

_log = logging.getLogger(__name__)


def smoke(data: Path | None, run: Path | None) -> bool:
    """Whether the loss fell in every stage and the exported model answers. Leaves a corpus in `data`, and in `run` the run and
    its `model`; without a folder nothing is left. Raises ConfigError if a folder holds something.
    """
    for folder in (data, run):
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty")
    with tempfile.TemporaryDirectory() as scratch, _one_thread():
        data, run = data or Path(scratch) / "data", run or Path(scratch) / "run"
        prepare_corpus(data, [], _PACKAGES, _FILES_OF_EACH, 10**6, RECIPE, None)
        for number in range(1, len(RECIPES[RECIPE].stages) + 1):
            run_stage(data, run, number, RECIPE, start=None, workers=0, seconds=None, seed=0)
        losses = [_fresh_loss(data), *_losses(run)]
        export_run(data, run, run / "model", RECIPE)
        answer = _answer(run / "model")
    has_fallen = all(later < earlier for earlier, later in itertools.pairwise(losses))
    _log.info("held-out nats/token, fresh and after each stage: %s", ", ".join(f"{loss:.3f}" for loss in losses))
    _log.info("the engine answers with %d tokens", len(answer))
    return has_fallen and bool(answer)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """More threads would only wait for one another at this size, and results would depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fresh_loss(data_folder: Path) -> float:
    """What `_losses` gives, of a model that has learnt nothing."""
    recipe, data = RECIPES[RECIPE], load_data(data_folder)
    model = Inkling(recipe.raw).eval()
    return held_out_loss(model, data.held_out[: recipe.held_out_tokens], recipe.contexts[-1])


def _losses(run_folder: Path) -> list[float]:
    """The held-out loss at the longest context after each stage."""
    context = str(RECIPES[RECIPE].contexts[-1])
    return [entry["evaluation"]["loss"][context] for entry in json.loads((run_folder / HISTORY_FILE).read_text())]


def _answer(model: Path) -> list[int]:
    llm = LLM(str(model), num_threads=1, max_model_len=512, num_pages=64, num_window_pages=64)
    return list(llm.generate(["def "], SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)
