"""`samebit train`: the whole path on a CPU, as a person would call it."""

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from samebit.cli import app; app()", "train"]


def run(*arguments):
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_a_toy_goes_from_installed_packages_to_a_served_model(tmp_path):
    data, state, model = tmp_path / "data", tmp_path / "run", tmp_path / "model"
    packages = [part for name in ("click", "packaging", "h11") for part in ("--package", name)]
    steps = [
        ("corpus", data, "--recipe", "toy", "--max-files", 6, *packages),
        ("nano", data, state, "--recipe", "toy", "--stage", 1, "--workers", 1),
        ("nano", data, state, "--recipe", "toy", "--stage", 2, "--workers", 0),
        ("export", data, state, model, "--recipe", "toy"),
    ]
    for step in steps:
        done = run(*step)
        assert done.returncode == 0, done.stderr
        assert "bits/byte" in done.stderr or step[0] != "nano"
    card = (model / "README.md").read_text()
    assert "| 2 | 50 |" in card
    held_out = [p["name"] for p in json.loads((data / "manifest.json").read_text())["held_out"]]
    assert f"Held out: {', '.join(held_out)}." in card
    generate = [*COMMAND[:-1], "generate", str(model), "-p", "def ", "--max-tokens", "4", "--num-threads", "1"]
    done = subprocess.run(generate, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "nowhere", "nothing", "target"), "no stage has ended"),
        (("nano", "nowhere", "nothing", "--stage", "1", "--recipe", "mini"), "recipe='mini'"),
        (("corpus", "nowhere", "--package", "click"), "1 packages"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, text, tmp_path):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("samebit: error: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
