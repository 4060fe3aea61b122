"""What operators ask and do: probes, load, aborts, the cache, other weights, keys. With an engine that needs no model."""

import os
import re
import signal

import pytest

from samebit.core.errors import ConfigError
from samebit.server.auth import Keys, read_keys
from tests.server.driver import COMMAND, fake_arguments, running
from tests.server.fakes import ENDLESS, FAIL
from tests.server.test_lifecycle import TEXT, Asking, body

ADMIN_PATHS = {
    "/flush_cache": None,
    "/update_weights_from_disk": {"model_path": "."},
    "/abort_request": {"abort_all": True},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for the tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("operations")
    options = {"metrics_compat": ("sglang", "vllm"), "max_queued_requests": 12}
    with running(fake_arguments(None, **options), folder / "log") as server:
        yield server.wait_ready()


def test_the_deep_probe_draws_a_token(server):
    assert server.get("/health_generate")[::2] == (200, {"status": "ok"})


def test_the_deep_probe_is_not_kept_out_by_a_full_queue(start):
    server = start(max_queued_requests=2)
    with server.raw_stream(body(ENDLESS, n=6, stream=True)):
        server.until(lambda: server.stat("num_waiting") == 2)
        assert server.post(TEXT, body())[0] == 503
        assert server.get("/health_generate")[::2] == (200, {"status": "ok"}), "those that run draw tokens"


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/health_generate", "/v1/models", "/v1/models/nano", "/metrics", "/server_info"]
)
def test_what_can_be_read_can_be_asked_for_its_head(server, path):
    status, headers, text = server.request("HEAD", path)
    assert (status, text) == (200, "")
    assert int(headers["content-length"]) > 0


def test_the_deep_probe_fails_where_no_token_comes(start):
    server = start(max_engine_restarts=0)
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        assert server.get("/health")[0] == 200, "this one waits for nobody"
        with pytest.raises(TimeoutError):
            server.request("GET", "/health_generate", limit_s=0.5)
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)


def test_a_model_tells_what_it_is(server):
    info = server.get("/model_info")[2]
    assert info["model_path"] == info["served_model_name"] == "nano"
    assert (info["max_model_len"], info["vocab_size"], info["system_fingerprint"]) == (4096, 256, "fp_fake")
    assert info["weight_version"] == "default"


@pytest.mark.parametrize("path", ["/v1/loads", "/loads"])
def test_routers_see_the_load(server, path):
    with server.raw_stream(body(ENDLESS, n=6, stream=True)):
        server.until(lambda: server.stat("num_running") == 4)
        answer = server.get(path)[2]
        (load,) = answer["loads"]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_reqs"]) == (4, 2, 6)
        assert (load["max_running_requests"], load["utilization"], load["token_usage"]) == (4, 1.0, 0.5)
        assert answer["aggregate"]["total_waiting_reqs"] == 2
    server.until(lambda: server.get(path)[2]["aggregate"]["total_reqs"] == 0)


def test_an_answer_can_be_aborted_by_its_id(server):
    streamed = Asking(server, body(ENDLESS, stream=True, n=2))
    server.until(lambda: server.stat("num_running") == 2)
    assert server.post("/abort_request", {"rid": "cmpl-nonesuch"})[2] == {"num_aborted": 0}
    with server.raw_stream(body(ENDLESS, stream=True)) as connection:
        start = connection.recv(4096)
        while b'"id"' not in start:
            start += connection.recv(4096)
        rid = re.search(rb'"id":"(cmpl-\w+)"', start)[1].decode()
        assert server.post("/abort_request", {"rid": rid})[2] == {"num_aborted": 1}
        rest = b""
        while b"[DONE]" not in rest:
            rest += connection.recv(65536)
        assert b'"finish_reason":"abort"' in rest
    server.until(lambda: server.stat("num_running") == 2)
    assert server.post("/abort_request", {"abort_all": True})[2] == {"num_aborted": 2}
    text = streamed.result()[2]
    assert text.count('"finish_reason":"abort"') == 2
    assert text.endswith("data: [DONE]\n\n")


