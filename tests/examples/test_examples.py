"""The examples run, and so does the Python that the README and the documentation show."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_MORE = r"<!-- needs a (?:server|GPU) -->\n"
BLOCKS = {
    f"{page.name}-{number}": code
    for page in PAGES
    for number, (mark, code) in enumerate(
        re.findall(rf"({NEEDS_MORE})?```python\n(.*?)```", page.read_text(), re.DOTALL)
    )
    if not mark
}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_offline_example_recalls_the_code():
    assert "The access code of the amber lighthouse is 4821." in run("examples/offline.py")


def test_the_promise_can_be_seen():
    shown = run("examples/same_bits.py")
    assert shown.count("same bits") == 6
    assert "368 tokens cached" in shown, "a run that never hits shows nothing"


def test_the_pages_show_python():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("name", BLOCKS)
def test_python_on_the_pages_runs(name, capsys):
    exec(BLOCKS[name], {})
