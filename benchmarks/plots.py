"""Draws how many guesses are accepted a step, by drafter, from what `samebit train assess-drafter --json` wrote.

    python -m benchmarks.plots docs/acceptance.svg benchmarks/results/acceptance/*.json

A file is named after its method. Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

from samebit.bench.plot import COLORS


def share_of_steps(at_least: Sequence[float]) -> list[float]:
    """The share of steps with exactly 0, 1, ... accepted guesses, from the shares with at least 1, 2, ..."""
    bounds = [1.0, *at_least, 0.0]
    return [more - fewer for more, fewer in itertools.pairwise(bounds)]


def draw(measured: dict[str, list[dict[str, Any]]], target: Path) -> None:
    """A panel for each kind of text and temperature; a group of bars for each number of accepted guesses."""
    kinds = [(part["name"], part["temperature"]) for part in next(iter(measured.values()))]
    figure, panels = plt.subplots(1, len(kinds), figsize=(3.6 * len(kinds), 3.0), sharey=True, layout="constrained")
    for panel, (name, temperature) in zip(panels, kinds, strict=True):
        width = 0.8 / len(measured)
        for number, (method, parts) in enumerate(measured.items()):
            part = next(p for p in parts if (p["name"], p["temperature"]) == (name, temperature))
            shares = [100 * share for share in share_of_steps(part["accepted"])]
            places = [k + (number - (len(measured) - 1) / 2) * width for k in range(len(shares))]
            label = f"{method}: {part['length']:.2f} tokens a step"
            panel.bar(places, shares, width, label=label, color=COLORS[number % len(COLORS)])
        panel.set_title(f"{name}, {'greedy' if not temperature else f'T = {temperature:g}'}", fontsize=10)
        panel.set_xlabel("guesses accepted")
        panel.legend(fontsize=7, frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("% of steps with guesses")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Read the files and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    draw({file.stem: json.loads(file.read_text()) for file in arguments.files}, arguments.target)
    print(arguments.target)


if __name__ == "__main__":
    main()
