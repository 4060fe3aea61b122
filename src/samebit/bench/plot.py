"""Draws records of `samebit bench`, one over the other. Needs matplotlib (the extra `plots`); measures nothing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samebit.bench.record import Record, Run
from samebit.core.errors import ConfigError, InvalidRequestError

# Apart in hue and in lightness, so that they can be told apart without colours too.
COLORS = ("#0b3c5d", "#2f8f9d", "#e8a33d", "#b23a48", "#6a4c93")
_PANELS = (
    ("output tokens a second", "output_throughput", None),
    ("time to first token, ms", "median_ttft_ms", "p99_ttft_ms"),
    ("time per output token, ms", "median_tpot_ms", "p99_tpot_ms"),
    ("to the last token, ms", "median_e2el_ms", "p99_e2el_ms"),
)
_AXES = {"max_concurrency": "conversations at once", "request_rate": "arrivals a second"}


def draw(records: Sequence[Record], target: Path) -> None:
    """A panel a figure: lines over the sweep where there is one, bars where there is none.

    Lines and bars are medians (or rates); dashed lines and whiskers reach to the 99th percentile. The file's ending says its
    kind. Raises ConfigError without matplotlib, InvalidRequestError for records or a target that cannot be drawn.
    """
    plt = _pyplot()
    if not any(run.summary["completed"] for record in records for run in record.runs):
        raise InvalidRequestError("no request of these records was answered: nothing to draw")
    axis = swept(records)
    panels = [panel for panel in _PANELS if any(panel[1] in run.summary for record in records for run in record.runs)]
    figure, grid = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2), layout="constrained", squeeze=False)
    for panel, (title, middle, high) in zip(grid[0], panels, strict=True):
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        if axis is None:
            _bars(panel, records, middle, high)
        else:
            _lines(panel, records, axis, middle, high)
        panel.set_ylim(bottom=0)
    grid[0][0].legend(fontsize=7, frameon=False)
    try:
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{target}: {error}") from error
    finally:
        plt.close(figure)


def swept(records: Sequence[Record]) -> str | None:
    """The setting that differs most between runs; None where all have the same."""
    found = {name: len(_places(records, name)) for name in _AXES}
    best = max(found, key=lambda name: found[name])
    return best if found[best] > 1 else None


def names_of(records: Sequence[Record], paths: Sequence[Path]) -> list[str]:
    """A label each: the records' own where they differ, else the names of the files."""
    labels = [record.label for record in records]
    return labels if len(set(labels)) == len(labels) else [path.stem for path in paths]


def _lines(
    panel: Any, records: Sequence[Record], axis: str, middle: str, high: str | None
) -> None:  # Any: matplotlib's
    """A line for each record and each value of the setting that is not the axis."""
    places = _places(records, axis)
    other = next(name for name in _AXES if name != axis)
    others = _places(records, other)
    lines = [(record, value) for record in records for value in others]
    for number, (record, value) in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        for name, style in ((middle, "o-"), (high, ".--")):
            runs = [run for run in record.runs if name in run.summary and _value(run, other) == value]
            if name is not None and runs:
                where = [places.index(_value(run, axis)) for run in runs]
                told = record.label if len(others) == 1 else f"{record.label}, {value:g} {_AXES[other]}"
                label = told if name == middle else None
                panel.plot(where, [run.summary[name] for run in runs], style, color=color, label=label, markersize=4)
    panel.set_xticks(range(len(places)), [f"{place:g}" for place in places])
    panel.set_xlabel(_AXES[axis])


def _bars(panel: Any, records: Sequence[Record], middle: str, high: str | None) -> None:  # Any: matplotlib's
    for number, record in enumerate(records):
        for run in record.runs:
            if middle not in run.summary:
                continue
            value = run.summary[middle]
            panel.bar(number, value, color=COLORS[number % len(COLORS)], label=record.label)
            if high in run.summary:
                panel.vlines(number, value, max(value, run.summary[high]), color="#444444")
    panel.set_xticks([])


def _places(records: Sequence[Record], axis: str) -> list[float]:
    return sorted({_value(run, axis) for record in records for run in record.runs})


def _value(run: Run, axis: str) -> float:
    """A setting as a number; without a limit it is infinite."""
    value = run.settings.get(axis)
    return float("inf") if value is None else float(value)


def _pyplot() -> Any:  # Any: a library that may be missing
    try:
        library = importlib.import_module("matplotlib")
        library.use("agg")
        library.rcParams["svg.hashsalt"] = "samebit"  # the same file from the same records
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib, which is not installed: pip install 'samebit[plots]'") from error