def test_an_abort_needs_an_id(server):
    status, _, answer = server.post("/abort_request", {})
    assert (status, answer["error"]["param"]) == (400, "rid")


def test_the_cache_is_emptied(server):
    before = server.stat("num_flushes")
    assert server.post("/flush_cache", None)[2]["success"]
    server.complete([1])
    server.until(lambda: server.stat("num_flushes") == before + 1)


def test_other_weights_are_served_when_open_requests_have_ended(start, tmp_path):
    server = start()
    path = str(tmp_path)
    first = Asking(server, body(max_tokens=1500))
    server.until(lambda: server.stat("num_running") == 1)
    update = Asking(server, {"model_path": path, "weight_version": "v2"}, "/update_weights_from_disk")
    server.until(lambda: server.get("/ready")[0] == 503)
    status, headers, answer = server.post(TEXT, body())
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert int(headers["retry-after"]) >= 1
    assert first.result()[2]["system_fingerprint"] == "fp_fake"
    answer = update.result()[2]
    assert (answer["success"], answer["weight_version"]) == (True, "v2")
    assert answer["system_fingerprint"] == f"fp_{path}"
    assert server.complete([1])["system_fingerprint"] == f"fp_{path}"
    info = server.get("/model_info")[2]
    assert (info["weight_version"], info["model_path"], info["tokenizer_path"]) == ("v2", path, "nano")
    assert info["served_model_name"] == "nano"
    assert server.get("/ready")[0] == 200


def test_other_weights_need_not_wait(start, tmp_path):
    server = start()
    endless = Asking(server, body(ENDLESS))
    server.until(lambda: server.stat("num_running") == 1)
    fields = {"model_path": str(tmp_path), "abort_all_requests": True}
    assert server.post("/update_weights_from_disk", fields)[2]["num_aborted"] == 1
    answer = endless.result()[2]
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["system_fingerprint"] == "fp_fake"


