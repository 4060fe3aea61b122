"""An audit's report as one HTML file: inline SVG and CSS, no script, nothing fetched. Knows the report's values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from samebit.audit.text import describe
from samebit.audit.values import BlackBoxReport, Cell, Report, WhiteBoxReport

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } pre { background: #f3f4f6; padding: .6rem; overflow-x: auto }
.verdict { font-size: 1.4rem; font-weight: 600 } .exact { color: #1a7f37 } .differs { color: #c62828 } .unknown { color: #8a6d00 }
svg text { font: 12px system-ui, sans-serif; fill: #1b1f24 }
"""
_COLOURS = {"exact": "#3fa45b", "differs": "#d64545", "unknown": "#d8b93c"}
_MARKS = {"exact": "", "differs": "×", "unknown": "?"}
_VERDICTS = {"holds": "exact", "broken": "differs", "not checkable": "unknown"}
_SIDE, _LABEL, _HEAD = 22, 200, 20


class Square(NamedTuple):
    """A cell of the grid: `kind` is exact, differs or unknown; `title` is shown when it is pointed at."""

    kind: str
    title: str


def render_page(report: Report) -> str:
    """The whole document."""
    if isinstance(report, WhiteBoxReport):
        title, body = f"samebit audit of {report.model}", _white_box(report)
    else:
        title, body = f"samebit audit of {report.url}", _black_box(report)
    verdict = {
        0: '<p class="verdict exact">all equal</p>',
        1: '<p class="verdict differs">not equal, or not proved</p>',
    }.get(report.status, '<p class="verdict unknown">could not be checked</p>')
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{verdict}\n{body}\n</body></html>\n"
    )


def grid(rows: Sequence[str], columns: Sequence[str], squares: Sequence[Sequence[Square]]) -> str:
    """SVG with a square per row and column. Columns are numbered; their names are in the titles."""
    width, height = _LABEL + _SIDE * len(columns) + 10, _HEAD + _SIDE * len(rows) + 10
    parts = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">']
    for x, column in enumerate(columns):
        place = f'x="{_LABEL + _SIDE * x + _SIDE // 2}" y="{_HEAD - 6}" text-anchor="middle"'
        parts.append(f"<text {place}>{x}<title>{escape(column)}</title></text>")
    for y, (row, line) in enumerate(zip(rows, squares, strict=True)):
        top = _HEAD + _SIDE * y
        parts.append(f'<text x="0" y="{top + 15}">{escape(row)}</text>')
        for x, square in enumerate(line):
            left = _LABEL + _SIDE * x
            parts.append(
                f'<g><title>{escape(square.title)}</title><rect x="{left + 1}" y="{top + 1}" width="{_SIDE - 2}" '
                f'height="{_SIDE - 2}" rx="3" fill="{_COLOURS[square.kind]}"/><text x="{left + _SIDE // 2}" '
                f'y="{top + 15}" text-anchor="middle">{_MARKS[square.kind]}</text></g>'
            )
    return "\n".join([*parts, "</svg>"])


def _white_box(report: WhiteBoxReport) -> str:
    names = [cell.request for cell in report.scenarios[0].cells] if report.scenarios else []
    squares = [[_square(cell) for cell in result.cells] for result in report.scenarios]
    totals = {
        "observations": report.observations,
        "mismatches": report.mismatches,
        "token positions": report.positions,
        "tokens and ranks": report.counts.tokens,
        "logprobs": report.counts.logprobs,
        "state rows": report.counts.state_rows,
        "endings": report.counts.endings,
        **{f"requests: {name}": count for name, count in report.requests.items()},
        **{f"tokens: {name}": count for name, count in report.guesses.items()},
        "seconds": round(report.seconds),
        "scenarios not reached in time": report.scenarios_left,
    }
    first = report.first_difference
    where = {"system fingerprint": report.system_fingerprint, "seed": report.seed, **report.profile}
    return "\n".join(
        [
            f"<h2>First difference</h2><pre>{escape(describe(first))}</pre>" if first is not None else "",
            "".join(f'<p class="differs">{escape(problem)}</p>' for problem in report.problems),
            "<h2>Scenarios and prompts</h2>",
            grid([result.name for result in report.scenarios], names, squares),
            "<h2>Totals</h2>",
            _table(totals),
            "<h2>Prompts</h2><ol start='0'>" + "".join(f"<li>{escape(name)}</li>" for name in names) + "</ol>",
            "<h2>Environment</h2>",
            _table({**where, **_environment(report)}),
        ]
    )


def _black_box(report: BlackBoxReport) -> str:
    squares = [[Square(_VERDICTS[check.verdict], f"{check.verdict}: {check.detail}")] for check in report.checks]
    sections = [grid([check.name for check in report.checks], ["verdict"], squares), "<h2>Checks</h2>"]
    for check in report.checks:
        kind = _VERDICTS[check.verdict]
        sections.append(
            f'<h3>{escape(check.name)}: <span class="{kind}">{check.verdict}</span></h3>'
            f"<p>{escape(check.promise)}</p><p>{escape(check.detail)} ({check.comparisons} comparisons)</p>"
        )
        if check.reproduce:
            sections.append(f"<pre>{escape(chr(10).join(check.reproduce))}</pre>")
    facts = {
        "model": report.model,
        "system fingerprint": report.system_fingerprint or "not told",
        "requests": report.num_requests,
        "comparisons": report.comparisons,
        "seed": report.seed,
        **{f"can do {name}": "yes" if has else "no" for name, has in report.abilities.items()},
    }
    return "\n".join([*sections, "<h2>Environment</h2>", _table({**facts, **_environment(report)})])


def _square(cell: Cell) -> Square:
    facts = f"{cell.request}: {cell.observations:,} observations, {cell.hits}/{cell.runs} hits, "
    facts += f"{cell.preempted} preempted, {cell.batched} batched, {cell.accepted}/{cell.guessed} guesses accepted"
    if cell.first_difference is not None:
        return Square("differs", f"{facts}; {cell.mismatches:,} differ, first at {describe(cell.first_difference)}")
    return Square("exact" if cell.observations else "unknown", facts)


def _environment(report: Report) -> dict[str, str | int]:
    there = report.environment
    return {
        "samebit": there.samebit,
        "python": there.python,
        "machine": there.machine,
        "CPUs": there.num_cpus,
        "started": there.started,
    }


def _table(items: Mapping[str, str | int]) -> str:
    def value(item: str | int) -> str:
        return f'<td class="number">{item:,}</td>' if isinstance(item, int) else f"<td>{escape(item)}</td>"

    return "<table>" + "".join(f"<tr><th>{escape(k)}</th>{value(v)}</tr>" for k, v in items.items()) + "</table>"
