"""The model card: shape, training, measurements, commands, and the sources with their licences. Writes text; knows no files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from samebit.train.assessment import Assessment, markdown, table
from samebit.train.model import Inkling
from samebit.train.tokens import SPECIAL_TOKENS

_Json = Mapping[str, Any]  # Any: JSON

_HEAD = """---
license: apache-2.0
language: [en, code]
pipeline_tag: text-generation
---

# {name}

A small language model in the Inkling architecture. It completes Python, remembers facts across a long conversation, and knows
nothing about the world.
"""


def card(
    model: Inkling, manifest: _Json, history: Sequence[_Json], name: str, assessment: Assessment | None = None
) -> str:
    """The card of a model that was trained on the corpus of `manifest` in the stages of `history`.

    Without an `assessment` it shows the recall that training measured, in the training model and without generating.
    """
    measured = _teacher_forced(history) if assessment is None else markdown(assessment)
    parts = [_HEAD.format(name=name), _facts(model), _stages(history, name), measured, _sources(manifest)]
    return "\n".join(parts)


def _facts(model: Inkling) -> str:
    config = model.config
    windows = f"of which {sum(config.is_window)} with a {config.sliding_window_size}-token window"
    experts = f"{config.num_experts_per_tok} chosen, {config.n_shared_experts} shared"
    controls = f"the first {len(SPECIAL_TOKENS)} control tokens"
    rows = (
        ("parameters", f"{model.num_parameters() / 1e6:.2f} M, draft depths included"),
        ("layers", f"{config.num_hidden_layers}, {windows}"),
        ("hidden size", config.hidden_size),
        ("experts", f"{config.n_routed_experts} routed, {experts}"),
        ("draft depths", len(model.depths)),
        ("tokenizer", f"byte-level BPE, {config.unpadded_vocab_size} tokens, {controls}"),
        ("positions", config.model_max_length),
    )
    return f"## Facts\n\n{table(('', ''), rows)}\n"


def _stages(history: Sequence[_Json], name: str) -> str:
    rows = [
        (
            entry["stage"],
            entry["steps"],
            f"{entry['tokens'] / 1e6:.1f} M",
            f"{entry['seconds']:.0f}",
            ", ".join(f"{value:.3f} at {context}" for context, value in entry["evaluation"]["loss"].items()),
            f"{entry['evaluation']['bits_per_byte']:.4f}",
        )
        for entry in history
    ]
    head = ("stage", "steps", "tokens", "seconds", "held-out nats/token", "bits/byte")
    commands = ["samebit train corpus DATA", *_commands(history), f"samebit train export DATA RUN {name}"]
    return "\n".join(
        [
            "## Training\n",
            table(head, rows),
            "\nSteps, tokens and seconds count from the start, or from the checkpoint that a stage began with.\n",
            "```",
            *commands,
            "```\n",
        ]
    )


def _commands(history: Sequence[_Json]) -> list[str]:
    """A command a stage. One that began with the weights of the stage before, and no more, had a folder of its own."""
    found = []
    for entry in history:
        start = ""
        if entry.get("from_checkpoint"):
            found += ["samebit train export DATA RUN BEFORE", "rm -r RUN"]
            start = " --start BEFORE"
        found.append(f"samebit train nano DATA RUN --stage {entry['stage']}{start}")
    return found


def _teacher_forced(history: Sequence[_Json]) -> str:
    rows = [
        (r["distance"], r["num_corrections"], r["count"], f"{100 * r['replies']:.1f} %", f"{100 * r['values']:.1f} %")
        for r in (history[-1]["evaluation"]["recall"] if history else [])
    ]
    return "\n".join(
        [
            "## Measurements\n",
            "Recall of the last stage, in probes whose names and sentences are in no training dialogue. *Reply*: every token of",
            "the answer is the likeliest after those before it; *value*: those of the value and its full stop are.\n",
            table(("distance, tokens", "corrections", "probes", "reply", "value"), rows) + "\n",
        ]
    )


def _sources(manifest: _Json) -> str:
    by_licence: dict[str, list[str]] = defaultdict(list)
    for package in manifest["packages"]:
        by_licence[package["licence"]].append(f"{package['name']} {package['version']}")
    return "\n".join(
        [
            "## Sources and licences\n",
            f"Corpus {manifest['digest'][:16]}. Licences are as each package states them.",
            f"Held out: {', '.join(package['name'] for package in manifest['held_out'])}.\n",
            *(f"- **{licence}**: {', '.join(sorted(names))}" for licence, names in sorted(by_licence.items())),
            "",
        ]
    )
