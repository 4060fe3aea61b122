"""The white-box audit: every prompt in every scenario, compared bit by bit with a solo cold run of the same engine.

The reference has one thread, nothing beside it and whole prompts, and publishes its state at every page boundary. The
audit counts what really happened, so that an arm in which nothing was hit, preempted or batched is a problem.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from samebit.audit.compare import Comparison, Reference, compare, make_reference, order
from samebit.audit.drafts import told_drafter
from samebit.audit.prompts import sibling
from samebit.audit.recording import WHOLE_ANSWER, AuditPrompt, Record, record_runs
from samebit.audit.scenarios import CHUNKS, Scenario, all_scenarios
from samebit.audit.state import SeenMemory
from samebit.audit.values import Cell, Counts, Difference, Environment, ScenarioResult, WhiteBoxReport
from samebit.core.config import EngineConfig, Schedule
from samebit.core.request import SpeculationCounts
from samebit.engine.engine import Engine

MakeEngine = Callable[..., Engine]  # as Engine: settings, and a drafter where the arm brings one
MakePrompts = Callable[[Engine], list[AuditPrompt]]
OnScenario = Callable[[ScenarioResult, int], None]

_REFERENCE_STEP = 2048


def audit_model(
    config: EngineConfig,
    make_prompts: MakePrompts,
    *,
    seed: int = 0,
    scenarios: Sequence[Scenario] | None = None,
    max_seconds: float | None = None,
    make_engine: MakeEngine = Engine,
    on_scenario: OnScenario | None = None,
) -> WhiteBoxReport:
    """Audit the engine that `config` describes. Fresh and freed memory is poisoned, ids are given out in seeded order.

    `make_prompts` gets the reference engine. `on_scenario` is called after each scenario with their number. After
    `max_seconds` no other begins, and the report says how many are left. Raises ConfigError, ModelError or InvalidRequestError
    when the audit cannot run.
    """
    started = time.monotonic()
    environment = Environment.here()
    # An engine for each few scenarios: it captures those of its steps that they need.
    base = msgspec.structs.replace(config, poison=True, checkpoint_interval=2 * config.page_size, capture="use")
    engine = make_engine(_reference_config(base))
    info, prompts = engine.info, make_prompts(engine)
    if scenarios is None:
        # Time may end an audit: what it was asked to have guessed comes first.
        own_first = base.speculative_config is not None
        scenarios = all_scenarios(str(info.profile["device"]), own_first=own_first)
    wanted = list(scenarios)
    references = [_reference(engine, prompt, number) for number, prompt in enumerate(prompts)]
    del engine
    results: list[ScenarioResult] = []
    told = {"told": (told_drafter(prompts, references),)}
    for (drafts, setup), group in itertools.groupby(wanted, key=lambda one: (one.drafts, one.config(base, seed))):
        if _is_over(started, max_seconds):
            break
        engine = make_engine(setup, *told.get(drafts, ()))
        for scenario in itertools.takewhile(lambda _: not _is_over(started, max_seconds), group):
            results.append(_Arm(engine, scenario, prompts, references).run())
            if on_scenario is not None:
                on_scenario(results[-1], len(wanted))
        del engine
    problems = [f"{result.name}: {problem}" for result in results for problem in result.problems]
    for prompt, reference in zip(prompts, references, strict=True):
        if (error := reference.values[WHOLE_ANSWER, "error"].text) != repr(None):
            problems.append(f"reference: request {prompt.name!r} failed: {error}")
    counts = sum((result.counts for result in results), Counts())
    if not counts.observations:
        problems.append("nothing was compared")
    cells = [cell for result in results for cell in result.cells]
    found = [cell.first_difference for cell in cells if cell.first_difference is not None]
    return WhiteBoxReport(
        model=config.model,
        system_fingerprint=info.system_fingerprint,
        profile=info.profile,
        environment=environment,
        seed=seed,
        status=int(bool(problems) or counts.mismatches > 0),
        seconds=time.monotonic() - started,
        observations=counts.observations,
        mismatches=counts.mismatches,
        positions=sum(cell.positions for cell in cells),
        counts=counts,
        requests={
            name: sum(getattr(cell, name) for cell in cells) for name in ("runs", "hits", "preempted", "batched")
        },
        guesses={name: sum(getattr(cell, name) for cell in cells) for name in ("guessed", "accepted")},
        first_difference=min(found, key=order, default=None),
        problems=problems,
        scenarios_left=len(wanted) - len(results),
        scenarios=results,
    )


def _is_over(started: float, max_seconds: float | None) -> bool:
    return max_seconds is not None and time.monotonic() - started >= max_seconds


def _reference_config(base: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(
        base,
        num_threads=1,
        max_num_batched_tokens=max(_REFERENCE_STEP, base.max_num_batched_tokens),
        checkpoint_interval=base.page_size,
        enable_prefix_caching=True,
        graph="eager",
        capture="start",  # kernels are compiled side by side then
        schedule=Schedule(),
    )


def _reference(engine: Engine, prompt: AuditPrompt, number: int) -> Reference:
    """A run without guesses in a namespace of its own, whose state, a drafter's too, is copied before the cache is emptied."""
    request = prompt.request(str(number), f"reference {number}")
    silent = msgspec.structs.replace(request.params, speculation=False)
    request = msgspec.structs.replace(request, params=silent)
    (record,), _ = record_runs(engine, [request], SeenMemory(), is_solo=True)
    assert not record.num_cached, "nobody else uses this namespace"
    engine.manager.drop_all_checkpoints()
    return make_reference(record)