@pytest.mark.parametrize("abort_all", [False, True])
def test_weights_that_are_refused_touch_no_request(start, tmp_path, abort_all):
    server = start()
    (tmp_path / "cursed").mkdir()
    with server.raw_stream(body(ENDLESS, stream=True)):
        server.until(lambda: server.stat("num_running") == 1)
        fields = {"model_path": str(tmp_path / "cursed"), "abort_all_requests": abort_all}
        status, _, answer = server.post("/update_weights_from_disk", fields)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "weights_refused", "model_path")
        assert "cursed" in answer["error"]["message"]
        assert server.stat("num_running") == 1
        assert server.get("/ready")[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model_path": "no/such/folder"}, "model_path"),
        ({"model_path": "a\0b"}, "model_path"),
        ({"model_path": ".", "load_format": "dummy"}, "load_format"),
        ({"model_path": ".", "flush_cache": False}, "flush_cache"),
        ({}, "model_path"),
    ],
)
def test_weights_that_are_not_there_are_refused_by_name(server, fields, param):
    status, _, answer = server.post("/update_weights_from_disk", fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert server.get("/ready")[0] == 200


def test_a_killed_engine_is_started_again_and_meanwhile_nobody_hangs(start):
    server = start()
    requests = [Asking(server, body(ENDLESS, stream=stream)) for stream in (False, True) * 2]
    server.until(lambda: server.stat("num_running") == 4)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for request in requests[::2]:
        status, headers, answer = request.result()
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert int(headers["retry-after"]) >= 1
    for request in requests[1::2]:
        assert "engine_dead" in str(request.result()[2])
    server.until(lambda: server.get("/health")[0] == 200)
    whole = server.complete([1, 2], seed=1)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert 'samebit:engine_losses_total{model_name="nano"} 1.0' in server.get("/metrics")[2]
    assert server.log.count("starting it again") == 1
    assert server.process.poll() is None


def test_a_step_that_fails_takes_no_other_request_with_it(server):
    other = Asking(server, body(max_tokens=500))
    assert server.post(TEXT, body(FAIL))[0] == 500
    assert other.result()[2]["choices"][0]["finish_reason"] == "length"


def metric(text, name):
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def test_metrics_have_the_names_of_other_servers_too(server):
    server.complete([1, 2, 3], max_tokens=4)
    server.until(lambda: server.stat("num_running") == 0)
    text = server.get("/metrics")[2]
    sglang = '{engine_type="unified",model_name="nano",moe_ep_rank="0",pp_rank="0",tp_rank="0"}'
    vllm = '{engine="0",model_name="nano"}'
    ours = '{model_name="nano"}'
    for name in ("generation_tokens_total", "time_to_first_token_seconds_count", "queue_time_seconds_count"):
        value = metric(text, f"samebit:{name}{ours}")
        assert value >= 1
        assert metric(text, f"sglang:{name}{sglang}") == value
    assert metric(text, f"vllm:generation_tokens_total{vllm}") == metric(text, f"samebit:generation_tokens_total{ours}")
    assert metric(text, f"vllm:kv_cache_usage_perc{vllm}") == metric(text, f"vllm:gpu_cache_usage_perc{vllm}") == 0.5
    assert metric(text, f"sglang:mamba_usage{sglang}") == 0.125
    assert metric(text, 'vllm:request_success_total{engine="0",finished_reason="length",model_name="nano"}') >= 1
    assert metric(text, 'samebit:cache_miss_reason_total{model_name="nano",reason="cold"}') == 5
    assert metric(text, f"vllm:prefix_cache_hits_total{vllm}") == metric(text, f"samebit:cached_tokens_total{ours}")
    assert metric(text, f"samebit:cache_hit_rate{ours}") == pytest.approx(
        metric(text, f"samebit:cached_tokens_total{ours}") / metric(text, f"samebit:prompt_tokens_total{ours}")
    )


def test_evictions_of_a_real_cache_are_timed_and_shown(tmp_path):
    arguments = ["serve", "nano", "--port", "0", "--num-threads", "1", "--num-checkpoints", "4", "--max-num-seqs", "1"]
    with running([COMMAND, *arguments, "--metrics-compat", "sglang"], tmp_path / "log") as server:
        server.wait_ready()
        for first in range(8):
            server.complete([first + 1] * 40, max_tokens=1)
        server.until(lambda: server.stat("num_running") == 0)
        text = server.get("/metrics")[2]
    count = metric(text, 'samebit:eviction_duration_seconds_count{model_name="nano"}')
    assert count >= 1
    assert "sglang:eviction_duration_seconds_bucket" in text


def test_without_being_asked_only_our_names_are_shown(start):
    text = start().get("/metrics")[2]
    assert "samebit:" in text
    assert "vllm:" not in text
    assert "sglang:" not in text


def test_a_server_with_keys_answers_no_one_else(start, tmp_path):
    (tmp_path / "keys").write_text("# for the evaluation\nfile-key\n\n")
    server = start(api_keys=("one", "two"), api_key_file=str(tmp_path / "keys"), admin_api_key="root-key")
    for path in ("/health", "/ready"):
        assert server.get(path)[0] == 200, "probes have no key"
    for path in ("/v1/models", "/metrics", "/server_info", "/nowhere", "/openapi.json"):
        status, headers, answer = server.get(path)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
    for key in ("", "on", "one ", "onetwo", "ONE"):
        expected = 200 if key.strip() == "one" else 401
        assert server.request("GET", "/v1/models", key=key)[0] == expected, key
    for key in ("one", "two", "file-key", "root-key"):
        assert server.request("POST", TEXT, body(), key=key)[0] == 200
    for path, fields in ADMIN_PATHS.items():
        status, _, answer = server.request("POST", path, fields, key="one")
        assert (status, answer["error"]["code"]) == (403, "admin_key_needed")
        assert server.request("POST", path, fields, key="root-key")[0] == 200
    assert server.request("POST", "/abort_request", {"rid": "cmpl-x"}, key="one")[0] == 200


def test_without_any_key_only_this_machine_may_administrate(start):
    server = start(host="0.0.0.0")
    assert "warning: everyone who can reach 0.0.0.0 can use this server" in server.log
    assert server.post(TEXT, body())[0] == 200
    for path, fields in ADMIN_PATHS.items():
        assert server.post(path, fields)[0] == 403
    guarded = start(host="0.0.0.0", api_keys=("one",))
    assert "warning" not in guarded.log
    assert "warning" not in start().log


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        (Keys(), None, (True, True)),
        (Keys(is_local=False), None, (True, False)),
        (Keys(("a",)), None, (False, False)),
        (Keys(("a",)), "a", (True, False)),
        (Keys(("a",)), "b", (False, False)),
        (Keys(("a",), "root"), "root", (True, True)),
        (Keys((), "root"), None, (True, False)),
        (Keys((), "root"), "é", (True, False)),
        (Keys((), "root", is_local=False), "root", (True, True)),
    ],
    ids=str,
)
def test_a_key_opens_what_it_is_for(keys, key, expected):
    assert keys.allows(key) == expected


