"""Records drawn over one another."""

import json
import sys

import pytest
from typer.testing import CliRunner

from samebit.bench.plot import _lines, names_of, swept
from samebit.bench.record import Record, Run, read_record, write_record
from samebit.cli import app


def record(label, rates=(1.0,), limits=(None,), speed=100.0):
    runs = [
        Run(
            settings={"request_rate": rate, "max_concurrency": limit},
            summary={"completed": 1, "output_throughput": speed, "median_ttft_ms": 5.0, "p99_ttft_ms": 9.0},
        )
        for rate in rates
        for limit in limits
    ]
    return Record(kind="serve", label=label, command="", seed=0, settings={}, environment={}, runs=runs)


def plot(*arguments):
    return CliRunner().invoke(app, ["bench", "plot", *map(str, arguments)])


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, speed in zip(paths, (100.0, 200.0), strict=True):
        write_record(path, record("nano", rates=(1.0, 4.0, float("inf")), limits=(None, 8), speed=speed))
    return paths


def test_a_record_is_read_as_it_was_written(files):
    read = read_record(files[0])
    assert [run.settings["request_rate"] for run in read.runs] == [1.0, 1.0, 4.0, 4.0, "inf", "inf"]
    assert read.runs[0].summary["median_ttft_ms"] == 5.0


def test_the_axis_is_the_setting_that_differs():
    assert swept([record("a"), record("b")]) is None
    assert swept([record("a", rates=(1.0, 2.0))]) == "request_rate"
    assert swept([record("a", limits=(1,)), record("b", limits=(4,))]) == "max_concurrency"
    assert swept([record("a", rates=(1.0, "inf"), limits=(1, 2, None))]) == "max_concurrency"


def test_labels_that_do_not_differ_give_way_to_the_files(files):
    assert names_of([record("a"), record("b")], files) == ["a", "b"]
    assert names_of([record("a"), record("a")], files) == ["before", "after"]


def test_records_are_drawn_over_one_another_and_always_the_same(files, tmp_path):
    pytest.importorskip("matplotlib")
    targets = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for target in targets:
        done = plot(target, *files)
        assert done.exit_code == 0, done.output
    drawn = targets[0].read_text()
    assert drawn == targets[1].read_text()
    assert "<!-- before, inf conversations at once -->" in drawn
    assert "<!-- after, 8 conversations at once -->" in drawn
    assert "<!-- time to first token, ms -->" in drawn
    assert "<!-- time per output token, ms -->" not in drawn, "no record has it"


def test_each_value_of_the_other_setting_is_a_line_of_its_own():
    class Panel:
        def __init__(self):
            self.lines = []

        def plot(self, where, values, style, **look):
            self.lines.append((list(where), style, look["label"]))

        def set_xticks(self, *_): ...
        def set_xlabel(self, *_): ...

    panel = Panel()
    swept_twice = record("a", rates=(1.0, 2.0, "inf"), limits=(4, None))
    _lines(panel, [swept_twice], "request_rate", "median_ttft_ms", None)
    assert panel.lines == [
        ([0, 1, 2], "o-", "a, 4 conversations at once"),
        ([0, 1, 2], "o-", "a, inf conversations at once"),
    ]


def test_a_record_without_a_sweep_is_bars(tmp_path):
    pytest.importorskip("matplotlib")
    for name in "ab":
        write_record(tmp_path / name, record(name))
    done = plot(tmp_path / "x.svg", tmp_path / "a", tmp_path / "b", "--label", "old", "--label", "new")
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "x.svg").read_text()
    assert "<!-- old -->" in drawn
    assert "<!-- new -->" in drawn


def test_a_library_that_is_missing_is_named(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = plot(tmp_path / "x.svg", *files)
    assert done.exit_code == 2
    assert done.stderr == (
        "samebit: error: drawing needs matplotlib, which is not installed: pip install 'samebit[plots]'\n"
    )


def test_what_is_no_record_is_named(files, tmp_path):
    other = tmp_path / "other.json"
    for text, said in (
        ("{}", "no record of samebit bench"),
        ("[", "no record of samebit bench"),
        ("\xff", "no record"),
    ):
        other.write_text(text, encoding="latin-1")
        done = plot(tmp_path / "x.svg", other)
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    old = json.loads(files[0].read_text()) | {"format": "samebit-bench-0"}
    other.write_text(json.dumps(old))
    assert "format 'samebit-bench-0': must be samebit-bench-1" in plot(tmp_path / "x.svg", other).stderr
    assert "nowhere: No such file" in plot(tmp_path / "x.svg", tmp_path / "nowhere").stderr
    assert "1 labels for 2 records" in plot(tmp_path / "x.svg", *files, "--label", "a").stderr


def test_nothing_answered_is_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    empty = record("a")
    empty.runs[0].summary["completed"] = 0
    write_record(tmp_path / "a", empty)
    done = plot(tmp_path / "x.svg", tmp_path / "a")
    assert (done.exit_code, "nothing to draw" in done.stderr) == (2, True)


def test_a_file_that_cannot_be_drawn_is_named(files, tmp_path):
    pytest.importorskip("matplotlib")
    for target in (tmp_path / "x.nonesuch", tmp_path / "no" / "x.svg"):
        done = plot(target, *files)
        assert done.exit_code == 2
        assert target.name in done.stderr
