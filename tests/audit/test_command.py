"""`samebit audit` as a command: its exit statuses and files."""

import json
import subprocess
import sys

import pytest

from tests.audit.fake_server import FakeServer, serving
from tests.cli.test_cli import FAST, run

TINY = ["--num-prompts", "3", "--max-tokens", "16", "--page-size", "4", "--cache-bytes", "4000000", *FAST]


def test_an_audit_of_a_model_writes_its_reports(small_model, tmp_path):
    source, page, prompts = tmp_path / "a.json", tmp_path / "a.html", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):\\n    return x + 1, and so on", "n": 2, "max_tokens": 6}\n')
    files = ["--json", str(source), "--html", str(page), "--prompts", str(prompts)]
    done = run("audit", small_model, *TINY, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(source.read_text())
    assert (report["kind"], report["mismatches"]) == ("white-box", 0)
    assert f"{report['observations']:,} observations" in done.stdout.replace("\n", " ")
    names = [cell["request"] for cell in report["scenarios"][0]["cells"]]
    assert names[:2] == ["line 1", "line 1, sample 1"]
    assert len(names) == 5
    assert len(done.stderr.splitlines()) == len(report["scenarios"]) == 70
    assert page.read_text().count("<rect ") == 70 * 5


def test_an_audit_that_proves_too_little_fails(small_model):
    done = run("audit", small_model, *TINY, "--num-prompts", "1", "--max-tokens", "2")
    assert done.returncode == 1
    assert "no step served two requests" in done.stdout


@pytest.mark.parametrize(
    ("fake", "status"),
    [
        (FakeServer(), 0),
        (FakeServer({"warm"}), 1),
        (FakeServer(lacks={"completions", "chat"}), 2),
    ],
)
def test_the_exit_status_of_an_audit_of_a_server(fake, status, tmp_path):
    source = tmp_path / "b.json"
    with serving(fake) as url:
        done = run("audit", "--url", url, "--rate", "1000", "--json", str(source))
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if status == 1:
        assert "curl -sS " in done.stdout
    if status < 2:
        assert json.loads(source.read_text())["kind"] == "black-box"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "MODEL"),
        (["nano", "--url", "http://127.0.0.1:1/v1"], "MODEL"),
        (["nonesuch"], "nonesuch"),
        (["--url", "http://127.0.0.1:1/v1"], "127.0.0.1:1"),
        (["--url", "nowhere"], "nowhere"),
        (["--replay", "nowhere.json"], "nowhere.json"),
        (["nano", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["nano", "--num-prompts", "0"], "num_prompts=0"),
        (["nano", "--speculative-config", '{"method": "magic"}'], "magic"),
        (["nano", "--kernels", "magic"], "magic"),
        (["nano", "--json", "no/where.json"], "no/where.json"),
        (["nano", "--max-tokens", "100000"], "max_tokens=100000"),
    ],
    ids=str,
)
def test_an_audit_that_cannot_run_says_so_with_status_2(arguments, text):
    done = run("audit", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_an_audit_of_a_server_loads_no_torch():
    script = "import sys, samebit.audit.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_recorded_run_is_played(tmp_path):
    script = tmp_path / "run.json"
    operations = [{"do": "add", "request_id": "a", "prompt": [1, 2, 3], "params": {"max_tokens": 3}}, {"do": "drain"}]
    script.write_text(json.dumps({"model": "nano", "engine": {"num_threads": 1}, "operations": operations}))
    done = run("audit", "--replay", str(script))
    assert done.returncode == 0, done.stderr
    assert "1 answers" in done.stdout