def test_a_file_without_keys_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "nowhere")
    (tmp_path / "keys").write_text("# none yet\n\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize(
    "options", [{"api_keys": ("",)}, {"api_keys": ("a b",)}, {"admin_api_key": "ä"}, {"admin_api_key": ""}]
)
def test_a_key_that_no_header_can_carry_is_a_mistake(tmp_path, options):
    with running(fake_arguments(None, **options), tmp_path / "log") as server:
        assert server.wait() == 1
        assert server.log.startswith("samebit: error: api_key")


def test_an_admin_key_that_every_client_has_is_a_mistake(tmp_path):
    with running(fake_arguments(None, api_keys=("a", "b"), admin_api_key="b"), tmp_path / "log") as server:
        assert server.wait() == 1
        assert (
            server.log
            == "samebit: error: admin_api_key: is one of the API keys, so every client could administrate; choose another\n"
        )


def test_a_stream_without_news_gets_comments_before_and_after_its_first_token(start):
    server = start(sse_ping_interval_s=0.2)
    os.kill(server.engine_pid(), signal.SIGSTOP)
    with server.raw_stream(body(max_tokens=3, stream=True)) as connection:
        text = b""
        while text.count(b": still here\n\n") < 2:
            text += connection.recv(4096)
        assert b"text/event-stream" in text
        assert b"data:" not in text
        os.kill(server.engine_pid(), signal.SIGCONT)
        while b"[DONE]" not in text:
            text += connection.recv(4096)
    assert text.index(b": still here") < text.index(b"data: {")
    silent = start(sse_ping_interval_s=0)
    assert ": still here" not in silent.post(TEXT, body(max_tokens=300, stream=True))[2]


def test_a_refusal_that_comes_late_is_an_event(start):
    server = start(sse_ping_interval_s=0.1)
    os.kill(server.engine_pid(), signal.SIGSTOP)
    request = Asking(server, body(stream=True, prompt=[1] * 4096))
    other = Asking(server, {"input": "x = 1\n" * 3000, "stream": True}, "/v1/responses")
    server.until(lambda: server.get("/loads")[2]["loads"][0]["num_total_reqs"] == 2)
    with server.raw_stream(body(stream=True)) as connection:
        assert connection.recv(1024)
    os.kill(server.engine_pid(), signal.SIGCONT)
    status, _, text = request.result()
    assert status == 200
    assert "prompt is too long" in text
    assert '"param":"input"' in other.result()[2].replace(" ", "")
    assert "[DONE]" not in text
