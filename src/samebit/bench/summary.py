"""Figures of a run from its rows, under the names of vLLM's benchmark. Failed and broken-off requests are counted, not averaged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from samebit.bench.rows import Row
from samebit.core.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")
PERCENTILES = (90.0, 95.0, 99.0)

Summary = dict[str, Any]  # Any: counts, figures, and reasons of failures by name


def summarize(
    rows: Sequence[Row],
    duration_s: float,
    *,
    num_planned: int,
    goals: Mapping[str, float] | None = None,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = PERCENTILES,
) -> Summary:
    """Counts, rates and latencies in milliseconds; `goals` are upper limits in milliseconds by metric.

    Latencies count from the planned arrival; those called `..._sent` from the sending. A figure that nothing gives is left out.
    """
    done = [row for row in rows if row.is_complete]
    failures = Counter(row.error for row in rows if row.error is not None)
    inputs = [row.num_input_tokens for row in done]
    num_input = None if None in inputs else sum(filter(None, inputs))
    num_output = sum(row.num_output_tokens for row in done)
    found: Summary = {
        "completed": len(done),
        "failed": failures.total(),
        "unfinished": len(rows) - len(done) - failures.total(),
        "unsent": num_planned - len(rows),
        "duration": duration_s,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": _known_sum([row.num_cached_tokens for row in done]),
        "ended_early": sum(row.has_usage and row.num_output_tokens < row.max_tokens for row in done),
        "tokens_counted_by": _counted_by(done),
        "failures": dict(failures.most_common()),
    }
    found |= _rates(found, goals or {}, done)
    for name in metrics:
        for kind, values in _samples(name, done).items():
            found |= _spread_of(kind, values, percentiles)
    if rows:
        found["max_send_delay_ms"] = 1e3 * max(row.sent_s - row.planned_s for row in rows)
    return found


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """{"ttft": 500.0} of ["ttft:500"]. Raises ConfigError for anything else."""
    found = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in GOALS or not limit:
            raise ConfigError(
                f"goodput={text!r}: must be a limit in milliseconds, as in ttft:500 (NAME:MS); of {', '.join(GOALS)}"
            )
        found[name] = parse_number("goodput", text, limit)
    return found


def parse_metrics(text: str) -> tuple[str, ...]:
    """Metrics of a list with commas. Raises ConfigError for an unknown one."""
    names = tuple(text.split(","))
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"percentile_metrics={text!r}: must be of {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Percentiles of a list with commas. Raises ConfigError for what is none."""
    found = tuple(parse_number("metric_percentiles", text, part) for part in text.split(","))
    if max(found) > 100.0:
        raise ConfigError(f"metric_percentiles={text!r}: must be between 0 and 100")
    return found


def parse_number(name: str, text: str, part: str) -> float:
    """A number that is not negative. Raises ConfigError, which names the flag and its whole value."""
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value < 0.0:
        raise ConfigError(f"{name}={text!r}: {part!r} is not a number of at least 0")
    return value


def _samples(name: str, done: Sequence[Row]) -> dict[str, list[float]]:
    """Seconds by name of the figure."""
    if name == "ttft":
        return {"ttft": [r.ttft_s() for r in done], "ttft_sent": [r.ttft_s(since_sent=True) for r in done]}
    if name == "e2el":
        return {"e2el": [r.e2el_s() for r in done], "e2el_sent": [r.e2el_s(since_sent=True) for r in done]}
    if name == "tpot":
        return {"tpot": [value for row in done if (value := row.tpot_s()) is not None]}
    return {"itl": [gap for row in done for gap in row.itl_s()]}


def _spread_of(kind: str, values: Sequence[float], percentiles: Sequence[float]) -> Summary:
    if not values:
        return {}
    ms = 1e3 * np.asarray(values)
    found = {f"mean_{kind}_ms": float(ms.mean()), f"median_{kind}_ms": float(np.median(ms))}
    found |= {f"std_{kind}_ms": float(ms.std()), f"max_{kind}_ms": float(ms.max())}
    return found | {f"p{q:g}_{kind}_ms": float(np.percentile(ms, q)) for q in percentiles}


def _rates(counts: Summary, goals: Mapping[str, float], done: Sequence[Row]) -> Summary:
    duration_s = counts["duration"]
    if duration_s <= 0:
        return {}
    rates = {
        "request_throughput": len(done) / duration_s,
        "output_throughput": counts["total_output_tokens"] / duration_s,
    }
    if counts["total_input_tokens"] is not None:
        rates["input_throughput"] = counts["total_input_tokens"] / duration_s
        rates["total_token_throughput"] = rates["input_throughput"] + rates["output_throughput"]
    if goals:
        num_good = sum(_is_good(row, goals) for row in done)
        sent = counts["completed"] + counts["failed"]
        rates |= {"request_goodput": num_good / duration_s, "good_share": num_good / sent if sent else 0.0}
    return rates


def _is_good(row: Row, goals: Mapping[str, float]) -> bool:
    taken_s = {"ttft": row.ttft_s(), "tpot": row.tpot_s() or 0.0, "e2el": row.e2el_s()}
    return all(1e3 * taken_s[name] <= limit for name, limit in goals.items())


def _known_sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _counted_by(done: Sequence[Row]) -> str:
    kinds = {row.has_usage for row in done}
    return "usage and chunks" if len(kinds) == 2 else "chunks" if kinds == {False} else "usage"
