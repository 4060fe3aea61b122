"""`samebit train`: mistakes on the command line; the path itself is in test_smoke.py."""

import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from samebit.cli import app; app()", "train"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "nowhere", "nothing", "target"), "no stage has ended"),
        (("nano", "nowhere", "nothing", "--stage", "1", "--recipe", "mini"), "recipe='mini'"),
        (("corpus", "nowhere", "--package", "click"), "1 packages"),
        (("corpus", "nowhere", "--tokenizer", "nobody"), "model 'nobody'"),
        (("drafter", "nano", "nowhere", "run", "--recipe", "mini"), "recipe='mini'"),
        (("assess-drafter", "nano", "nowhere", "nothing"), "nothing"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, text, tmp_path):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("samebit: error: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
