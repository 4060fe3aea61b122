"""The pages on mutants and public faults say what is so: tables are current, tests that they name exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.mutants.battery import BATTERY
from tests.mutants.pages import GROUPS, PAGE, START, issue_address, render
from tests.mutants.test_mutants import MUTANTS

ROOT = PAGE.parents[1]
FAULTS = (PAGE.parent / "faults.md").read_text()
ROWS = [line for line in FAULTS.splitlines() if line.startswith("| [")]
NAMED = sorted(set(re.findall(r"`(tests/\S+?\.py)::(\w+)`", FAULTS)))


def test_the_table_of_mutants_is_current():
    assert PAGE.read_text().partition(START)[2].strip() == render().strip(), "run `python -m tests.mutants.pages`"
    assert sum(map(len, GROUPS.values())) == len(MUTANTS)


def test_every_check_of_the_battery_is_told():
    told = PAGE.read_text().partition(START)[0]
    assert {name for name in BATTERY if f"| `{name}` |" not in told} == set()
    for name in re.findall(r"`(test_\w+)`", told):
        assert f"def {name}(" in (PAGE.parents[1] / "tests" / "mutants" / "test_mutants.py").read_text()


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_the_faults_name_exists(path, name):
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_fault_has_a_test_or_a_reason():
    assert len(ROWS) > 60
    assert len(NAMED) > 30
    for row in ROWS:
        assert re.search(r"\bTest: `|By construction: |Not yet", row.split(" | ")[2]), row


def test_mutants_imitate_the_faults_that_say_so():
    imitated = {issue_address(issue) for mutant in MUTANTS.values() for issue in mutant.imitates}
    for row in ROWS:
        addresses = set(re.findall(r"\]\((https://\S+?)\)", row))
        assert bool(addresses & imitated) == bool(re.search(r"[Mm]utant", row)), row
    assert imitated - set(re.findall(r"\]\((https://\S+?)\)", FAULTS)) == set()
