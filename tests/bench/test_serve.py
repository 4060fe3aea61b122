"""`samebit bench serve` from its command line to its record, against a server that does what a test wants."""

import json
import signal
import subprocess
import sys
import threading
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from samebit.bench.record import command_line
from samebit.cli import app
from tests.bench.fake_openai import FakeOpenAI, events, serving
from tests.server.driver import COMMAND, running

SMALL = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "3"]


def bench(url, *flags):
    """The command as from a shell: a record tells how the program was called."""
    arguments = ["bench", "serve", "--base-url", url, *SMALL, *flags]
    with patch.object(sys, "argv", ["samebit", *arguments]):
        return CliRunner().invoke(app, arguments)


def record_of(fake, path, *flags, status=0):
    with serving(fake) as url:
        done = bench(url, "--output", str(path), *flags)
    assert done.exit_code == status, done.output
    return json.loads(path.read_text()), done


@pytest.fixture
def target(tmp_path):
    return tmp_path / "record.json"


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_completions_are_measured(target, suffix):
    fake = FakeOpenAI()
    with serving(fake) as url:
        done = bench(url + suffix, "--output", str(target))
    assert done.exit_code == 0, done.output
    record = json.loads(target.read_text())
    summary = record["runs"][0]["summary"]
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (4, 0, 12)
    assert summary["total_cached_tokens"] == 12
    assert summary["tokens_counted_by"] == "usage"
    assert {"median_ttft_ms", "p99_tpot_ms", "p95_itl_ms", "mean_e2el_ms"} <= set(summary)
    assert set(fake.paths) == {"/v1/completions"}
    assert {body["model"] for body in fake.bodies} == {"fake-model"}
    assert record["server"] == {"version": "9.9"}
    assert (record["kind"], record["seed"], record["is_complete"]) == ("serve", 0, True)
    assert record["runs"][0]["settings"] == {"request_rate": "inf", "max_concurrency": None}
    assert record["runs"][0]["requests"] is None
    assert "time to first token" in done.output


def test_a_load_generator_loads_no_torch():
    script = "import sys, samebit.bench.command\nsys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_lengths_are_measured_by_the_servers_own_tokens(target):
    def respond(number, path, body):
        """A vocabulary in which a word is two tokens, and 20 more that a template adds."""
        *rest, usage, done = events(body)
        told = json.loads(usage)
        told["usage"]["prompt_tokens"] = 2 * len(body["prompt"].split()) + 20
        return [*rest, json.dumps(told), done]

    fake = FakeOpenAI(respond)
    record, _ = record_of(fake, target, "--random-input-len", "100")
    assert record["settings"]["tokens_per_estimated_token"] == 2.0
    assert [len(body["prompt"].split()) for body in fake.measured()] == [50] * 4


def test_chat_turns_send_the_answers_back(target):
    fake = FakeOpenAI()
    flags = ["--dataset-name", "multi_turn", "--multi-turn-num-turns", "3", "--multi-turn-output-len", "2"]
    record, _ = record_of(
        fake, target, *flags, "--backend", "openai-chat", "--num-prompts", "1", "--save-detailed", "--tokenizer", "nano"
    )
    talk = [body["messages"] for body in fake.bodies[1:]]
    assert [[message["role"] for message in one] for one in talk] == [
        ["system", *["user", "assistant"] * turn, "user"] for turn in range(3)
    ]
    assert talk[2][2]["content"] == talk[2][4]["content"] == " word word"
    assert [len(row["token_s"]) for row in record["runs"][0]["requests"]] == [2, 2, 2]
    assert all(body["max_completion_tokens"] == 2 for body in fake.bodies)


def test_a_sweep_runs_every_rate_with_every_concurrency(target):
    fake = FakeOpenAI()
    record, done = record_of(fake, target, "--request-rate", "500,inf", "--max-concurrency", "1,2")
    assert [tuple(run["settings"].values()) for run in record["runs"]] == [
        (500.0, 1),
        (500.0, 2),
        ("inf", 1),
        ("inf", 2),
    ]
    assert len({body["prompt"] for body in fake.measured()}) == 16, "no run finds another's prompts cached"
    assert "TTFT" in done.output


def test_goals_may_be_given_in_one_or_in_many(target):
    for flags in (
        ["--goodput", "ttft:1e9", "tpot:0", "--ignore-eos"],
        ["--goodput", "ttft:1e9", "--goodput", "tpot:0"],
        ["--goodput", "ttft:1e9,tpot:0"],
    ):
        record, _ = record_of(FakeOpenAI(), target, *flags)
        assert record["settings"]["goodput"] == {"ttft": 1e9, "tpot": 0.0}
        assert record["runs"][0]["summary"]["request_goodput"] == 0.0


