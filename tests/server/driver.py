"""Starts servers and talks to them with plain sockets, for what the openai client would not send."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = "from samebit.cli import app; app()"
FAKE = """
import sys
import typer
from samebit.core.config import EngineConfig
from samebit.server.run import ServeOptions, serve
from samebit.cli.flags import plain_errors
options = dict(port=0, engine_class="tests.server.fakes:FakeEngine") | {options}
try:
    with plain_errors():
        sys.exit(serve(EngineConfig(max_num_seqs=4, **{config}), ServeOptions(**options)))
except typer.Exit as end:
    sys.exit(end.exit_code)
"""


class Server:
    """A server process; `log` is what it said."""

    def __init__(self, arguments, log_path):
        self._log_path = log_path
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
        }
        with log_path.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", *arguments], stdout=log, stderr=log, env=env)

    @property
    def log(self):
        return self._log_path.read_text()

    def wait_ready(self, limit_s=300):
        end = time.monotonic() + limit_s
        while True:
            found = re.search(r"serving \S+ on http://(\S+):(\d+)", self.log)
            if found:
                self.host, self.port = found[1], int(found[2])
                return self
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.02)

    @property
    def base_url(self):
        return f"http://{self.host}:{self.port}/v1"

    def engine_pid(self):
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, limit_s=60):
        return self.process.wait(limit_s)

    def get(self, path):
        return self.request("GET", path)

    def post(self, path, body, **kwargs):
        return self.request("POST", path, body, **kwargs)

    def request(self, method, path, body=None, limit_s=30, key=None, headers=None):
        """Status, headers, and the body as JSON, or as text where it is not. A header that is None is not sent."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with contextlib.closing(http.client.HTTPConnection(self.host, self.port, timeout=limit_s)) as connection:
            sent = {"Content-Type": "application/json", **({} if key is None else {"Authorization": f"Bearer {key}"})}
            sent |= headers or {}
            connection.request(method, path, data, {name: value for name, value in sent.items() if value is not None})
            response = connection.getresponse()
            text = response.read().decode()
        is_json = "json" in response.headers.get("content-type", "") and method != "HEAD"
        return response.status, response.headers, json.loads(text) if is_json else text

    def complete(self, prompt, **fields):
        """The body of a completion that must succeed."""
        status, _, body = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, body
        return body

    @contextlib.contextmanager
    def raw_stream(self, body, path="/v1/completions"):
        """A socket on which a request was sent, and from which nothing was read."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection((self.host, self.port), timeout=30) as connection:
            connection.sendall(head.encode() + data)
            yield connection

    def stat(self, name):
        return self.get("/server_info")[2]["stats"].get(name)

    def until(self, condition, limit_s=120):
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, "still not so"
            time.sleep(0.02)


@contextlib.contextmanager
def running(arguments, log_path):
    """A server that is stopped at the end, whatever happened."""
    server = Server(arguments, log_path)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def fake_arguments(config=None, **options):
    """Arguments of a server with an engine that needs no model."""
    return [FAKE.replace("{options}", repr(options)).replace("{config}", repr(config or {}))]


def events_of(text):
    """The data of server-sent events; the last must be [DONE]."""
    items = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert items[-1] == "[DONE]", items[-1]
    return [json.loads(item) for item in items[:-1]]
