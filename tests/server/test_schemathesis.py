"""schemathesis reads the OpenAPI document and sends what it allows and forbids: no 5xx, no undocumented answer.

Needs the `clients` extra. Left out: the check that whatever the document allows is accepted, because the vocabulary, the
context length and the roles of a chat template are the model's.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.driver import COMMAND, running

PROGRAM = shutil.which("schemathesis", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed")
def test_schemathesis_finds_no_server_error_and_no_undocumented_answer(tmp_path):
    flags = ["--num-threads", "1", "--port", "0", "--cache-bytes", "200000000", "--max-model-len", "256"]
    with running([COMMAND, "serve", "nano", *flags], tmp_path / "log") as server:
        server.wait_ready()
        document = f"http://{server.host}:{server.port}/openapi.json"
        options = ["--exclude-checks", "positive_data_acceptance"]
        run = [PROGRAM, "run", document, *options, "--max-examples", "20", "--seed", "1", "--no-color"]
        ended = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr
        num_operations = sum(map(len, server.get("/openapi.json")[2]["paths"].values()))
        assert f"✅ {num_operations} passed" in ended.stdout, ended.stdout
        assert server.process.poll() is None
        assert "Traceback" not in server.log, server.log
