"""Records as tables for a terminal, and a bar while they are made. Knows rich; measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from samebit.bench.record import Record, Run
from samebit.bench.rows import Row
from samebit.bench.summary import Summary

_NAMES = {
    "ttft": "time to first token",
    "ttft_sent": "  since it was sent",
    "tpot": "time per output token",
    "itl": "between arrivals of tokens",
    "e2el": "to the last token",
    "e2el_sent": "  since it was sent",
}
_COUNTS = (
    ("requests answered", "completed", "{:,}"),
    ("requests failed", "failed", "{:,}"),
    ("broken off", "unfinished", "{:,}"),
    ("never sent", "unsent", "{:,}"),
    ("duration", "duration", "{:,.2f} s"),
    ("input tokens", "total_input_tokens", "{:,}"),
    ("  of them cached", "total_cached_tokens", "{:,}"),
    ("output tokens", "total_output_tokens", "{:,}"),
    ("requests a second", "request_throughput", "{:,.2f}"),
    ("  within the goals", "request_goodput", "{:,.2f}"),
    ("output tokens a second", "output_throughput", "{:,.1f}"),
    ("input tokens a second", "input_throughput", "{:,.1f}"),
    ("tokens a second in all", "total_token_throughput", "{:,.1f}"),
    ("steps", "steps", "{:,}"),
    ("a step", "ms_per_step", "{:,.3f} ms"),
    ("  of it the host's", "host_ms_per_step", "{:,.3f} ms"),
)
_HIDDEN_AT_ZERO = ("failed", "unfinished", "unsent")


def print_record(record: Record, console: Console) -> None:
    """The figures of each run, what to know about them, and, of a sweep, one line a run."""
    for run in record.runs:
        _print_run(run, console)
    if len(record.runs) > 1:
        console.print(_sweep(record.runs))
    if not record.is_complete:
        console.print("Interrupted: this is what was measured until then.", style="yellow")


@contextmanager
def run_bar(*, is_wanted: bool = True) -> Iterator[Callable[[str, int], Callable[[Row], None]]]:
    """Gives a function that begins a bar for a run of so many requests; on a terminal only."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, refresh_per_second=2, disable=not (is_wanted and console.is_terminal)
    ) as bar:

        def begin(name: str, num_requests: int) -> Callable[[Row], None]:
            task = bar.add_task(name, total=num_requests)
            failed = 0

            def advance(row: Row) -> None:
                nonlocal failed
                failed += row.error is not None
                bar.update(task, advance=1, description=f"{name}, {failed} failed" if failed else name)

            return advance

        yield begin


def notes(summary: Summary) -> list[str]:
    """What a reader must know before believing the figures."""
    found = [f"{count} failed: {reason}" for reason, count in summary["failures"].items()]
    if summary["completed"] and summary["tokens_counted_by"] != "usage":
        found.append(
            f"output tokens were counted by {summary['tokens_counted_by']}: the server told no usage, "
            "and a piece of text may hold several tokens"
        )
    if summary["ended_early"]:
        found.append(
            f"{summary['ended_early']} of {summary['completed']} answers ended before their full length "
            "(--ignore-eos holds them to it, where the server knows it)"
        )
    if summary.get("max_send_delay_ms", 0.0) > 100.0:
        found.append(
            f"a request was sent {summary['max_send_delay_ms']:,.0f} ms after its arrival: it waited for a place, "
            "or this machine was too slow"
        )
    return found


def _print_run(run: Run, console: Console) -> None:
    title = ", ".join(f"{name} {value}" for name, value in run.settings.items() if value is not None)
    if title:
        console.print(title, style="bold", highlight=False)
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    for label, name, form in _COUNTS:
        value = run.summary.get(name)
        if value is not None and not (name in _HIDDEN_AT_ZERO and not value):
            table.add_row(label, form.format(value))
    console.print(table)
    latencies = _latencies(run.summary)
    if latencies is not None:
        console.print(latencies)
    for note in notes(run.summary):
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    console.print()


def _latencies(summary: Summary) -> Table | None:
    has_waited = summary.get("max_send_delay_ms", 0.0) >= 1.0
    found = [kind for kind in _NAMES if f"mean_{kind}_ms" in summary and (has_waited or not kind.endswith("_sent"))]
    if not found:
        return None
    kinds = ["mean", "median", *_percentiles(summary, found[0])]
    table = Table("ms", *kinds, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind in found:
        table.add_row(_NAMES[kind], *(f"{summary[f'{which}_{kind}_ms']:,.2f}" for which in kinds))
    return table


def _percentiles(summary: Summary, kind: str) -> list[str]:
    ending = f"_{kind}_ms"
    names = (name.removesuffix(ending) for name in summary if name.endswith(ending))
    return [name for name in names if name[0] == "p"]


def _sweep(runs: Sequence[Run]) -> Table:
    columns = {
        "requests\na second": "request_throughput",
        "within\ngoals": "request_goodput",
        "tokens\nout a second": "output_throughput",
        "TTFT\np50": "median_ttft_ms",
        "\np99": "p99_ttft_ms",
        "TPOT\np50": "median_tpot_ms",
        " \np99": "p99_tpot_ms",
        "failed": "failed",
    }
    shown = {title: name for title, name in columns.items() if any(name in run.summary for run in runs)}
    table = Table("rate", "at\nonce", *shown, box=None)
    for column in table.columns:
        column.justify = "right"
    for run in runs:
        values = (run.summary.get(name) for name in shown.values())
        rate, limit = (run.settings[name] for name in ("request_rate", "max_concurrency"))
        table.add_row(
            f"{rate:g}",
            str(limit or "-"),
            *("" if v is None else f"{v:,.1f}" if isinstance(v, float) else f"{v:,}" for v in values),
        )
    return table
