"""Trains drafters of one frozen target side by side: each step the target reads once, and every drafter learns from what it saw.

Each drafter goes on from its folder and is left there complete. On a GPU products are bf16; on a CPU all is fp32. Knows drafters,
sequences and the optimiser; measures nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from samebit.core.errors import ConfigError
from samebit.models.checkpoint import SINGLE_FILE
from samebit.speculative.block_config import parse_block_config
from samebit.train.drafters.block import BlockDrafter
from samebit.train.drafters.recipe import BLOCK_METHODS, LOSSES, METHODS, DrafterRecipe, block_config_json
from samebit.train.drafters.students import BlockStudent, DepthStudent, Student
from samebit.train.drafters.texts import Texts
from samebit.train.drafters.view import View, draw_anchors, view_of
from samebit.train.feed import Feed
from samebit.train.loop import HISTORY_FILE, STATE_FILE, Progress
from samebit.train.model import Inkling
from samebit.train.optim import Optimiser
from samebit.train.phases import Phases
from samebit.train.tokens import TrainingData
from samebit.train.writers import OwnWriter, Source

_MAX_GRADIENT = 1.0
_REPORT_SECONDS = 15.0

_log = logging.getLogger(__name__)

Losses = Mapping[str, Mapping[str, Tensor]]


@dataclass(slots=True)
class Learner:
    """A drafter in training, with all that is kept in its folder."""

    method: str
    student: Student
    optimiser: Optimiser
    folder: Path
    progress: Progress

    def save(self) -> None:
        """Write the state; a folder never holds half of one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f"{STATE_FILE}.partial"
        state = {
            "weights": {name: p.detach() for name, p in self.student.parameters.items()},
            "optimiser": self.optimiser.state_dict(),
            "progress": dataclasses.asdict(self.progress),
        }
        torch.save(state, partial)
        partial.replace(self.folder / STATE_FILE)

    def restore(self, device: torch.device) -> bool:
        """Go on from the folder, if a run has ended there. Raises ConfigError if another shape was trained there."""
        path = self.folder / STATE_FILE
        if not path.is_file():
            return False
        state = torch.load(path, map_location=device, weights_only=True)
        self._take(state["weights"], self.folder)
        self.optimiser.load_state_dict(state["optimiser"])
        self.progress = Progress(**state["progress"])
        return True

    def start(self, model: Path) -> None:
        """Take the weights of an exported drafter. Raises ConfigError if there is none of this shape."""
        try:
            weights = load_file(model / SINGLE_FILE)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{model}: holds no drafter to start from ({error})") from error
        self._take(weights, model)

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor], found_in: Path) -> None:
        parameters = self.student.parameters
        if {name: p.shape for name, p in parameters.items()} != {name: p.shape for name, p in weights.items()}:
            raise ConfigError(f"{found_in}: holds a drafter of another shape")
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


