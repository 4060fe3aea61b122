"""Batches of requests in files: all are answered once, and a batch that was broken off goes on."""

import json
import os
from pathlib import Path

import pytest

from samebit.core.config import EngineConfig
from samebit.core.errors import EngineDeadError, InvalidRequestError
from samebit.server.batch import BatchCounts, keep_done, read_requests, run_batch
from samebit.server.translate import Translator
from tests.server.fakes import FAIL, KILL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path, monkeypatch):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def line(name, first=1, url="/v1/completions", **fields):
    body = {"prompt": [first, 2, 3], "max_tokens": 4, "seed": 1, **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path, *lines):
    path.write_text("".join(json.dumps(item) + "\n" for item in lines))


def nobody(done, total):
    pass


def run(files, advance=nobody):
    config = EngineConfig(max_num_seqs=4)
    return run_batch(config, *files, advance=advance, engine_class="tests.server.fakes:FakeEngine")


def results(path):
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def test_every_request_is_answered_once_and_a_mistake_is_an_answer(files):
    wrong = line("wrong", temperature=-1)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 2}
    talk = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    write(files[0], *(line(f"r{n}", n) for n in range(1, 30)), wrong, talk, line("n", n=3))
    steps = []
    assert run(files, lambda done, total: steps.append((done, total))) == BatchCounts(31, 1, 0)
    assert steps == [(count, 32) for count in range(33)]
    found = results(files[1])
    assert len(found) == 32
    assert found["wrong"]["response"]["status_code"] == 400
    assert found["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["r5"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert found["r5"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert len(found["n"]["response"]["body"]["choices"]) == 3
    assert {row["error"] for row in found.values()} == {None}
    assert len({row["id"] for row in found.values()}) == 32
    # What failed for good is not asked again, and still told.
    assert run(files) == BatchCounts(0, 1, 31)


def test_what_was_done_is_not_done_again_and_what_failed_is(files):
    write(files[0], *(line(f"r{n}", n) for n in range(1, 5)), line("fails", FAIL))
    assert run(files) == BatchCounts(4, 1, 0)
    before = results(files[1])
    assert before["fails"]["response"]["status_code"] == 500
    rows = files[1].read_text().splitlines()
    # As if the power had gone: one line is missing and one is cut.
    files[1].write_text(
        "\n".join([row for row in rows if '"r1"' not in row and '"r2"' not in row] + ['{"id": "batch_'])
    )
    write(files[0], *(line(f"r{n}", n) for n in range(1, 5)), line("fails", 9))
    assert run(files) == BatchCounts(3, 0, 2)
    after = results(files[1])
    assert set(after) == {"r1", "r2", "r3", "r4", "fails"}
    for name in ("r3", "r4"):
        assert after[name] == before[name]
    for name in ("r1", "r2"):
        kept = ("choices", "usage", "seed")
        assert [after[name]["response"]["body"][key] for key in kept] == [
            before[name]["response"]["body"][key] for key in kept
        ]
    assert after["fails"]["response"]["status_code"] == 200
    assert run(files) == BatchCounts(0, 0, 5)
    assert results(files[1]) == after
    assert [path.name for path in files[1].parent.iterdir()] == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("change", [{"max_tokens": 7}, {"prompt": [9]}, {"url": "/v1/responses"}])
def test_a_request_that_has_changed_is_asked_again(files, change):
    write(files[0], line("same", 3), line("other", 5))
    run(files)
    before = results(files[1])
    changed = line("other", 5) | {key: value for key, value in change.items() if key == "url"}
    changed["body"] |= {key: value for key, value in change.items() if key != "url"}
    write(files[0], line("same", 3), changed)
    assert run(files).num_done_before == 1
    after = results(files[1])
    assert after["same"] == before["same"]
    assert after["other"]["id"] != before["other"]["id"]
    assert after["other"]["response"]["body"] != before["other"]["response"]["body"]


def test_a_request_that_is_only_spelled_otherwise_is_not_asked_again(files):
    write(files[0], line("a", 3))
    run(files)
    files[0].write_text('{"body":{"seed":1,"max_tokens" : 4,"prompt":[3,2,3]},"url":"/v1/completions","custom_id":"a"}')
    assert run(files) == BatchCounts(0, 0, 1)


@pytest.mark.parametrize("place", ["_params", "_job"])
def test_a_fault_of_ours_ends_one_line_only(files, monkeypatch, place):
    inner = getattr(Translator, place)

    def faulty(self, *args, **kwargs):
        if "faulty" in repr(args):
            raise RuntimeError("a fault of ours")
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(Translator, place, faulty)
    write(files[0], line("a"), line("b", user="faulty"), line("c", 2))
    assert run(files) == BatchCounts(2, 1, 0)
    found = results(files[1])["b"]["response"]
    assert (found["status_code"], found["body"]["error"]["code"]) == (500, "internal_error")


def test_a_request_that_kills_the_engine_takes_no_other_with_it(files):
    write(files[0], *(line(f"r{n}", n) for n in range(1, 4)), line("kills", KILL))
    counts = run(files)
    assert counts.num_failed == 1
    assert results(files[1])["kills"]["response"]["status_code"] == 503


def test_a_batch_ends_when_the_engine_dies_again_and_again(files, monkeypatch):
    monkeypatch.setattr("samebit.server.batch._RESTARTS", 1)
    write(files[0], *(line(f"kills{n}", KILL) for n in range(9)))
    with pytest.raises(EngineDeadError, match="ended with status 9"):
        run(files)
    files[1].unlink()
    write(files[0], line("good"))
    assert run(files) == BatchCounts(1, 0, 0)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ('{"custom_id": "b"', "line 2"),
        ('{"custom_id": "b", "url": "/v1/completions"}', "line 2: .*body"),
        (json.dumps(line("b", url="/v1/embeddings")), "line 2: url='/v1/embeddings'"),
        (json.dumps(line("b", stream=True)), "line 2: body.stream"),
        (json.dumps(line("a")), "line 2: custom_id='a': is there twice"),
        (json.dumps(line("b") | {"method": "GET"}), "line 2: .*method"),
        (json.dumps(line("b") | {"body": [1]}), "line 2"),
    ],
)
def test_a_wrong_line_is_named_before_anything_is_loaded(files, row, text):
    files[0].write_text(json.dumps(line("a")) + "\n" + row + "\n")
    with pytest.raises(InvalidRequestError, match=text):
        run(files)
    assert not files[1].exists()


@pytest.mark.parametrize("other", ["notes\n", "input", "answers"])
def test_a_file_that_holds_something_else_is_not_written_over(files, other):
    write(files[0], line("mine", 3))
    held = {"notes\n": "notes\n", "input": files[0].read_text()}.get(other)
    if held is None:
        write(files[0], line("theirs", 3))
        run(files)
        held = files[1].read_text()
        write(files[0], line("mine", 3))
    files[1].write_text(held)
    with pytest.raises(InvalidRequestError, match="line 1: is no answer to a request of this batch"):
        run(files)
    assert files[1].read_text() == held


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"nowhere\.jsonl"):
        read_requests(tmp_path / "nowhere.jsonl")
    with pytest.raises(InvalidRequestError, match="no"):
        keep_done(tmp_path / "no" / "out.jsonl", {})
