"""The forgetful-agent table with three broken builds beside the correct ones.

    python -m benchmarks.recall --problems 70 --output benchmarks/results/recall.json
    python -m benchmarks.recall --drafter dflash=FOLDER --drafter dspark=FOLDER

The faults are those of a prefix cache that was shipped without its convolution state (sglang PR #34043), put into this engine
from outside, its acknowledgement switched off: (1) checkpoints are published but never written, (2) they are written in a
size's first, recorded step only, (3) padding entries keep the values of the step before and write over checkpoints. Each build runs
without a drafter and with every drafter at hand: in the incident the fault showed with speculation only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from samebit import LLM
from samebit.bench.recall import SETTINGS, Score, make_problems, run_arm, table
from samebit.core.plan import NO_SNAPSHOT, BatchPlan, CheckpointEntry, StepOutput
from samebit.engine.model_source import bundled_drafter, resolve_model
from samebit.inputs import Bucket
from samebit.models.checkpoint import read_json
from samebit.speculative.load import BLOCK_METHODS


class Trusting:
    """A runner that reports every write as acknowledged, as an engine without tags would."""

    def __init__(self, llm: LLM) -> None:
        self._runner: Any = llm._engine._runner
        self._pools: Any = self._runner._pools

    def launch(self, plan: BatchPlan) -> Callable[[], StepOutput]:
        """A CPU runs a step while it is launched."""
        output = self.execute(plan)
        return lambda: output

    def execute(self, plan: BatchPlan) -> StepOutput:
        """Run the step, and believe it."""
        output = self._runner.launch(plan)()
        count = len(plan.entries)
        return msgspec.structs.replace(
            output,
            rows_intact=[True] * len(plan.rows),
            pages_intact=[True] * count,
            rows_written=[True] * count,
        )

    def zero(self, entries: list[CheckpointEntry]) -> None:
        """Leave the convolution rows of these checkpoints as a fresh, zeroed slot has them."""
        geometry = self._pools.geometry
        for entry in entries:
            if entry.snapshot != NO_SNAPSHOT:
                first = geometry.snapshot_base(entry.snapshot)
                for conv in self._pools.conv:
                    conv.rows[first : first + geometry.layout.history] = 0


class NeverWritten(Trusting):
    """Tracking is switched off by a setting that has nothing to do with it; checkpoints are published all the same."""

    def execute(self, plan: BatchPlan) -> StepOutput:
        output = super().execute(plan)
        self.zero(plan.entries)
        return output


class LostAtCapture(Trusting):
    """A Python `if` is false when a graph is captured: the copy runs in the warm-up step and in no replay."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._captured: set[int] = set()

    def execute(self, plan: BatchPlan) -> StepOutput:
        output = super().execute(plan)
        num_tokens = Bucket.of(plan).rounded_up().tokens
        if num_tokens in self._captured:
            self.zero(plan.entries)
        self._captured.add(num_tokens)
        return output


class StalePadding(Trusting):
    """Padding rows of the static buffers keep old values: old entries are written again, from whoever has their row now."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._buffers: dict[int, list[CheckpointEntry]] = {}

    def execute(self, plan: BatchPlan) -> StepOutput:
        size = 1 << max(len(plan.entries) - 1, 0).bit_length()
        before = self._buffers.get(size, [])
        held = [*plan.entries, *before[len(plan.entries) :]]
        self._buffers[size] = held
        stale = [_moved_on(entry, plan) for entry in held[len(plan.entries) :] if entry.row < len(plan.rows)]
        output = super().execute(msgspec.structs.replace(plan, entries=[*plan.entries, *stale]))
        count = len(plan.entries)
        return msgspec.structs.replace(
            output,
            rows_intact=[True] * len(plan.rows),
            pages_intact=[True] * count,
            rows_written=[True] * count,
        )


def _moved_on(entry: CheckpointEntry, plan: BatchPlan) -> CheckpointEntry:
    """An old destination, filled with what the row in that place has now."""
    row = plan.rows[entry.row]
    return CheckpointEntry(entry.row, row.start + row.num_tokens, entry.snapshot, entry.tag)


MUTANTS = {"never written": NeverWritten, "lost at capture": LostAtCapture, "stale padding": StalePadding}


def drafters(model: str, given: list[str]) -> dict[str, dict[str, Any] | None]:
    """The speculative arms by name, none first: n-grams, the model's own heads and bundled drafters, and METHOD=FOLDER of `given`."""
    found: dict[str, dict[str, Any] | None] = {"": None, "ngram": {"method": "ngram"}}
    if read_json(resolve_model(model) / "config.json").get("mtp_config"):
        found["mtp"] = {"method": "mtp"}
    found |= {method: {"method": method} for method in BLOCK_METHODS if bundled_drafter(model, method)}
    for argument in given:
        method, _, folder = argument.partition("=")
        found[method] = {"method": method, "model": folder or None}
    return found


def arms(speculation: dict[str, dict[str, Any] | None]) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """(name, settings, mutant) of every arm: the cache on and off without a drafter, then each drafter with and without faults."""
    for drafter, wanted in speculation.items():
        settings: dict[str, Any] = {"speculative_config": wanted}
        suffix = f", {drafter}" if drafter else ""
        yield f"cache on{suffix}", settings, None
        if not drafter:
            yield "cache off", {**settings, "enable_prefix_caching": False}, None
        for mutant in MUTANTS:
            yield f"{mutant}{suffix}", settings, mutant


def main() -> None:
    """Read the arguments, run all arms, print the table and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--problems", type=int, default=70)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--drafter", action="append", default=[], metavar="METHOD[=FOLDER]", help="one more speculative arm"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    scores: list[Score] = []
    lengths: list[float] = []
    problems = None
    for name, settings, mutant in arms(drafters(args.model, args.drafter)):
        llm = LLM(args.model, **{**SETTINGS, "num_threads": args.threads, **settings})
        problems = problems or make_problems(llm, args.problems)
        if mutant is not None:
            llm._engine._runner = MUTANTS[mutant](llm)
        scores.append(run_arm(llm, problems, name))
        lengths.append(llm.stats()["mean_acceptance_length"])
        print(table([scores[0], scores[-1]]).splitlines()[-1], flush=True)
    print(table(scores))
    if args.output is not None:
        record = {
            "fingerprint": llm.info.system_fingerprint,
            "profile": llm.info.profile,
            "arms": [
                {
                    "name": score.name,
                    "percent_right": round(score.percent_right, 2),
                    "solved": score.num_solved,
                    "changed": score.num_changed(scores[0]),
                    "hits": score.num_hits,
                    "turns": score.num_turns,
                    "mean_acceptance_length": round(length, 2),
                }
                for score, length in zip(scores, lengths, strict=True)
            ],
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
