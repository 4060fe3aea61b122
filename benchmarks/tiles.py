"""Which launch configurations are fastest on a device, for the products, experts, attention and convolutions of a model.

    python -m benchmarks.tiles --seconds 200 --output tiles.json
    TRITON_INTERPRET=1 python -m benchmarks.tiles --smoke

Tiles must not change bits: every result is compared with that of the configuration in use, and what differs is called out. (What
says how attention's keys are cut does change them: such settings are compared among themselves, and with the one in use roughly.)
Kernels are compiled by processes beside, in the order in which they are timed, until the time is up; what has been measured by then
is told. Shares are of a large copy's bytes and a large product's operations a second, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_case import Case
from benchmarks.kernel_cases import kernel_cases, model_config
from benchmarks.kernel_times import (
    Compilers,
    Rates,
    Recorded,
    Timer,
    are_near,
    are_same,
    brief,
    geometric_mean,
    measured_on,
    measured_rates,
    record_launches,
    runs_and_copies,
)
from benchmarks.models import SHAPES
from samebit.kernels.triton.launch import IS_INTERPRETED

KINDS = ("experts", "linear", "attention", "conv")
FASTEST = 5
ROUNDS = 5
SMOKE_SETTINGS = 1


class Measured:
    """What the settings of one case took: microseconds by part and setting, and which failed or had other bits."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.times_us: dict[str, dict[Any, float]] = {part: {} for part in case.parts}
        self.failed: dict[str, str] = {}
        self.differing: list[str] = []
        self.is_complete = False

    def fastest(self, part: str) -> list[tuple[Any, float]]:
        """Settings with their times, the fastest first."""
        return sorted(self.times_us[part].items(), key=lambda entry: entry[1])


def measure(
    case: Case, timer: Timer, rates: Rates, compilers: Compilers, deadline: float, device: torch.device
) -> Measured:
    """Time the chosen setting and the others, until the deadline; settings that fail are noted and left out."""
    found = Measured(case)
    settings = compiled(case, compilers, deadline, found.failed)
    num_known = len(settings) + len(found.failed)
    runs, copies = runs_and_copies(case, rates)
    operands = [case.operands(device) for _ in range(copies)]
    chosen = case.chosen()
    expected: dict[Hashable, list[Tensor]] = {}
    timer.warm_up()
    for setting in settings:
        if time.perf_counter() > deadline:
            return found
        try:
            recorded = [record_launches(case, one, setting) for one in operands]
            results = [one.result for one in recorded]
            wanted = expected.get(case.order(setting))
            expected.setdefault(case.order(setting), results)
            if not are_right(results, wanted, expected[case.order(chosen)]):
                found.differing.append(case.label(setting))
            for part, kernels in case.parts.items():
                found.times_us[part][setting] = 1e6 * median_seconds(timer, recorded, kernels, runs)
        except Exception as error:
            found.failed[case.label(setting)] = brief(error)
            if setting == chosen:
                raise
    found.is_complete = num_known == len(settings_of(case))
    return found


def compiled(case: Case, compilers: Compilers, deadline: float, failed: dict[str, str]) -> list[Any]:
    """The settings that are compiled by the deadline; before anything is timed, so that the device does not rest in between."""
    ready = []
    for setting in settings_of(case):
        try:
            error = compilers.wait(case, setting, deadline)
        except TimeoutError:
            break
        if error and setting != case.chosen():
            failed[case.label(setting)] = error
        else:
            ready.append(setting)
    return ready


def settings_of(case: Case) -> list[Any]:
    """All that is tried for a case, the one in use first."""
    settings = list(dict.fromkeys([case.chosen(), *case.settings()]))
    return settings[: 1 + SMOKE_SETTINGS] if IS_INTERPRETED else settings


def are_right(results: list[Tensor], wanted: list[Tensor] | None, in_use: list[Tensor]) -> bool:
    """Whether results are the wanted ones, bit for bit; those of the first setting with an order of sums (None): about those of the one in use."""
    return are_near(results, in_use) if wanted is None else are_same(results, wanted)


def median_seconds(timer: Timer, recorded: list[Recorded], kernels: tuple[str, ...], runs: int) -> float:
    works = [work for i in range(runs) for work in recorded[i % len(recorded)].of(kernels)]
    seconds = timer.prepare(works, runs)
    return statistics.median(seconds() for _ in range(1 if IS_INTERPRETED else ROUNDS))


