"""What an audit finds, as plain frozen values; their JSON is the report. Knows no engine, no HTTP and no layout."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from typing import Literal

import msgspec

SCHEMA = 1

Verdict = Literal["holds", "broken", "not checkable"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is not what it should be.

    `position` counts tokens of prompt and answer from 0 (-1: the answer as a whole). `layer` is empty for what the model
    puts out, else a layer of the state; `element` is the first differing number of a row (-1: the value is no row).
    """

    request: str
    position: int
    layer: str
    component: str
    element: int
    expected: str
    observed: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many values were compared, by kind, and how many differed.

    `tokens`: ids of drawn and of alternative tokens, and ranks. `logprobs`: of drawn, alternative and scored tokens.
    `state_rows`: one K, V or convolution row of one position in one layer. `endings`: text, finish and stop reasons.
    """

    tokens: int = 0
    logprobs: int = 0
    state_rows: int = 0
    endings: int = 0
    mismatches: int = 0

    @property
    def observations(self) -> int:
        """Values compared, of all kinds."""
        return self.tokens + self.logprobs + self.state_rows + self.endings

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return Counts(**{name: mine[name] + theirs[name] for name in mine})


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in one scenario.

    `positions`: token positions whose outputs were compared. `runs`: how often it ran; `hits`, `preempted`, `batched`: how
    many of these runs really were that, by the engine's own account. `guessed`, `accepted`: tokens guessed ahead, and
    those of them that were drawn.
    """

    request: str
    observations: int
    mismatches: int
    positions: int
    runs: int
    hits: int
    preempted: int
    batched: int
    cached_tokens: int
    guessed: int
    accepted: int
    first_difference: Difference | None = None


class ScenarioResult(msgspec.Struct, frozen=True, kw_only=True):
    """All prompts in one scenario. `problems`: why the scenario proves less than it should."""

    name: str
    axes: dict[str, str]
    counts: Counts
    seconds: float
    cells: list[Cell]
    problems: list[str]


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where the audit ran, and since when (UTC)."""

    samebit: str
    python: str
    machine: str
    num_cpus: int
    started: str

    @staticmethod
    def here() -> Environment:
        """This process, now."""
        try:
            version = importlib.metadata.version("samebit")
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        return Environment(
            samebit=version,
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            num_cpus=os.cpu_count() or 1,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )


class WhiteBoxReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="white-box"):
    """An engine compared with itself. `status`: 0 all equal, 1 differences or problems. `scenarios_left`: not reached in time."""

    schema: int = SCHEMA
    model: str
    system_fingerprint: str
    profile: dict[str, str | int]
    environment: Environment
    seed: int
    status: int
    seconds: float
    observations: int
    mismatches: int
    positions: int
    counts: Counts
    requests: dict[str, int]
    guesses: dict[str, int]
    first_difference: Difference | None
    problems: list[str]
    scenarios_left: int
    scenarios: list[ScenarioResult]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One promise put to a server. `comparisons`: pairs of answers compared. `reproduce`: shell lines that show a break."""

    name: str
    promise: str
    verdict: Verdict
    comparisons: int
    detail: str
    reproduce: list[str]


class BlackBoxReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="black-box"):
    """A server compared with itself. `status`: 0 no promise broken, 1 some are, 2 nothing could be checked."""

    schema: int = SCHEMA
    url: str
    model: str
    system_fingerprint: str
    abilities: dict[str, bool]
    environment: Environment
    seed: int
    status: int
    seconds: float
    num_requests: int
    comparisons: int
    checks: list[Check]


Report = WhiteBoxReport | BlackBoxReport