class DrafterTrainer:
    """Drafters by `methods` for `target`, which it freezes; each is kept in a folder of its method's name in `folder`. Where that
    is empty it starts from the exported drafter `start`, if that is given, which only a single block drafter can.
    """

    def __init__(
        self,
        recipe: DrafterRecipe,
        target: Inkling,
        folder: Path,
        methods: Sequence[str],
        device: torch.device,
        *,
        start: Path | None = None,
        seed: int = 0,
    ) -> None:
        """Raises ConfigError for a method that does not exist, does not fit the target, or cannot start from `start`."""
        if start is not None and (len(set(methods)) != 1 or methods[0] not in BLOCK_METHODS):
            raise ConfigError(
                f"start={start}: is for one of {' or '.join(BLOCK_METHODS)} alone, not for {', '.join(methods)}"
            )
        self._recipe, self._device, self._seed, self._start = recipe, device, seed, start
        self.target = target.to(device).eval().requires_grad_(False)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        self.learners = [self._learner(method, folder / method) for method in dict.fromkeys(methods)]

    def train(
        self,
        data: TrainingData,
        *,
        source: Source | None = None,
        seconds: float | None = None,
        own_share: float | None = None,
        phases: Phases | None = None,
    ) -> None:
        """Run the recipe and save. Without a `source` dialogues are written here, and all is a function of the seed.

        `seconds` stand in for the recipe's time or steps, `own_share` for its share of the target's own text.
        """
        recipe, phases, began = self._recipe, phases or Phases(), time.monotonic()
        # Another seed for each run that goes on from one before.
        seed = self._seed + 1000 * self.learners[0].progress.stages
        feed = Feed(
            data,
            source or OwnWriter(data, length=recipe.row_length, seed=seed),
            length=recipe.row_length,
            rows=recipe.rows,
            dialogue_share=recipe.dialogue_share,
            seed=seed,
            device=self._device,
            ring_rows=recipe.ring_rows,
            # Repeated lines teach a model to leave a loop; a drafter shall guess what the model says.
            repeat_every=None,
        )
        share = recipe.own.share if own_share is None else own_share
        texts = Texts(recipe, self.target, feed, own_share=share, seed=seed)
        feed.refill(at_least=round(recipe.rows * recipe.dialogue_share))
        phases.end("first dialogues")
        losses = self._steps(texts, feed, began, seconds, torch.Generator(self._device).manual_seed(seed))
        phases.end("steps")
        for learner in self.learners:
            learner.progress.stages += 1
            learner.save()
            remember(learner, phases, texts, losses[learner.method])
        phases.end("saving")

    def step(self, view: View, multiplier: float) -> Losses:
        """One step of every drafter at `multiplier` times its rate; the losses by method, on the device."""
        found: dict[str, Mapping[str, Tensor]] = {}
        for learner in self.learners:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                losses = learner.student.losses(view)
            torch.autograd.backward(losses["loss"])
            nn.utils.clip_grad_norm_(learner.student.parameters.values(), _MAX_GRADIENT)
            learner.optimiser.step(multiplier)
            learner.progress.steps += 1
            learner.progress.tokens += view.token_ids.numel()
            found[learner.method] = {name: loss.detach() for name, loss in losses.items()}
        return found

    def view(self, token_ids: Tensor, weights: Tensor, generator: torch.Generator) -> View:
        """What the target makes of sequences, with anchors drawn anew."""
        num_drafts = max(learner.student.num_drafts for learner in self.learners)
        count = max(1, token_ids.shape[1] // self._recipe.tokens_per_block)
        anchors = draw_anchors(weights, min(count, token_ids.shape[1] - num_drafts - 1), num_drafts, generator)
        return view_of(self.target, token_ids, self._recipe.shape.taps, anchors)

    def _learner(self, method: str, folder: Path) -> Learner:
        if method not in METHODS:
            raise ConfigError(f"method={method!r}: is not one of {', '.join(METHODS)}")
        student: Student
        if method == "mtp":
            if not len(self.target.depths):
                raise ConfigError("method='mtp': the target has no draft depths")
            self.target.depths.requires_grad_()
            student = DepthStudent(self.target)
        else:
            config = parse_block_config(block_config_json(method, self._recipe.shape, self.target.config))
            drafter = BlockDrafter(config, self._seed).to(self._device)
            student = BlockStudent(self.target, drafter, LOSSES[method])
        optimiser = Optimiser(student.parameters, self._recipe.rates[method])
        learner = Learner(method, student, optimiser, folder, Progress())
        if not learner.restore(self._device) and self._start is not None:
            learner.start(self._start)
        return learner

    def _steps(
        self, texts: Texts, feed: Feed, began: float, seconds: float | None, generator: torch.Generator
    ) -> dict[str, dict[str, float]]:
        """Steps until the run is over, which began at `began`; the last losses by method."""
        recipe = self._recipe
        steps = recipe.steps if seconds is None else None
        limit = recipe.seconds if seconds is None else seconds
        first = reported = time.monotonic()
        done, num_tokens, shown = 0, 0, dict[str, dict[str, float]]()
        while True:
            # Where steps are given, time has no say, so that the run is a function of its seed.
            share = done / steps if steps else (time.monotonic() - began) / limit
            if share >= 1 and done:
                break
            view = self.view(*texts.next(), generator)
            losses = self.step(view, rate_multiplier(recipe, done, share))
            done += 1
            num_tokens += view.token_ids.numel()
            if done % 10 == 1:
                feed.refill()
                # Reading a loss keeps the host in step with the device, so that time is measured where it is spent.
                shown = {method: {name: float(loss) for name, loss in of.items()} for method, of in losses.items()}
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    speed = num_tokens / (reported - first)
                    _log.info("step %d: %s; %.0f tokens/s", done, _line(shown), speed)
        for learner in self.learners:
            learner.progress.seconds += time.monotonic() - began
        return shown


def rate_multiplier(recipe: DrafterRecipe, done: int, share: float) -> float:
    """The rate after `done` steps, when `share` of the run is over: up over the warm-up, along half a cosine to 0."""
    return min(1.0, (done + 1) / recipe.warmup) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, share)))


def read_history(folder: Path) -> list[dict[str, Any]]:  # Any: JSON
    """What was done in a drafter's folder, run by run."""
    path = folder / HISTORY_FILE
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    return found


def remember(learner: Learner, phases: Phases, texts: Texts, losses: Mapping[str, float]) -> None:
    """Add a run to the folder's history."""
    entry = dataclasses.asdict(learner.progress) | {
        "phases": dict(phases.seconds),
        "own_tokens": texts.num_own_tokens,
        "own_seconds": round(texts.own_seconds, 1),
        "losses": {name: round(loss, 4) for name, loss in losses.items()},
    }
    path = learner.folder / HISTORY_FILE
    path.write_text(json.dumps([*read_history(learner.folder), entry], indent=1) + "\n")


def _line(losses: Mapping[str, Mapping[str, float]]) -> str:
    return "; ".join(
        f"{method} {', '.join(f'{name} {loss:.3f}' for name, loss in of.items())}" for method, of in losses.items()
    )
