"""What `samebit audit MODEL` and `--replay` do once their flags are read. Knows no flags and no report files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from samebit.audit.prompts import builtin_prompts, user_prompts
from samebit.audit.recording import AuditPrompt
from samebit.audit.replay import ReplayReport, replay
from samebit.audit.text import scenario_line
from samebit.audit.values import ScenarioResult, WhiteBoxReport
from samebit.audit.white_box import audit_model
from samebit.core.config import EngineConfig
from samebit.core.errors import ConfigError
from samebit.engine.batch_file import read_lines
from samebit.engine.engine import Engine
from samebit.engine.model_source import resolve_model


@dataclass(frozen=True, slots=True)
class Prompts:
    """Which requests to audit: `num_builtin` with answers of `max_tokens`, and those of a batch file."""

    num_builtin: int
    max_tokens: int
    file: Path | None


def audit_checkpoint(
    config: EngineConfig, prompts: Prompts, *, seed: int, max_seconds: float | None = None
) -> WhiteBoxReport:
    """The white-box audit, with a line on stderr for each scenario. Raises SamebitError when it cannot run."""
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

    return audit_model(config, make_prompts, seed=seed, max_seconds=max_seconds, on_scenario=show)


def replay_file(path: Path) -> ReplayReport:
    """Play a recorded run and say what it showed. Raises SamebitError when it cannot be played."""
    report = replay(path)
    facts = ", ".join(
        f"{getattr(report, name)} {name.removeprefix('num_')}"
        for name in ("num_operations", "num_steps", "num_answers", "num_hits", "num_preemptions")
    )
    found = "no difference" if report.difference is None else f"difference: {report.difference}"
    Console().print(f"{path}: {facts}\n{found}", markup=False, highlight=False, soft_wrap=True)
    return report
