"""Crashes, signals and other weights under load, with the bundled model: nothing hangs, and every answer is that of a solo run."""

import contextlib
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebit.engine.model_source import resolve_model
from tests.server.driver import COMMAND, events_of, running

FLAGS = ["--port", "0", "--num-threads", "1", "--cache-bytes", "100000000"]
WEIGHTS = "/update_weights_from_disk"


@pytest.fixture
def server(tmp_path, request):
    kernels = request.config.getoption("--kernels")
    with running([COMMAND, "serve", "nano", *FLAGS, "--kernels", kernels], tmp_path / "log") as server:
        yield server.wait_ready()
        assert "Traceback" not in server.log, server.log


def asked(number, max_tokens=150):
    return {"prompt": f"def f{number}(", "seed": number, "max_tokens": max_tokens, "ignore_eos": True}


def solo(server, number, max_tokens=150):
    return server.complete(**asked(number, max_tokens))["choices"][0]["text"]


@contextlib.contextmanager
def streams(server, count, **fields):
    """Sockets on which so many answers have begun, and what came of each so far."""
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(server.raw_stream({**asked(number), "stream": True, **fields}))
            for number in range(count)
        ]
        begun = []
        for connection in connections:
            data = b""
            while b"data: " not in data:
                data += connection.recv(1 << 16)
            begun.append((connection, data))
        yield begun


def rest(connection, data):
    """All events of a stream, which must come to an end."""
    connection.settimeout(120)
    while not data.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        assert piece, "the connection ends before the answer"
        data += piece
    body = data.partition(b"\r\n\r\n")[2].split(b"\r\n")
    return b"".join(body[1::2]).decode()


def text_of(events):
    return "".join(choice["text"] for event in events_of(events) for choice in event["choices"])


def test_a_signal_lets_sixteen_streams_finish_with_the_answers_of_solo_runs(server):
    expected = {number: solo(server, number) for number in (0, 7, 15)}
    with streams(server, 16) as begun:
        server.signal(signal.SIGTERM)
        answers = [text_of(rest(*stream)) for stream in begun]
    assert server.wait() == 0
    assert {number: answers[number] for number in expected} == expected


def test_a_killed_engine_hangs_nobody_and_answers_alike_once_it_is_back(server):
    before = solo(server, 3)
    with streams(server, 8, max_tokens=4000) as begun:
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in begun:
            last = rest(*stream).rstrip().rsplit("data: ", 1)[1]
            assert json.loads(last)["error"]["code"] == "engine_dead"
    server.until(lambda: server.get("/health")[0] == 200)
    assert solo(server, 3) == before
    assert server.get("/health_generate")[0] == 200
    assert server.log.count("starting it again") == 1


def test_a_checkpoint_that_does_not_fit_is_refused_by_the_tensors_name_and_no_stream_notices(server, tmp_path):
    folder = shutil.copytree(resolve_model("nano"), tmp_path / "broken")
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = min(tensors)
    expected = [solo(server, number, 600) for number in range(4)]
    with streams(server, 4, max_tokens=600) as begun:
        for spoilt in (tensors[name].clone().fill_(torch.inf), tensors[name][:-1].clone(), tensors[name].int()):
            save_file({**tensors, name: spoilt}, file)
            status, _, answer = server.post(WEIGHTS, {"model_path": str(folder), "abort_all_requests": True})
            assert (status, answer["error"]["code"]) == (400, "weights_refused")
            assert name in answer["error"]["message"]
        answers = [text_of(rest(*stream)) for stream in begun]
    assert answers == expected
    save_file(tensors, file)
    assert server.post(WEIGHTS, {"model_path": str(folder)})[2]["success"]
    assert solo(server, 0, 600) == expected[0], "they are the same weights"