@dataclass(slots=True)
class _Tally:
    """What one prompt showed in one scenario."""

    counts: Counts = field(default_factory=Counts)
    positions: int = 0
    num_unknown: int = 0
    runs: int = 0
    hits: int = 0
    preempted: int = 0
    batched: int = 0
    cached_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    found: list[Difference] = field(default_factory=list)

    def take(self, record: Record, comparison: Comparison) -> None:
        self.counts += comparison.counts
        self.positions += len({position for position, _ in record.values} - {WHOLE_ANSWER})
        self.num_unknown += comparison.num_unknown
        self.runs += 1
        self.hits += record.num_cached > 0
        self.preempted += record.num_preemptions > 0
        self.batched += record.was_batched
        self.cached_tokens += record.num_cached
        self.speculation += record.speculation
        self.found += [comparison.first] if comparison.first is not None else []

    def cell(self, name: str) -> Cell:
        return Cell(
            request=name,
            observations=self.counts.observations,
            mismatches=self.counts.mismatches,
            positions=self.positions,
            runs=self.runs,
            hits=self.hits,
            preempted=self.preempted,
            batched=self.batched,
            cached_tokens=self.cached_tokens,
            guessed=self.speculation.num_draft_tokens,
            accepted=self.speculation.num_accepted_tokens,
            first_difference=min(self.found, key=order, default=None),
        )


class _Arm:
    """One scenario on one engine."""

    def __init__(
        self, engine: Engine, scenario: Scenario, prompts: Sequence[AuditPrompt], references: Sequence[Reference]
    ) -> None:
        self._engine = engine
        self._scenario = scenario
        self._prompts = prompts
        self._references = references
        self._tallies = [_Tally() for _ in prompts]
        self._num_steps = 0
        self._before = _faults(engine)

    def run(self) -> ScenarioResult:
        started = time.monotonic()
        seen = SeenMemory()
        if self._scenario.cache == "hit":
            siblings = [sibling(prompt, self._engine.manager.geometry.page_size) for prompt in self._prompts]
            self._submit("siblings", siblings, SeenMemory())
            for turn in ("first", "second"):
                self._take(self._submit(turn, self._prompts, seen))
        else:
            self._take(self._submit("only", self._prompts, seen))
        self._engine.manager.drop_all_checkpoints()
        cells = [tally.cell(prompt.name) for tally, prompt in zip(self._tallies, self._prompts, strict=True)]
        counts = sum((tally.counts for tally in self._tallies), Counts())
        return ScenarioResult(
            name=self._scenario.name,
            axes=self._scenario.axes,
            counts=counts,
            seconds=time.monotonic() - started,
            cells=cells,
            problems=self._problems(cells, counts),
        )

    def _submit(self, turn: str, prompts: Sequence[AuditPrompt], seen: SeenMemory) -> list[Record]:
        shares = self._scenario.cache == "hit"
        name = self._scenario.name
        requests = [
            prompt.request(f"{name}, {turn} {n}", name if shares else f"{name}, {turn} {n}")
            for n, prompt in enumerate(prompts)
        ]
        records, num_steps = record_runs(self._engine, requests, seen, is_solo=self._scenario.company == "solo")
        self._num_steps += num_steps
        return records

    def _take(self, records: Sequence[Record]) -> None:
        for tally, prompt, reference, record in zip(
            self._tallies, self._prompts, self._references, records, strict=True
        ):
            tally.take(record, compare(prompt.name, reference, record))

    def _problems(self, cells: list[Cell], counts: Counts) -> list[str]:
        """Why this arm proves less than its name says."""
        scenario, problems = self._scenario, []
        hits, preempted, batched = (sum(getattr(c, name) for c in cells) for name in ("hits", "preempted", "batched"))
        if scenario.cache == "hit" and not hits:
            problems.append("no request was a cache hit")
        if scenario.cache != "hit" and hits:
            problems.append(f"{hits} requests that had to be cold were cache hits")
        if scenario.company == "preempted" and not preempted:
            problems.append("no request was preempted")
        if scenario.company != "solo" and not batched:
            problems.append("no step served two requests")
        if scenario.cache != "off" and not counts.state_rows:
            problems.append("no state was published")
        guessed, accepted = (sum(getattr(cell, name) for cell in cells) for name in ("guessed", "accepted"))
        if (guessed > 0) != (scenario.drafts != "none"):
            problems.append(f"{guessed} tokens were guessed")
        if scenario.drafts == "told" and not 0 < accepted < guessed:
            problems.append(f"{accepted} of {guessed} guesses were accepted")
        if scenario.company == "solo" and scenario.cache == "off" and self._num_steps <= self._least_steps():
            problems.append("no prompt was cut into chunks")
        unknown = sum(tally.num_unknown for tally in self._tallies)
        if unknown:
            problems.append(f"{unknown} state rows have no reference: the cache is too small for one request")
        for name, count in _faults(self._engine).items():
            if count > self._before[name]:
                problems.append(f"{name} rose by {count - self._before[name]}")
        return problems

    def _least_steps(self) -> int:
        """Steps of solo runs without a cache whose prompts are whole; -1 where no prompt could be cut."""
        sizes = CHUNKS[self._scenario.chunks]
        if not sizes or all(len(prompt.token_ids) <= max(sizes) for prompt in self._prompts):
            return -1
        return sum(sum(component == "token" for _, component in r.values) for r in self._references)


def _faults(engine: Engine) -> dict[str, int]:
    counters = engine.scheduler.counters
    return {
        "num_refused_checkpoints": counters.num_refused_checkpoints,
        "num_damaged_resumes": counters.num_damaged_resumes,
    }
