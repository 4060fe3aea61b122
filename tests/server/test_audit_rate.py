"""A server that audits itself: it does so when it is idle, and its metrics tell."""

import re

from tests.server.driver import COMMAND, running

FLAGS = ["--port", "0", "--num-threads", "1", "--cache-bytes", "100000000"]


def audits(server):
    """Second runs by result."""
    pattern = r'^samebit:audit_requests_total\{model_name="nano",result="(\w+)"\} (\S+)$'
    return {result: float(count) for result, count in re.findall(pattern, server.get("/metrics")[2], re.MULTILINE)}


def test_an_idle_server_computes_its_requests_a_second_time(tmp_path):
    with running([COMMAND, "serve", "nano", *FLAGS, "--audit-rate", "1"], tmp_path / "log") as server:
        server.wait_ready()
        for number in range(3):
            server.complete(prompt=f"def f{number}(", seed=number, max_tokens=20, n=2, logprobs=1)
        server.until(lambda: audits(server)["match"] == 6)
        assert audits(server) == {"match": 6, "mismatch": 0, "skipped": 0}
        assert server.stat("num_running") == 0
        assert "audit" not in server.log
