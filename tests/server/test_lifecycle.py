"""How a server begins and ends: draining, a dead engine, a taken port. With an engine that needs no model."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from samebit.core.errors import ConfigError
from samebit.server.run import _bind
from tests.server.driver import COMMAND, fake_arguments, running
from tests.server.fakes import ENDLESS, FAIL

TEXT = "/v1/completions"


class Asking(threading.Thread):
    """A request in the background; `answer` is what came of it."""

    def __init__(self, server, body, path=TEXT):
        super().__init__()
        self.server, self.body, self.path, self.answer = server, body, path, None
        self.start()

    def run(self):
        try:
            self.answer = self.server.post(self.path, self.body)
        except (OSError, http.client.HTTPException) as error:
            self.answer = error

    def result(self):
        self.join(60)
        assert not self.is_alive(), "a request hangs"
        return self.answer


def body(first=1, **fields):
    return {"prompt": [first, 2], "seed": 1, "max_tokens": 5, **fields}


def test_a_signal_lets_open_requests_finish_and_turns_new_ones_away(start):
    server = start()
    whole = server.post(TEXT, body(max_tokens=1500))[2]["choices"]
    open_requests = [Asking(server, body(max_tokens=1500, stream=stream)) for stream in (False, True)]
    server.until(lambda: server.stat("num_running") == 2)
    server.signal(signal.SIGTERM)
    server.until(lambda: server.get("/ready")[0] == 503)
    status, headers, answer = server.post(TEXT, body())
    assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert int(headers["retry-after"]) >= 1
    assert server.get("/health")[0] == 200
    assert open_requests[0].result()[2]["choices"] == whole
    text = open_requests[1].result()[2]
    assert text.endswith("data: [DONE]\n\n")
    assert server.wait() == 0


def test_requests_that_take_too_long_end_with_an_error(start):
    server = start(shutdown_timeout_s=0.3)
    streamed = Asking(server, body(ENDLESS, stream=True))
    whole = Asking(server, body(ENDLESS))
    server.until(lambda: server.stat("num_running") == 2)
    server.signal(signal.SIGINT)
    last = streamed.result()[2].rstrip().rsplit("data: ", 1)[1]
    assert "shutting down" in json.loads(last)["error"]["message"]
    assert whole.result()[0] == 503
    assert server.wait() == 0


def test_a_second_signal_waits_for_nothing(start):
    server = start(shutdown_timeout_s=60)
    request = Asking(server, body(ENDLESS))
    server.until(lambda: server.stat("num_running") == 1)
    server.signal(signal.SIGINT)
    server.until(lambda: server.get("/ready")[0] == 503)
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert request.result()[0] == 503


def test_a_client_that_never_reads_does_not_keep_the_server_from_ending(start):
    server = start(shutdown_timeout_s=0.2)
    with server.raw_stream(body(ENDLESS, stream=True)):
        server.until(lambda: server.stat("num_running") == 1)
        time.sleep(1.5)  # fills the socket's buffers
        server.signal()
        assert server.wait() == 0


def test_no_request_hangs_when_the_engine_is_killed_and_must_not_be_started_again(start):
    server = start(max_engine_restarts=0)
    requests = [Asking(server, body(ENDLESS, stream=stream)) for stream in (False, True) * 4]
    server.until(lambda: server.stat("num_running") == 4)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for request in requests[::2]:
        status, _, answer = request.result()
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
    for request in requests[1::2]:
        status, _, answer = request.result()
        if status == 200:
            assert "engine_dead" in answer
            assert "[DONE]" not in answer
        else:
            assert status == 503
    assert server.wait() == 1
    lines = [line for line in server.log.splitlines() if "error" in line]
    assert lines == ["samebit: error: the engine process was killed by signal 9"]
    assert "Traceback" not in server.log


def test_an_engine_without_a_parent_ends(start):
    server = start()
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    server.until(lambda: not is_running(engine))


@pytest.mark.parametrize("line", ["loading", "serving"])
def test_a_killed_server_leaves_no_temporary_files(tmp_path, monkeypatch, line):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with running(fake_arguments(), tmp_path / "log") as server:
        server.until(lambda: line in server.log and children(server.process.pid))
        engines = children(server.process.pid)
        server.process.kill()
        server.process.wait()
        server.until(lambda: not any(map(is_running, engines)))
    assert list((tmp_path / "temporary").iterdir()) == []


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_failed_step_is_a_500_and_the_server_goes_on(start):
    server = start()
    status, _, answer = server.post(TEXT, body(FAIL))
    assert (status, answer["error"]["code"]) == (500, "engine_error")
    status, _, text = server.post(TEXT, body(FAIL, stream=True))
    assert json.loads(text.removeprefix("data: "))["error"]["type"] == "server_error"
    assert server.post(TEXT, body())[0] == 200


def test_more_requests_than_may_wait_get_a_503_with_retry_after(start):
    server = start(max_queued_requests=2)
    with server.raw_stream(body(ENDLESS, n=6, stream=True)):
        server.until(lambda: (server.stat("num_running"), server.stat("num_waiting")) == (4, 2))
        status, headers, answer = server.post(TEXT, body())
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert int(headers["retry-after"]) >= 1
        assert "admission_rejections_total" in server.get("/metrics")[2]
    server.until(lambda: server.post(TEXT, body())[0] == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_larger_than_the_queue_is_told_so_and_no_field_is_blamed(start, stream):
    server = start(max_queued_requests=2, max_queued_tokens=20)
    for fields in ({"prompt": ["a"] * 7}, {"n": 7}, {"prompt": [1] * 21}, {"prompt": [[1] * 11] * 2}):
        status, headers, answer = server.post(TEXT, {**body(stream=stream), **fields})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (503, "overloaded", None)
        assert "at most" in answer["error"]["message"]
        assert int(headers["retry-after"]) >= 1
    status, _, answer = server.post("/v1/responses", {"input": "a b c d e f g h i j k l m n o p q r s t"})
    assert (status, answer["error"]["param"]) == (503, None)


def test_a_model_has_the_name_it_is_served_under(start):
    server = start(served_model_name="org/tiny")
    assert [card["id"] for card in server.get("/v1/models")[2]["data"]] == ["org/tiny"]
    assert server.get("/v1/models/org/tiny")[2]["id"] == "org/tiny"
    assert server.post(TEXT, body(model="org/tiny"))[2]["model"] == "org/tiny"
    assert server.post(TEXT, body(model="nano"))[0] == 404
    assert 'model_name="org/tiny"' in server.get("/metrics")[2]


def test_a_seeded_server_draws_the_same_seeds_again(start, tmp_path):
    def seeds(server):
        return [server.complete([1], max_tokens=1)["seed"] for _ in range(3)]

    first = seeds(start(seed=4))
    assert len(set(first)) == 3
    assert seeds(start(seed=4)) == first
    assert seeds(start()) != first


def test_a_taken_port_is_one_line_before_anything_is_loaded(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running([COMMAND, "serve", "nano", "--port", port], tmp_path / "log") as server:
            assert server.wait() == 1
            assert server.log.startswith("samebit: error: cannot listen on 127.0.0.1 port")
            assert len(server.log.splitlines()) == 1


def test_of_two_servers_that_load_at_once_only_one_has_the_port():
    with _bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot listen"):
        _bind("127.0.0.1", first.getsockname()[1])


def test_an_engine_that_cannot_start_is_one_line(tmp_path):
    with running(fake_arguments({"seed": 666}), tmp_path / "log") as server:
        assert server.wait() == 1
        assert server.log.splitlines()[1:] == ["samebit: error: nano: this model is cursed"]


def test_a_signal_while_loading_ends_the_server(tmp_path):
    with running([COMMAND, "serve", "nano", "--port", "0"], tmp_path / "log") as server:
        server.until(lambda: "loading" in server.log, limit_s=30)
        server.signal()
        assert server.wait(limit_s=4) == 0, "it waits for no engine that cannot hear it"
        assert "serving" not in server.log
