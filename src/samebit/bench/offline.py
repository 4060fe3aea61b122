"""`samebit bench throughput` and `latency`: an engine in this process, driven step by step. Knows no HTTP and no flags."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from samebit.bench.datasets import Conversation, Workload, conversations
from samebit.bench.environment import environment
from samebit.bench.record import Record, Run, command_line
from samebit.bench.rows import Row
from samebit.bench.summary import METRICS, PERCENTILES, Summary, summarize
from samebit.bench.texts import counted
from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError
from samebit.core.request import EngineOutput, Request, SamplingParams
from samebit.engine.engine import Engine

_GAUGES = ("num_running", "num_waiting", "usage_", "mean_")

OnRun = Callable[[str, int], Callable[[Row], None]]


class OfflineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and what is told; the fields are the command line's flags."""

    label: str = ""
    num_iters: int = 1
    num_warmups: int = 1
    percentile_metrics: tuple[str, ...] = METRICS
    metric_percentiles: tuple[float, ...] = PERCENTILES
    save_detailed: bool = False


class Batch:
    """Conversations that all arrive at once, and what has been measured of them. Each answer has its full length, greedy."""

    def __init__(
        self,
        engine: Engine,
        plan: Sequence[Conversation],
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_end: Callable[[Row], None] = lambda _: None,
    ) -> None:
        self._engine, self._plan, self._clock, self._on_end = engine, plan, clock, on_end
        self._open: dict[str, Row] = {}
        # Encoded before the clock runs.
        self._said = [self._ids(one.system, one.num_system_tokens) for one in plan]
        self._asked = [[self._ids(turn.text, turn.num_tokens) for turn in one.turns] for one in plan]
        self._begin_s = 0.0
        self.rows: list[Row] = []
        self.num_steps = 0
        self.duration_s = 0.0
        self.engine_totals: dict[str, float] = {}

    def run(self) -> bool:
        """Go on until everything has been answered. False if it was interrupted before. Raises InvalidRequestError."""
        before = self._engine.stats()
        self._begin_s = self._clock()
        try:
            for number in range(len(self._plan)):
                self._send(number, 0, 0.0)
            while self._engine.has_work:
                outputs = self._engine.step()
                self.num_steps += 1
                now_s = self._clock() - self._begin_s
                for output in outputs:
                    self._take(output, now_s)
        except KeyboardInterrupt:
            return False
        finally:
            self.duration_s = self._clock() - self._begin_s
            for request_id in self._open:
                self._engine.abort(request_id)
            after = self._engine.stats().items()
            changed = {name: value - before.get(name, 0) for name, value in after if not name.startswith(_GAUGES)}
            self.engine_totals = {name: value for name, value in changed.items() if value}
        return True

    def _send(self, number: int, index: int, planned_s: float) -> None:
        turn = self._plan[number].turns[index]
        self._said[number] += self._asked[number][index]
        prompt = list(self._said[number])
        request = Request(
            request_id=f"{number}-{index}",
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=turn.max_tokens, ignore_eos=True),
            seed=0,
        )
        row = Row(
            conversation=number,
            turn=index,
            max_tokens=turn.max_tokens,
            planned_s=planned_s,
            sent_s=planned_s,  # taking it in is the engine's work
            num_input_tokens=len(prompt),
            has_usage=True,
        )
        self._engine.add(request)
        self.rows.append(row)
        self._open[request.request_id] = row

    def _take(self, output: EngineOutput, now_s: float) -> None:
        row = self._open[output.request_id]
        if output.token_ids:
            row.token_s.append(now_s)
            row.num_output_tokens += len(output.token_ids)
            self._said[row.conversation] += output.token_ids
        if output.finish_reason is None:
            return
        del self._open[output.request_id]
        row.num_cached_tokens = output.num_cached_tokens
        row.error = output.error
        row.is_complete = row.error is None
        self._on_end(row)
        if row.is_complete and row.turn + 1 < len(self._plan[row.conversation].turns):
            self._send(row.conversation, row.turn + 1, now_s)

    def _ids(self, text: str, num_tokens: int) -> list[int]:
        """Exactly `num_tokens` tokens of `text`, from its beginning again where it has fewer."""
        if not num_tokens:
            return []
        ids = self._engine.tokenizer.encode(text, allow_special=False)
        return list(itertools.islice(itertools.cycle(ids), num_tokens))


def bench_engine(
    kind: str, config: EngineConfig, settings: OfflineSettings, workload: Workload, on_run: OnRun
) -> Record:
    """Load the model and measure: all of `workload` at once, and that `num_iters` times, each time with other text.

    Raises ConfigError, ModelError or InvalidRequestError when it cannot be run. An interrupt ends it; what was measured is kept.
    """
    workload.validate()
    engine = Engine(config)
    cost = counted(engine.tokenizer)
    plans = [conversations(workload, cost, run) for run in range(settings.num_iters + settings.num_warmups)]
    _check_lengths(engine, (one for plan in plans for one in plan))
    told = environment(engine.info)
    on_end = on_run(kind, settings.num_iters * sum(len(one.turns) for one in plans[0]))
    batches = [Batch(engine, plan, on_end=on_end) for plan in plans[: settings.num_iters]]
    warm_ups = [Batch(engine, plan) for plan in plans[settings.num_iters :]]
    is_complete = all(batch.run() for batch in (*warm_ups, *batches))
    rows = [row for batch in batches for row in batch.rows]
    num_planned = settings.num_iters * sum(len(one.turns) for one in plans[0])
    run = Run(
        settings={},
        summary=_summary(batches, rows, settings, num_planned),
        is_complete=is_complete,
        requests=rows if settings.save_detailed else None,
    )
    return Record(
        kind=kind,
        label=settings.label or config.model,
        command=command_line(),
        seed=workload.seed,
        settings={
            **msgspec.to_builtins(workload),
            **msgspec.to_builtins(settings),
            "engine": msgspec.to_builtins(config),
        },
        environment=told,
        is_complete=is_complete,
        runs=[run],
    )


def _summary(batches: Sequence[Batch], rows: Sequence[Row], settings: OfflineSettings, num_planned: int) -> Summary:
    found = summarize(
        rows,
        sum(batch.duration_s for batch in batches),
        num_planned=num_planned,
        metrics=settings.percentile_metrics,
        percentiles=settings.metric_percentiles,
    )
    totals: dict[str, float] = {}
    for batch in batches:
        for name, value in batch.engine_totals.items():
            totals[name] = totals.get(name, 0) + value
    num_steps = int(totals.get("num_steps", sum(batch.num_steps for batch in batches)))
    found |= {"steps": num_steps, "engine": totals}
    if num_steps:
        found["ms_per_step"] = 1e3 * found["duration"] / num_steps
        if "host_s" in totals:
            found["host_ms_per_step"] = 1e3 * totals["host_s"] / num_steps
    return found


def _check_lengths(engine: Engine, plan: Iterable[Conversation]) -> None:
    longest = max(plan, key=lambda one: one.num_tokens + one.turns[-1].max_tokens)
    num_prompt, num_answer = longest.num_tokens, longest.turns[-1].max_tokens
    if num_prompt + num_answer > engine.info.max_length:
        raise ConfigError(
            f"a prompt of {num_prompt} tokens and {num_answer} of its answer: max_model_len is {engine.info.max_length}"
        )
