"""What `samebit audit` does once its flags are read: runs an audit, shows it, writes its files. Knows no flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from samebit.audit.text import print_report, scenario_line
from samebit.audit.values import BlackBoxReport, Check, Report, ScenarioResult, WhiteBoxReport
from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompts:
    """Which requests to audit: `num_builtin` with answers of `max_tokens`, and those of a batch file."""

    num_builtin: int
    max_tokens: int
    file: Path | None


def audit_checkpoint(config: EngineConfig, prompts: Prompts, *, seed: int) -> WhiteBoxReport:
    """The white-box audit, with a line on stderr for each scenario. Raises SamebitError when it cannot run."""
    # Here, because they load torch, which the audit of a server needs nothing of.
    from samebit.audit.prompts import builtin_prompts, user_prompts  # noqa: PLC0415
    from samebit.audit.recording import AuditPrompt  # noqa: PLC0415
    from samebit.audit.white_box import audit_model  # noqa: PLC0415
    from samebit.engine.batch_file import read_lines  # noqa: PLC0415
    from samebit.engine.engine import Engine  # noqa: PLC0415
    from samebit.engine.model_source import resolve_model  # noqa: PLC0415

    lines = [] if prompts.file is None else read_lines(prompts.file)
    if not prompts.num_builtin and not lines:
        raise ConfigError("num_prompts=0: without --prompts there must be at least 1")
    progress = Console(stderr=True)
    num_done = 0

    def make_prompts(engine: Engine) -> list[AuditPrompt]:
        found = user_prompts(engine, resolve_model(config.model), lines, seed=seed)
        if prompts.num_builtin:
            found += builtin_prompts(engine, count=prompts.num_builtin, max_tokens=prompts.max_tokens, seed=seed)
        return found

    def show(result: ScenarioResult, total: int) -> None:
        nonlocal num_done
        num_done += 1
        progress.print(f"{num_done}/{total} {scenario_line(result)}", markup=False, highlight=False, soft_wrap=True)

    return audit_model(config, make_prompts, seed=seed, on_scenario=show)


def audit_url(
    url: str, *, model: str | None, api_key: str | None, seed: int, limits: tuple[int, float, float]
) -> BlackBoxReport:
    """The black-box audit; `limits` as in http.Limits. Raises ConfigError when it cannot run."""
    from samebit.audit.black_box import audit_server  # noqa: PLC0415 - a white-box audit needs no client
    from samebit.audit.http import Limits  # noqa: PLC0415 - as above

    progress = Console(stderr=True)

    def show(check: Check) -> None:
        progress.print(f"{check.name}: {check.verdict}", markup=False, highlight=False)

    return audit_server(url, model=model, api_key=api_key, seed=seed, limits=Limits(*limits), on_check=show)


def replay_file(path: Path, json_file: Path | None) -> int:
    """Play a recorded run and say what it showed; returns the exit status."""
    from samebit.audit.replay import replay  # noqa: PLC0415 - loads torch

    report = replay(path)
    if json_file is not None:
        _write(json_file, _json(report))
    facts = ", ".join(
        f"{getattr(report, name)} {name.removeprefix('num_')}"
        for name in ("num_operations", "num_steps", "num_answers", "num_hits", "num_preemptions")
    )
    Console().print(f"{path}: {facts}", markup=False, highlight=False, soft_wrap=True)
    if report.difference is None:
        return 0
    Console().print(f"difference: {report.difference}", markup=False, highlight=False, soft_wrap=True)
    return 1


def finish(report: Report, json_file: Path | None, html_file: Path | None) -> int:
    """Show a report, write the files that are wanted, and return the exit status."""
    from samebit.audit.page import render_page  # noqa: PLC0415 - only with --html

    print_report(report, Console())
    if json_file is not None:
        _write(json_file, _json(report))
    if html_file is not None:
        _write(html_file, render_page(report).encode())
    return report.status


def _json(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
