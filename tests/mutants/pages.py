"""The table of mutants as a page's text, and where the issues that it names are. `python -m tests.mutants.pages` rewrites it."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.ahead_faults import AHEAD_MUTANTS
from tests.mutants.cache_faults import CACHE_MUTANTS
from tests.mutants.drafter_faults import DRAFTER_MUTANTS
from tests.mutants.edits import Mutant
from tests.mutants.grammar_faults import GRAMMAR_MUTANTS
from tests.mutants.id_faults import ID_MUTANTS
from tests.mutants.schedule_faults import SCHEDULE_MUTANTS, TEXT_MUTANTS
from tests.mutants.speculation_faults import SPECULATION_MUTANTS
from tests.mutants.state_faults import STATE_MUTANTS
from tests.mutants.step_faults import STEP_MUTANTS

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
START = "<!-- table -->\n"
GROUPS = {
    "State on the device": STATE_MUTANTS,
    "Samples, recordings, kernels": STEP_MUTANTS,
    "Checkpoints and the prefix cache": CACHE_MUTANTS,
    "Ids, references and eviction": ID_MUTANTS,
    "Planning, committing and preemption": SCHEDULE_MUTANTS,
    "Steps planned ahead": AHEAD_MUTANTS,
    "Guesses": SPECULATION_MUTANTS,
    "Drafters on the device": DRAFTER_MUTANTS,
    "Grammars": GRAMMAR_MUTANTS,
    "Text": TEXT_MUTANTS,
}
REPOSITORIES = {
    "Mference": "NeelM0906/Mference",
    "Rapid-MLX": "raullenchai/Rapid-MLX",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "imp": "kekzl/imp",
    "mini-sglang": "sgl-project/mini-sglang",
    "mlx-lm": "ml-explore/mlx-lm",
    "omlx": "jundot/omlx",
    "sglang": "sgl-project/sglang",
    "vLLM": "vllm-project/vllm",
    "vllm-metal": "vllm-project/vllm-metal",
    "vmlx": "jjang-ai/vmlx",
    "vmlx-swift": "osaurus-ai/vmlx-swift",
}


def issue_address(issue: str) -> str:
    """Of "project #number" or "project PR #number"."""
    project, _, number = issue.partition(" ")
    kind = "pull" if number.startswith("PR ") else "issues"
    return f"https://github.com/{REPOSITORIES[project]}/{kind}/{number.removeprefix('PR ').removeprefix('#')}"


def render() -> str:
    """The tables, a group each."""
    return "\n".join(f"## {title}\n\n{_table(mutants)}" for title, mutants in GROUPS.items())


def _table(mutants: list[Mutant]) -> str:
    lines = ["| mutant | the fault | imitates | found by | as |", "| --- | --- | --- | --- | --- |"]
    for mutant in mutants:
        issues = ", ".join(f"[{issue}]({issue_address(issue)})" for issue in mutant.imitates)
        lines.append(f"| {mutant.name} | {mutant.fault} | {issues} | `{mutant.check}` | `{mutant.shows}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(START)[0] + START + "\n" + render())