def test_failed_requests_are_counted_with_their_reasons_and_the_status_is_1(target):
    def respond(number, path, body):
        one = number - 7
        if one < 0:
            return events(body)
        if one % 4 == 0:
            return 429, {"error": {"message": "the queue\nis full", "code": "queue_full"}}
        if one % 4 == 1:
            return [*list(events(body))[:2]]
        if one % 4 == 2:
            return [json.dumps({"error": {"message": "step 7 failed"}}), "[DONE]"]
        return events(body)

    record, done = record_of(FakeOpenAI(respond), target, "--num-prompts", "8", status=1)
    summary = record["runs"][0]["summary"]
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (2, 6, 6)
    assert summary["failures"] == {
        "HTTP 429: the queue is full": 2,
        "the stream broke off": 2,
        "in the stream: step 7 failed": 2,
    }
    assert "2 failed: HTTP 429: the queue is full" in done.output


def test_where_there_is_no_usage_it_is_said_that_pieces_were_counted(target):
    fake = FakeOpenAI(lambda *request: events(request[-1], usage=False, per_event=2))
    record, done = record_of(fake, target)
    summary = record["runs"][0]["summary"]
    assert summary["tokens_counted_by"] == "chunks"
    assert summary["total_output_tokens"] == 8, "four answers of two pieces"
    assert summary["total_input_tokens"] is None
    assert record["settings"]["tokens_per_estimated_token"] == 1.0
    assert "output tokens were counted by chunks" in done.output


def test_answers_that_end_early_are_said(target):
    fake = FakeOpenAI(lambda *request: events(request[-1], num_tokens=1))
    record, done = record_of(fake, target)
    assert record["runs"][0]["summary"]["ended_early"] == 4
    assert "4 of 4 answers ended before their full length" in done.output


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((401, {"error": {"message": "Invalid API key"}}), "HTTP 401: Invalid API key"),
        ((404, {"error": {"message": "model 'x' does not exist"}}), "HTTP 404: model 'x' does not exist"),
        ((400, {"object": "error", "message": "at most 8192 tokens fit"}), "HTTP 400: at most 8192 tokens fit"),
        ((404, {"detail": "Not Found"}), "HTTP 404: Not Found"),
        ((502, ["bad", "gateway"]), 'HTTP 502: ["bad", "gateway"]'),
        (b"", "the connection was closed without an answer"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (["not json"], "an event that is none of this API's"),
        (["[DONE]"][:0], "the stream broke off"),
    ],
    ids=str,
)
def test_a_server_that_does_not_answer_is_one_line_and_status_2(answer, text):
    with serving(FakeOpenAI(lambda *_: answer)) as url:
        done = bench(url, "--model", "x")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"samebit: error: {url}: {text}")
    assert len(done.stderr.splitlines()) == 1


def test_a_prompt_that_is_too_long_is_said_before_the_first_run(target):
    def respond(number, path, body):
        is_long = len(body["prompt"].split()) > 700
        return (400, {"error": {"message": "prompt of 900 tokens: at most 700 fit"}}) if is_long else events(body)

    fake = FakeOpenAI(respond)
    with serving(fake) as url:
        done = bench(url, "--random-input-len", "900")
    assert (done.exit_code, fake.measured()) == (2, [])
    assert "at most 700 fit" in done.stderr


