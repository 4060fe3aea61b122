"""Trains a model stage by stage: each stage goes on from a folder, keeps to its time, evaluates and leaves the folder complete.

On a GPU blocks are compiled and products are bf16; on a CPU all is fp32. Knows the model, batches and the optimiser.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from samebit.core.errors import ConfigError
from samebit.train.evaluate import Evaluation, evaluate
from samebit.train.feed import Batch, Feed
from samebit.train.layout import load_model
from samebit.train.model import Block, Inkling
from samebit.train.optim import Optimiser
from samebit.train.phases import Phases
from samebit.train.recipe import Recipe, Stage
from samebit.train.tokens import TrainingData
from samebit.train.writers import OwnWriter, Source

STATE_FILE = "state.pt"
HISTORY_FILE = "history.json"
_REPORT_SECONDS = 15.0
_MAX_GRADIENT = 1.0
# The experts' balance is steered harder while the router is fresh.
_FRESH_STEPS = 1000

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """What has been done in all stages so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stages: int = 0


class Trainer:
    """A model in training, its optimiser and its progress, kept in `folder`."""

    def __init__(
        self, recipe: Recipe, folder: Path, device: torch.device, *, seed: int = 0, start: Path | None = None
    ) -> None:
        """Go on from `folder` if a stage has ended there, else from the checkpoint `start`, else from fresh weights."""
        self._recipe, self._folder, self._device, self._seed = recipe, folder, device, seed
        self.progress = Progress()
        has_state = (folder / STATE_FILE).is_file()
        self._is_from_checkpoint = start is not None and not has_state
        self.model = Inkling(recipe.raw, seed) if has_state or start is None else load_model(start)
        if any(self.model.raw.get(key) != recipe.raw[key] for key in ("text_config", "mtp_config")):
            raise ConfigError(f"{start}: has another shape than the recipe")
        self.model.to(device).train()
        self._optimiser = Optimiser(dict(self.model.named_parameters()), recipe.rates)
        self._token_loss: Callable[[Tensor, Tensor, Tensor], Tensor] = token_loss
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            self.compile()
        if has_state:
            state = torch.load(folder / STATE_FILE, map_location=device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self._optimiser.load_state_dict(state["optimiser"])
            self.progress = Progress(**state["progress"])

    def train(
        self,
        data: TrainingData,
        number: int,
        *,
        source: Source | None = None,
        seconds: float | None = None,
        phases: Phases | None = None,
    ) -> Evaluation:
        """Run stage `number` (from 1) of the recipe, save, and evaluate.

        `source` gives dialogues of the stage's length (None: they are written here, and all is a function of the seed).
        `seconds` stand in for the stage's time or steps; `phases` goes on, and is kept in the history.
        """
        began = time.monotonic()
        phases = phases or Phases()
        stage = self._recipe.stage(number, seconds)
        seed = stage_seed(self._seed, number)
        feed = Feed(
            data,
            source or OwnWriter(data, length=stage.length, seed=seed),
            length=stage.length,
            rows=stage.rows,
            dialogue_share=stage.dialogue_share,
            seed=seed,
            device=self._device,
            ring_rows=stage.ring_rows,
        )
        # Blocks share their code, and each of their kinds is compiled.
        with torch._dynamo.config.patch(recompile_limit=64):  # noqa: SLF001 - has no public name
            if self._device.type == "cuda":
                self.warm_up(stage)
                torch.cuda.synchronize()
                phases.end("compiling")
            feed.refill(at_least=round(stage.rows * stage.dialogue_share))
            phases.end("first dialogues")
            self._steps(stage, feed, began)
        phases.end("steps")
        self.progress.stages = number
        self.save()
        phases.end("saving")
        found = evaluate(
            self.model,
            data,
            contexts=self._recipe.contexts,
            distances=self._recipe.distances,
            probes=self._recipe.probes,
            max_tokens=self._recipe.held_out_tokens,
        )
        phases.end("evaluation")
        self._remember(number, found, phases)
        return found

    def compile(self, backend: str | Callable[..., Any] = "inductor") -> None:  # Any: torch's backends
        """From the next step on, run compiled code; the first step of a shape compiles it."""
        self.model.compile_parts(backend)
        self._token_loss = torch.compile(token_loss, dynamic=False, backend=backend)

    def warm_up(self, stage: Stage) -> None:
        """Compile all that the steps of a stage need, on an empty batch: while processes begin to write dialogues."""
        ids = torch.zeros(stage.rows, stage.length, dtype=torch.long, device=self._device)
        self._backward(Batch(ids, ids, torch.ones_like(ids, dtype=torch.float32), stage.rows))
        self.model.zero_grad(set_to_none=True)

    def step(self, batch: Batch, multiplier: float) -> Tensor:
        """One step at `multiplier` times the rates; the losses [1 + depths] of the trunk and of each depth, on the device."""
        losses, loads = self._backward(batch)
        # Apart, so that drafts have no say in how far the trunk moves.
        drafts = list(self.model.depths.parameters())
        own = {id(p) for p in drafts}
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if id(p) not in own], _MAX_GRADIENT)
        if drafts:
            nn.utils.clip_grad_norm_(drafts, _MAX_GRADIENT)
        self._optimiser.step(multiplier)
        self._balance(loads, multiplier)
        self.progress.steps += 1
        self.progress.tokens += batch.token_ids.numel()
        return losses

    def losses(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Weighted cross-entropy of the trunk and of each draft depth, [1 + depths], and the experts' loads.

        Depths learn from the trunk without changing it: its hidden states and both tables are constants to them.
        """
        model = self.model
        hidden, loads = model(batch.token_ids)
        unembed = model.weights["unembed"][: model.config.unpadded_vocab_size]
        found = [self._loss(hidden, unembed, batch.targets, batch.weights)]
        # A gradient that nobody reads: so both depths take the same kind of input, which is compiled once.
        before = hidden.detach().requires_grad_()
        drafted = model.draft(before, batch.token_ids)
        found += [self._loss(h, unembed.detach(), batch.targets, batch.weights) for h in drafted]
        return torch.stack(found), loads

    def save(self) -> None:
        """Write the state; a folder never holds half of one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{STATE_FILE}.partial"
        state = {
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "progress": dataclasses.asdict(self.progress),
        }
        torch.save(state, partial)
        partial.replace(self._folder / STATE_FILE)

    def _loss(self, hidden: Tensor, unembed: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        # The product is no part of what is compiled: with and without a gradient for the matrix, the rest is the same.
        logits = functional.linear(hidden / self.model.config.logits_mup_width_multiplier, unembed)
        return self._token_loss(logits, targets, weights)

    def _backward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """What `losses` gives; every parameter has its gradient."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            losses, loads = self.losses(batch)
        torch.autograd.backward(losses.sum())
        return losses.detach(), loads

    def _steps(self, stage: Stage, feed: Feed, began: float) -> None:
        """Steps until the stage is over, which began at `began`."""
        first = reported = time.monotonic()
        begin = (self.progress.steps, self.progress.tokens)
        while True:
            done = self.progress.steps - begin[0]
            # Where steps are given, time has no say, so that the run is a function of its seed.
            share = done / stage.steps if stage.steps else (time.monotonic() - began) / stage.seconds
            if share >= 1:
                break
            losses = self.step(feed.batch(), rate_multiplier(stage, done, share))
            if done % 10 == 0:
                feed.refill()
                # Reading a loss keeps the host in step with the device, so that time is measured where it is spent.
                shown = ", ".join(f"{float(loss):.3f}" for loss in losses)
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    speed = (self.progress.tokens - begin[1]) / (reported - first)
                    _log.info("step %d: losses %s; %.0f tokens/s; %d dialogues", done, shown, speed, feed.num_written)
        self.progress.seconds += time.monotonic() - began

    @torch.no_grad()
    def _balance(self, loads: list[Tensor], multiplier: float) -> None:
        """Move the router's choice towards experts that few tokens chose; its weights are untouched."""
        sparse = [b for b in self.model.blocks if isinstance(b, Block) and not b.is_dense]
        haste = 1 + 4 * max(0.0, 1 - self.progress.steps / _FRESH_STEPS)
        rate = self._recipe.bias_rate * haste * min(1.0, 4 * multiplier)
        for block, load in zip(sparse, loads, strict=True):
            bias = block.get_buffer("router_bias")
            bias += rate * torch.sign(load.mean() - load)
            bias -= bias.mean()

    def _remember(self, number: int, found: Evaluation, phases: Phases) -> None:
        path = self._folder / HISTORY_FILE
        history = json.loads(path.read_text()) if path.is_file() else []
        entry = {"stage": number, **dataclasses.asdict(self.progress), "phases": phases.seconds}
        entry["from_checkpoint"], self._is_from_checkpoint = self._is_from_checkpoint, False
        entry["evaluation"] = dataclasses.asdict(found)
        path.write_text(json.dumps([*history, entry], indent=1) + "\n")


def stage_seed(seed: int, number: int) -> int:
    """Seeds the batches and the dialogues of a stage."""
    return seed + 1000 * number


def rate_multiplier(stage: Stage, done: int, share: float) -> float:
    """The rate after `done` steps, when `share` of the stage is over: up over the warm-up, level, then down to `final_rate`."""
    rising = (done + 1) / stage.warmup
    falling = (1 - share) / stage.decay_share if stage.decay_share else 1.0
    return min(stage.peak, stage.peak * rising, max(stage.final_rate, stage.peak * falling))


def token_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean loss, fp32, of logits [B, T, V]; targets and weights [B, T].

    It is -log p of a target of positive weight, and -log(1 - p) of one of negative weight, which shall not be said there
    (unlikelihood training: Welleck et al., 2019).
    """
    surprise = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    losses = torch.where(weights.flatten() < 0, -torch.log(-torch.expm1(-surprise.clamp(min=1e-9))), surprise)
    sizes = weights.flatten().abs()
    return (losses * sizes).sum() / sizes.sum()
