"""An audit's report as text for a terminal. Knows the report's values only."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samebit.audit.values import BlackBoxReport, Check, Difference, Report, ScenarioResult, WhiteBoxReport

_COUNTED = ("hits", "preempted", "batched")
_COLOURS = {"holds": "green", "broken": "red", "not checkable": "yellow"}


def print_report(report: Report, console: Console) -> None:
    """Totals, a table, and the first difference or the requests that reproduce one."""
    if isinstance(report, WhiteBoxReport):
        _print_white_box(report, console)
    else:
        _print_black_box(report, console)


def scenario_line(result: ScenarioResult) -> str:
    """One scenario in a line, for progress."""
    verdict = "exact" if not result.counts.mismatches else f"{result.counts.mismatches:,} differ"
    return f"{result.name}: {result.counts.observations:,} observations, {verdict} ({result.seconds:.1f} s)"


def describe(difference: Difference) -> str:
    """Where a difference is, and both values."""
    where = f"position {difference.position}" if difference.position >= 0 else "the answer as a whole"
    layer = f", layer {difference.layer}" if difference.layer else ""
    element = f"[{difference.element}]" if difference.element >= 0 else ""
    values = f"expected {difference.expected}, observed {difference.observed}"
    return f"request {difference.request!r}, {where}{layer}, {difference.component}{element}: {values}"


def _print_white_box(report: WhiteBoxReport, console: Console) -> None:
    table = Table("scenario", "values", "differ", *_COUNTED, "accepted", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column is table.columns[0] else "right"
    for result in report.scenarios:
        numbers = [sum(getattr(c, name) for c in result.cells) for name in _COUNTED]
        colour = "red" if result.counts.mismatches or result.problems else "green"
        guessed, accepted = (sum(getattr(c, name) for c in result.cells) for name in ("guessed", "accepted"))
        guesses = f"{accepted}/{guessed}" if guessed else ""
        shown = [f"{result.counts.observations:,}", f"{result.counts.mismatches:,}", *map(str, numbers), guesses]
        table.add_row(f"[{colour}]{escape(result.name)}[/]", *shown)
    console.print(table)
    counts = report.counts
    console.print(
        f"{report.observations:,} observations at {report.positions:,} token positions in {report.seconds:.0f} s: "
        f"{counts.tokens:,} tokens and ranks, {counts.logprobs:,} logprobs, {counts.state_rows:,} state rows, "
        f"{counts.endings:,} endings",
        highlight=False,
    )
    console.print(f"{report.mismatches:,} mismatches", style="red" if report.mismatches else "green")
    if report.scenarios_left:
        console.print(f"{report.scenarios_left} scenarios were not reached in time", style="yellow")
    if report.first_difference is not None:
        console.print(f"first difference: {escape(describe(report.first_difference))}", soft_wrap=True)
    for problem in report.problems:
        console.print(f"problem: {escape(problem)}", style="red", soft_wrap=True)


def _print_black_box(report: BlackBoxReport, console: Console) -> None:
    lacks = [name for name, has in report.abilities.items() if not has]
    console.print(f"{report.url}, model {report.model}" + (f"; lacks {', '.join(lacks)}" if lacks else ""))
    table = Table("check", "verdict", "compared", "detail")
    for check in report.checks:
        table.add_row(check.name, f"[{_COLOURS[check.verdict]}]{check.verdict}[/]", *_rest(check))
    console.print(table)
    console.print(f"{report.comparisons} comparisons, {report.num_requests} requests, {report.seconds:.0f} s")
    for check in report.checks:
        if check.verdict == "broken" and check.reproduce:
            console.print(f"\n{check.name}: to reproduce", style="red")
            for line in check.reproduce:
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rest(check: Check) -> tuple[str, str]:
    return str(check.comparisons), escape(check.detail)