def test_nobody_there_is_one_line_and_status_2():
    with serving(FakeOpenAI()) as url:
        pass
    done = bench(url, "--model", "x")
    assert done.exit_code == 2
    assert done.stderr == f"samebit: error: {url}: connection refused\n"
    done = bench("http://nonesuch.invalid", "--model", "x")
    assert done.exit_code == 2
    assert done.stderr.startswith("samebit: error: http://nonesuch.invalid: no connection: ")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--base-url", "ftp://x"], "base_url='ftp://x'"),
        (["--base-url", "http://x:99999"], "base_url='http://x:99999'"),
        (["--backend", "tgi"], "backend='tgi': must be one of openai"),
        (["--dataset-name", "sharegpt"], "dataset_name='sharegpt'"),
        (["--request-rate", "0"], "request_rate=0.0"),
        (["--request-rate", "fast"], "request_rate='fast'"),
        (["--max-concurrency", "0"], "max_concurrency='0'"),
        (["--burstiness", "0"], "burstiness=0.0"),
        (["--goodput", "speed:1"], "goodput='speed:1'"),
        (["--goodput", "ttft"], "goodput='ttft': must be a limit in milliseconds, as in ttft:500 (NAME:MS)"),
        (["--extra-body", "[1]"], "extra_body='[1]'"),
        (["--header", "x"], "header: must be NAME=VALUE"),
        (["--api-key", "a\nb"], "api_key, header: must be plain ASCII"),
        (["--output", "no/where.json"], "no/where.json"),
        (["--save-result", "--result-dir", "nowhere"], "result_dir='nowhere'"),
        (["--tokenizer", "nonesuch"], "nonesuch"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_named_before_anything_is_sent(flags, text):
    done = bench("http://127.0.0.1:9", *flags)
    assert done.exit_code == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_secrets_are_sent_and_never_recorded(target):
    fake = FakeOpenAI()
    record, _ = record_of(fake, target, "--api-key", "sk-4711", "--header", "X-Tenant=0815", "--ignore-eos")
    assert {head["Authorization"] for head in fake.headers} == {"Bearer sk-4711"}
    assert {head["X-Tenant"] for head in fake.headers} == {"0815"}
    assert all(body["ignore_eos"] for body in fake.bodies)
    assert "--ignore-eos" in record["command"]
    assert "sk-4711" not in json.dumps(record)
    assert "Tenant=0815" not in json.dumps(record)
    told = command_line(["bench", "serve", "--api-key", "sk", "--header=a=b", "--extra-body", '{"a": 1}'])
    assert told == """samebit bench serve --api-key '***' '--header=***' --extra-body '{"a": 1}'""".replace(
        "'***'", "***"
    ).replace("'--header=***'", "--header=***")


def test_no_record_holds_the_user_password_or_key_of_a_url(target):
    fake = FakeOpenAI()
    with serving(fake) as url:
        place = url.removeprefix("http://")
        done = bench(f"http://someone:sk-4711@{place}", "--output", str(target))
    assert done.exit_code == 0, done.output
    record = json.loads(target.read_text())
    assert record["settings"]["base_url"] == f"http://***@{place}"
    assert f"http://***@{place}" in record["command"]
    assert "sk-4711" not in json.dumps(record)
    told = command_line(["bench", "--base-url=https://someone:p@ss@host/v1?key=sk"])
    assert told == "samebit bench '--base-url=https://***@host/v1?***'"


def test_fields_of_ones_own_go_into_every_body(target):
    fake = FakeOpenAI()
    record_of(fake, target, "--extra-body", '{"temperature": 0.5, "user": "u"}')
    assert {(body["temperature"], body["user"]) for body in fake.bodies} == {(0.5, "u")}


def test_a_result_is_saved_under_a_name_of_its_own(tmp_path):
    with serving(FakeOpenAI()) as url:
        done = bench(url, "--save-result", "--result-dir", str(tmp_path), "--label", "a b/c")
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("serve-a-b-c-")
    assert str(path) in done.stderr.replace("\n", "")


def test_an_interrupt_shows_and_stores_what_was_measured(target):
    has_come, may_go = threading.Event(), threading.Event()

    def respond(number, path, body):
        if number >= 9:
            has_come.set()
            may_go.wait(60)
        return events(body)

    with serving(FakeOpenAI(respond)) as url:
        flags = ["--base-url", url, *SMALL, "--max-concurrency", "1,2", "--output", str(target)]
        # Whoever runs these tests in the background of a script has interrupts ignored.
        heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        command = [sys.executable, "-c", heard + COMMAND, "bench", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert has_come.wait(60)
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=60)
            finally:
                process.kill()
                may_go.set()
    assert process.returncode == 130, errors
    assert "Interrupted" in output
    assert "Traceback" not in errors
    record = json.loads(target.read_text())
    summary = record["runs"][0]["summary"]
    assert not record["is_complete"]
    assert len(record["runs"]) == 1, "the rest of the sweep was not begun"
    assert (summary["completed"], summary["failed"], summary["unfinished"], summary["unsent"]) == (2, 0, 1, 1)


def test_nano_is_measured_over_http(tmp_path):
    flags = ["--num-threads", "1", "--port", "0", "--cache-bytes", "100000000"]
    with running([COMMAND, "serve", "nano", *flags], tmp_path / "log") as server:
        server.wait_ready()
        url, common = server.base_url, ["--ignore-eos", "--save-detailed", "--output", str(tmp_path / "record.json")]
        for backend in ("openai", "openai-chat"):
            done = bench(url, *common, "--backend", backend, "--random-input-len", "50", "--request-rate", "50")
            assert done.exit_code == 0, done.output
            record = json.loads((tmp_path / "record.json").read_text())
            summary = record["runs"][0]["summary"]
            assert (summary["completed"], summary["total_output_tokens"]) == (4, 12)
            assert summary["tokens_counted_by"] == "usage"
            assert record["server"]["system_fingerprint"].startswith("fp_")
        lengths = [row["num_input_tokens"] for row in record["runs"][0]["requests"]]
        assert all(45 <= length <= 75 for length in lengths), "50 and what the template adds"
        turns = ["--dataset-name", "multi_turn", "--multi-turn-num-turns", "3", "--num-prompts", "2"]
        done = bench(url, *common, *turns, "--backend", "openai-chat", "--multi-turn-output-len", "8")
        rows = json.loads((tmp_path / "record.json").read_text())["runs"][0]["requests"]
        assert [row["turn"] for row in rows].count(2) == 2
        assert all(row["num_cached_tokens"] > 1000 for row in rows if row["turn"]), "the system prompt, at least"
        done = bench(url, "--random-input-len", "20000")
        assert done.exit_code == 2
        assert "at most 8192 fit" in done.stderr
        done = bench(url, "--model", "nonesuch")
        assert done.exit_code == 2
        assert "model 'nonesuch' does not exist" in done.stderr
