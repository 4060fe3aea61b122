"""run-batch, top, env, and the flags of other servers."""

import json

import pytest
import typer

from samebit.cli.aliases import FIXED, RENAMED, REPLACED, ours
from samebit.cli.figures import Look, figures, parse, quantile
from tests.cli.test_cli import FAST, run
from tests.server.driver import COMMAND, fake_arguments, running


def test_a_launch_line_of_another_server_becomes_ours():
    theirs = "--model-path nano --tp 1 --context-length=512 --max-running-requests 4 --disable-radix-cache --port 0"
    assert (
        ours(theirs.split()) == "nano --max-model-len 512 --max-num-seqs 4 --no-enable-prefix-caching --port 0".split()
    )
    assert ours(["nano", "--trust-remote-code", "--", "--tp"]) == ["nano", "--", "--tp"]


@pytest.mark.parametrize("args", [["--tp", "2"], ["--tp-size=4"], ["--context-length"], ["--data-parallel-size", "1x"]])
def test_what_is_not_supported_is_refused_by_name(args):
    with pytest.raises(typer.BadParameter) as caught:
        ours(args)
    assert caught.value.param_hint == args[0].partition("=")[0]


def test_a_foreign_flag_leads_to_one_that_exists():
    command = typer.main.get_command(__import__("samebit.cli", fromlist=["app"]).app).commands["serve"]
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    targets = {*RENAMED.values(), *(parts[0] for parts in REPLACED.values() if parts)} - {""}
    assert targets <= flags
    assert not flags & {*RENAMED, *REPLACED, *FIXED}, "a flag of ours is not foreign"


def test_a_server_starts_with_the_flags_of_another(tmp_path):
    theirs = "--model nano --port 0 --context-length 300 --tensor-parallel-size 1 --enable-metrics --enforce-eager"
    limits = ["--num-threads", "1", "--cache-bytes", "100000000", "--metrics-compat", "vllm", "--api-key", "k"]
    with running([COMMAND, "serve", *theirs.split(), *limits], tmp_path / "log") as server:
        server.wait_ready()
        card = server.request("GET", "/v1/models", key="k")[2]["data"][0]
        assert (card["id"], card["max_model_len"]) == ("nano", 300)
        assert server.get("/v1/models")[0] == 401
        assert "vllm:num_requests_running" in server.request("GET", "/metrics", key="k")[2]


def test_a_mistake_in_a_foreign_flag_is_told():
    done = run("serve", "nano", "--tp", "8")
    assert done.returncode == 2
    assert "only 1 is supported" in done.stderr
    assert ours(["nano", "--speculative-eagle-topk", "1"]) == ["nano"]
    with pytest.raises(typer.BadParameter, match="4: only 1 is supported"):
        ours(["--speculative-eagle-topk=4"])
    done = run("serve", "nano", "--metrics-compat", "tgi", "--port", "0")
    assert (done.returncode, done.stderr) == (
        1,
        "samebit: error: metrics_compat='tgi': must be one of sglang, vllm\n",
    )


def test_a_batch_is_answered_and_a_second_run_finds_it_done(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "seed": 1}
    rows = [{"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(3)]
    source.write_text("\n".join(map(json.dumps, rows)))
    command = ["run-batch", "nano", "-i", str(source), "-o", str(target), "--cache-bytes", "100000000", *FAST]
    done = run(*command)
    assert (done.returncode, done.stderr) == (0, "samebit: 3 answered, 0 failed\n")
    answers = [json.loads(row)["response"]["body"] for row in target.read_text().splitlines()]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    done = run(*command)
    assert (done.returncode, done.stderr) == (0, "samebit: 0 answered, 0 failed, 3 done before\n")
    done = run(*[*command[:3], str(tmp_path / "nowhere"), *command[4:]])
    assert done.returncode == 1
    assert done.stderr.startswith("samebit: error: ")


def test_top_shows_what_a_server_does(tmp_path):
    with running(fake_arguments(None, api_keys=("k",)), tmp_path / "log") as server:
        server.wait_ready()
        url = f"http://{server.host}:{server.port}"
        for _ in range(3):
            status, _, _ = server.request("POST", "/v1/completions", {"prompt": [1, 2], "max_tokens": 4}, key="k")
            assert status == 200
        done = run("top", url, "--json", "--api-key", "k")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["finished"] == {"length": 3}
        assert found["missed"] == {"cold": 5}
        assert 0 < found["ttft_p50"] <= found["ttft_p99"]
        assert (found["full_token_usage"], found["conv_usage"]) == (0.25, 0.125)
        shown = run("top", url, "--once", "--api-key", "k")
        assert "25 %" in shown.stdout
        assert "length 3" in shown.stdout
        refused = run("top", url, "--once")
        assert (refused.returncode, refused.stderr) == (1, f"samebit: error: {url} answers 401: Unauthorized\n")
    gone = run("top", url, "--once")
    assert gone.returncode == 1
    assert "does not answer" in gone.stderr


def test_an_environment_is_described_without_secrets_or_paths(monkeypatch):
    monkeypatch.setenv("SAMEBIT_API_KEY", "very-secret")
    done = run("env", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"samebit", "python", "torch", "cpu", "cores", "gpus", "kernels"} <= set(found)
    assert "very-secret" not in done.stdout
    plain = run("env")
    assert [row.split()[0] for row in plain.stdout.splitlines()] == list(found)


BUCKETS = {0.1: 0.0, 1.0: 5.0, 2.0: 10.0, float("inf"): 10.0}


def look(buckets, at_s=0.0, tokens=0.0):
    samples = {"x_bucket": {(("le", str(bound)),): count for bound, count in buckets.items()}}
    return Look(at_s, {**samples, "generation_tokens_total": {(): tokens}})


def test_quantiles_are_those_of_the_time_between_two_looks():
    assert quantile("x", 0.5, look(BUCKETS)) == pytest.approx(1.0)
    assert quantile("x", 0.75, look(BUCKETS)) == pytest.approx(1.5)
    assert quantile("x", 0.25, look(BUCKETS)) == pytest.approx(0.55)
    assert quantile("x", 0.5, look({})) is None
    assert quantile("x", 0.5, look(BUCKETS), look(BUCKETS)) is None
    assert quantile("x", 0.99, look({1.0: 0.0, float("inf"): 3.0})) == pytest.approx(1.0)
    later = {0.1: 4.0, 1.0: 9.0, 2.0: 14.0, float("inf"): 14.0}
    assert quantile("x", 0.5, look(later), look(BUCKETS)) == pytest.approx(0.05)


def test_rates_are_those_of_the_time_between_two_looks():
    assert figures(look({}, 12.0, 300.0), look({}, 10.0, 100.0))["tokens_per_second"] == 100.0
    assert figures(look({}, 12.0, 5.0), look({}, 10.0, 100.0))["tokens_per_second"] == 0.0, "a restart is no debt"


def test_only_our_own_metrics_are_read():
    text = 'samebit:num_running_reqs{model_name="x"} 3.0\nvllm:num_requests_running{model_name="x"} 3.0\n'
    found = parse(text, 0.0)
    assert found.value("num_running_reqs") == 3.0
    assert set(found.samples) == {"num_running_reqs"}
