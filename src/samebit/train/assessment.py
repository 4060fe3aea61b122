"""What was measured of a model by generating with the engine: counts, as JSON and as Markdown. Measures nothing itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path

import msgspec

from samebit.core.errors import ConfigError


class Nats(msgspec.Struct, frozen=True):
    """A sum of losses over predicted tokens, and the bytes of text that those stand for."""

    nats: float
    num_tokens: int
    num_bytes: int

    def __add__(self, other: Nats) -> Nats:
        return Nats(self.nats + other.nats, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.num_tokens

    @property
    def bits_per_byte(self) -> float:
        """The same per byte, which does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.num_bytes


class HeldOutLoss(msgspec.Struct, frozen=True):
    """Loss on windows of `context` tokens of one held-out package."""

    package: str
    context: int
    measured: Nats


class Answers(msgspec.Struct, frozen=True):
    """Greedy answers to `count` probes. `stopped`: the model ended its turn itself; `exact`: the answer is the expected one, and
    nothing but it; `valid`: of a fact, the value with its full stop is in the reply; of a call or JSON, it satisfies the schema.
    """

    count: int
    stopped: int
    exact: int
    valid: int

    def __add__(self, other: Answers) -> Answers:
        return Answers(
            *(a + b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))
        )


class Recall(msgspec.Struct, frozen=True):
    """Answers about facts last stated `distance` tokens ago, after so many corrections."""

    distance: int
    num_corrections: int
    answers: Answers


class Completions(msgspec.Struct, frozen=True):
    """Greedy completions of held-out code: how many end in a loop, and how many the model ended itself."""

    count: int
    tokens: int
    loops: int
    stopped: int


class Assessment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All measurements of one model. `fingerprint`, `profile`: the weights and numerics that gave them; `corpus`: its digest;
    `probes`: how many were asked for; `familiar_tools`: calls asked for as training dialogues ask, of tools such as they have.
    """

    model: str
    fingerprint: str
    profile: dict[str, str | int]
    corpus: str
    probes: int
    seconds: float
    held_out: list[HeldOutLoss]
    recall: list[Recall]
    tools: Answers
    familiar_tools: Answers
    json: Answers
    completions: Completions

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_assessment(path: Path) -> Assessment:
    """What `write` wrote. Raises ConfigError if it is anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Assessment)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: is not an assessment ({error})") from error


def markdown(found: Assessment) -> str:
    """The measurements as sections of a model card."""
    facts = [r for r in found.recall if not r.num_corrections]
    updated = [r for r in found.recall if r.num_corrections]
    code = found.completions
    parts = [
        "## Measurements\n",
        f"Greedy decoding by samebit's engine, fingerprint {found.fingerprint}, in {found.seconds:.0f} s:",
        f"`samebit train assess {found.model} DATA --probes {found.probes}` on corpus {found.corpus[:16]}. Whatever probes talk about, and",
        "how they say it, is in no training dialogue, unless a row says so; their code is from held-out packages.\n",
        "### Facts in dialogues\n",
        "*Exact*: the whole reply is the expected one and the model then stopped by itself. *Value*: the value is in the reply.\n",
        table(("distance, tokens", "corrections", *_ANSWER_HEAD[:2], "value", "stopped"), _recall_rows(found.recall)),
        f"\nFacts stated once: {_exact(facts)}. Facts updated since: {_exact(updated)}.\n",
        "### Tool calls and JSON\n",
        "*Valid*: the reply is one call of a declared tool (or one JSON text), and satisfies the schema. *Exact*: as expected.\n",
        table(("", *_ANSWER_HEAD), [(what, *_shares(answers)) for what, answers in _answer_rows(found)]),
        "\n### Held-out code\n",
        table(("package", "tokens", *_loss_head(found.held_out)), _loss_rows(found.held_out)),
        "\n### Greedy completion of held-out code\n",
        f"Of {code.count} completions of {code.tokens} tokens **{_percent(code.loops, code.count)}** end in a loop (a block of at",
        "most 48 tokens, at least 3 times and for at least 96 tokens);",
        f"{_percent(code.stopped, code.count)} stopped by themselves.",
    ]
    return "\n".join(parts) + "\n"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


_ANSWER_HEAD = ("probes", "exact", "valid", "stopped")


def _answer_rows(found: Assessment) -> list[tuple[str, Answers]]:
    return [
        ("tool calls, of unseen tools in unseen sentences", found.tools),
        ("tool calls, drawn anew as training's are", found.familiar_tools),
        ("JSON", found.json),
    ]


def _recall_rows(cells: Sequence[Recall]) -> list[tuple[object, ...]]:
    return [(r.distance, r.num_corrections, *_shares(r.answers)) for r in cells]


def _shares(answers: Answers) -> tuple[object, ...]:
    counts = (answers.exact, answers.valid, answers.stopped)
    return (answers.count, *(_percent(count, answers.count) for count in counts))


def _exact(cells: Sequence[Recall]) -> str:
    total = sum((r.answers for r in cells), Answers(0, 0, 0, 0))
    return f"**{_percent(total.exact, total.count)}** of {total.count} exact"


def _loss_head(losses: Sequence[HeldOutLoss]) -> list[str]:
    return [f"{unit} at {context}" for context in _contexts(losses) for unit in ("nats/token", "bits/byte")]


def _loss_rows(losses: Sequence[HeldOutLoss]) -> list[tuple[object, ...]]:
    packages = sorted({loss.package for loss in losses})
    named = [("**all**", losses), *((name, [loss for loss in losses if loss.package == name]) for name in packages)]
    return [(name, *_loss_cells(of_name, _contexts(losses))) for name, of_name in named]


def _loss_cells(losses: Sequence[HeldOutLoss], contexts: Iterable[int]) -> list[object]:
    totals = [reduce(Nats.__add__, (loss.measured for loss in losses if loss.context == c)) for c in contexts]
    shown = [f"{value:.4f}" for total in totals for value in (total.per_token, total.bits_per_byte)]
    return [totals[-1].num_tokens, *shown]


def _contexts(losses: Sequence[HeldOutLoss]) -> list[int]:
    return sorted({loss.context for loss in losses})


def _percent(count: int, of: int) -> str:
    return f"{100 * count / of:.1f} %" if of else "–"