def rows_of(found: Measured, rates: Rates) -> list[dict[str, Any]]:
    """The record of a case, a part each."""
    case, rows = found.case, []
    for part in case.parts:
        moved, operations = case.work(part)

        def entry(setting: Any, time_us: float, moved: float = moved, operations: float = operations) -> dict[str, Any]:
            seconds = time_us / 1e6
            shares = {"of_copy": moved / seconds / rates.copy, "of_product": operations / seconds / rates.product}
            return {"setting": case.label(setting), "us": round(time_us, 2)} | {
                k: round(v, 3) for k, v in shares.items()
            }

        times = found.times_us[part]
        if case.chosen() not in times:
            continue
        rows.append(
            {
                "kernel": f"{case.name} {part}".strip(),
                "size": case.size,
                "now": entry(case.chosen(), times[case.chosen()]),
                "fastest": [entry(*one) for one in found.fastest(part)[:FASTEST]],
                "tried": len(times),
                "is_complete": found.is_complete,
                "failed": found.failed,
                "differing": found.differing,
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    now = row["now"]
    shares = f"{now['of_copy']:4.0%} copy {now['of_product']:4.0%} product"
    fastest = "; ".join(f"{one['setting']} {one['us']:.1f}" for one in row["fastest"])
    end = "" if row["is_complete"] else " (not all)"
    return f"{row['kernel']:29} {row['size']:>8}: {now['setting']} {now['us']:.1f} us, {shares} | {fastest}{end}"


def main() -> None:
    """Read the arguments, measure, print and store the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bench-8b", choices=SHAPES)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of kernels, with commas")
    parser.add_argument("--seconds", type=float, default=600, help="stop then; what was measured is told")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 4), help="processes that compile")
    parser.add_argument("--smoke", action="store_true", help="toy sizes and few settings, to see that it runs")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    device = torch.device("cpu" if IS_INTERPRETED else "cuda")
    kinds = args.only.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--only: must be of {', '.join(KINDS)}, got {args.only}")
    cases = kernel_cases(model_config(args.model, smoke=args.smoke), kinds, smoke=args.smoke)
    compilers = Compilers(args.workers)
    for case in cases:
        compilers.add(case, settings_of(case))
    rates, timer = measured_rates(device), Timer(device)
    record: dict[str, Any] = {
        "command": f"--model {args.model} --only {args.only}",
        **measured_on(device, rates),
        "rows": [],
        "errors": {},
    }
    print(
        json.dumps({key: record[key] for key in ("device", "copy_bytes_per_s", "product_operations_per_s")}), flush=True
    )
    try:
        measure_all(cases, (timer, rates, compilers, deadline, device), record, args.output)
    finally:
        compilers.close()
        report(record)


def measure_all(cases: list[Case], how: tuple[Any, ...], record: dict[str, Any], output: Path | None) -> None:
    """Measure case after case until the time is up, and store after each what is known."""
    rates, deadline = how[1], how[3]
    for case in cases:
        if time.perf_counter() > deadline:
            record["stopped_at"] = f"{case.name} {case.size}"
            break
        try:
            rows = rows_of(measure(case, *how), rates)
        except Exception as error:  # noqa: BLE001 - the other cases are still wanted
            record["errors"][f"{case.name} {case.size}"] = brief(error)
            print(f"{case.name} {case.size}: {brief(error)}", flush=True)
            continue
        record["rows"] += rows
        for row in rows:
            print(line(row), flush=True)
            if row["differing"]:
                print(f"    OTHER BITS: {', '.join(row['differing'])}", flush=True)
        if output is not None:
            output.write_text(json.dumps(record, indent=1) + "\n")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def report(record: dict[str, Any]) -> None:
    """Say what the fastest would gain, whether bits differed, and where it stopped."""
    rows = record["rows"]
    differing = sum(len(row["differing"]) for row in rows)
    print(
        f"{len(rows)} rows, {sum(row['tried'] for row in rows)} timed, {differing} with OTHER BITS than they must have"
    )
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        gains = [row["now"]["us"] / row["fastest"][0]["us"] for row in rows if row["kernel"] == kernel]
        print(f"{kernel:29} the fastest would be {geometric_mean(gains):.3f} times as fast, {max(gains):.2f} at most")
    for what, error in record["errors"].items():
        print(f"FAILED {what}: {error}")
    if "stopped_at" in record:
        print(f"The time was up at {record['stopped_at']}.")


if __name__ == "__main__":
    main()
