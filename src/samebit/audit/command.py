"""What `samebit audit --url` does once its flags are read, and how every audit ends. Knows no flags; loads no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from samebit.audit.black_box import audit_server
from samebit.audit.http import Limits
from samebit.audit.page import render_page
from samebit.audit.text import print_report
from samebit.audit.values import BlackBoxReport, Check, Report
from samebit.engine.batch_file import check_target, write_target


def audit_url(
    url: str, *, model: str | None, api_key: str | None, seed: int, limits: tuple[int, float, float]
) -> BlackBoxReport:
    """The black-box audit; `limits` as in http.Limits. Raises ConfigError when it cannot run."""
    progress = Console(stderr=True)

    def show(check: Check) -> None:
        progress.print(f"{check.name}: {check.verdict}", markup=False, highlight=False)

    return audit_server(url, model=model, api_key=api_key, seed=seed, limits=Limits(*limits), on_check=show)


def check_targets(*paths: Path | None) -> None:
    """Raise InvalidRequestError if a file that is wanted cannot be written: better now than after a long audit."""
    for path in paths:
        if path is not None:
            check_target(path)


def finish(report: Report, json_file: Path | None, html_file: Path | None) -> int:
    """Show a report, write the files that are wanted, and return the exit status."""
    print_report(report, Console())
    if json_file is not None:
        write_json(json_file, report)
    if html_file is not None:
        write_target(html_file, render_page(report).encode())
    return report.status


def write_json(path: Path, report: msgspec.Struct) -> None:
    """Write a report, indented. Raises InvalidRequestError if the file cannot be written."""
    write_target(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
