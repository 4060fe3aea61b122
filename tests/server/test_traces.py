"""Spans of requests, as a collector gets them from a server, and what becomes of both when there is none."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from samebit.cli import app
from samebit.core.errors import ConfigError
from samebit.engine.metrics import ServerMetrics
from samebit.server import run as server_run
from tests.server.fakes import ENDLESS, FAIL, KILL

TEXT = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NEVER_MS = "3600000"


@pytest.fixture(autouse=True)
def settings(monkeypatch, request):
    """No variable of whoever runs the tests counts, and spans are sent at shutdown only."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", NEVER_MS)


@pytest.fixture
def otel():
    """The extra; what needs it is skipped without."""
    return pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `otel`")


class Collector:
    """Takes spans over HTTP. `status`: what it answers; `gate`: it does not, until that is set."""

    def __init__(self, status=200):
        self.bodies, self.status, self.gate = [], status, threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                collector.asked.set()
                collector.gate.wait(120)
                with contextlib.suppress(OSError):  # nobody waits any more
                    self.send_response(collector.status)
                    self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.gate.set()
            self.server.shutdown()
            self.server.server_close()
            thread.join()

    @property
    def groups(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        return [group for data in self.bodies for group in ExportTraceServiceRequest.FromString(data).resource_spans]

    @property
    def spans(self):
        """In the order in which their requests ended."""
        spans = [span for group in self.groups for scope in group.scope_spans for span in scope.spans]
        return sorted(spans, key=lambda span: span.end_time_unix_nano)


@pytest.fixture
def collector(otel):
    with Collector().running() as collector:
        yield collector


@pytest.fixture
def traced(start, collector):
    return start(otlp_traces_endpoint=collector.url)


def plain(attributes):
    kinds = {"string_value": str, "int_value": int, "double_value": float}

    def value(held):
        kind = held.WhichOneof("value")
        return (
            [value(item) for item in held.array_value.values]
            if kind == "array_value"
            else kinds[kind](getattr(held, kind))
        )

    return {item.key: value(item.value) for item in attributes}


def spans_after(server, collector):
    """What the collector has once the server has ended as it should."""
    server.signal()
    assert server.wait() == 0
    assert "Traceback" not in server.log, server.log
    return collector.spans


def body(first=1, **fields):
    return {"prompt": [first, 2], "seed": 1, "max_tokens": 5, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_span_that_tells_what_was_asked_and_how_it_fared(traced, collector, stream):
    asked = body(temperature=0.5, top_p=0.75, top_k=7, rid="me", stream=stream)
    status, _, _ = traced.post(TEXT, asked)
    assert status == 200
    (span,) = spans_after(traced, collector)
    assert span.name == "text_completion nano"
    assert span.kind == span.SPAN_KIND_SERVER
    assert span.status.code == span.status.STATUS_CODE_UNSET
    told = plain(span.attributes)
    latencies = {name: told.pop(name) for name in list(told) if name.startswith("gen_ai.latency.")}
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "samebit",
        "http.request.method": "POST",
        "http.route": TEXT,
        "http.response.status_code": 200,
        "gen_ai.request.id": "me",
        "gen_ai.request.model": "nano",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 1,
        "gen_ai.response.id": "me",
        "gen_ai.response.model": "nano",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cached_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "openai.response.system_fingerprint": "fp_fake",
    }
    wait, first, prefill, decode, whole = (
        latencies[f"gen_ai.latency.{name}"]
        for name in ("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e")
    )
    assert len(latencies) == 5
    assert min(wait, prefill, decode) > 0
    assert wait + prefill == pytest.approx(first)
    assert first + decode == pytest.approx(whole)
    assert [event.name for event in span.events] == ["admitted", "first_token", "last_token"]
    times = [event.time_unix_nano for event in span.events]
    assert [span.start_time_unix_nano, *times, span.end_time_unix_nano] == sorted(
        [span.start_time_unix_nano, *times, span.end_time_unix_nano]
    )
    assert (times[1] - times[0]) / 1e9 == pytest.approx(prefill, abs=1e-6)
    assert (times[2] - times[1]) / 1e9 == pytest.approx(decode, abs=1e-6)


def test_a_request_of_one_token_knows_how_long_it_waited(traced, collector):
    for _ in range(5):
        traced.complete([1, 2], max_tokens=1)
    spans = spans_after(traced, collector)
    assert ["gen_ai.latency.time_in_queue" in plain(span.attributes) for span in spans] == [True] * 5


def test_a_prompt_counts_once_and_every_sample_has_its_end(traced, collector):
    assert traced.post(TEXT, body(prompt=[[1, 2, 3], [4, 5]], n=2))[0] == 200
    (span,) = spans_after(traced, collector)
    told = plain(span.attributes)
    assert told["gen_ai.usage.input_tokens"] == 5
    assert told["gen_ai.usage.output_tokens"] == 20
    assert told["gen_ai.usage.cached_tokens"] == 4
    assert told["gen_ai.request.choice.count"] == 2
    assert told["gen_ai.response.finish_reasons"] == ["length"] * 4


def test_the_trace_of_a_client_goes_on(traced, collector):
    traced.post(TEXT, body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "them=1"})
    traced.post(TEXT, body(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})  # its client does not record it
    traced.post(TEXT, body(), headers={"traceparent": f"00-{TRACE}-{'0' * 16}-01"})  # no such span
    traced.post(TEXT, body(), headers={"traceparent": "\xe9" * 600, "tracestate": "=,=" * 300})
    traced.post(TEXT, body())
    continued, *others = spans_after(traced, collector)
    assert (continued.trace_id.hex(), continued.parent_span_id.hex()) == (TRACE, PARENT)
    assert continued.trace_state == "them=1"
    assert len(others) == 3
    assert all(not span.parent_span_id for span in others)
    assert len({TRACE, *(span.trace_id.hex() for span in others)}) == 4


def test_prompts_and_answers_are_in_no_span(traced, collector):
    secret = "xyzzy"
    chat = {"messages": [{"role": "system", "content": secret}, {"role": "user", "content": secret}], "max_tokens": 5}
    answers = [
        traced.post("/v1/chat/completions", {**chat, "stop": [secret], "user": secret, "cache_salt": secret}),
        traced.post("/v1/responses", {"input": secret, "instructions": secret, "max_output_tokens": 5}),
        traced.post(TEXT, body(prompt=secret, echo=True)),
        traced.post(TEXT, body(**{secret: 1})),
        traced.post(TEXT, body(model=secret)),
        traced.post(f"{TEXT}?{secret}", {"prompt": secret, "stop": [secret, ""]}),
    ]
    assert [status for status, _, _ in answers] == [200, 200, 200, 400, 404, 400]
    said = answers[0][2]["choices"][0]["message"]["content"]
    assert len(said) == 5
    assert len(spans_after(traced, collector)) == 6
    held = b"".join(collector.bodies)
    assert b"gen_ai.usage" in held, "it is not compressed"
    assert secret.encode() not in held
    assert said.encode() not in held


def test_a_request_that_is_refused_is_a_span_and_an_error_only_if_that_is_the_servers_doing(start, collector):
    server = start(otlp_traces_endpoint=collector.url, max_queued_requests=0)
    assert server.post(TEXT, body(top_p=7))[0] == 400
    assert server.post(TEXT, body(prompt=[1] * 5000))[0] == 400
    with server.raw_stream(body(ENDLESS, n=4, stream=True)):
        server.until(lambda: server.stat("num_running") == 4)
        assert server.post(TEXT, body(rid="fifth"))[0] == 503
    server.until(lambda: server.stat("num_running") == 0)
    *told, _ = [(plain(span.attributes), span.status.code) for span in spans_after(server, collector)]
    kept = [(about["http.response.status_code"], about.get("error.type"), code) for about, code in told]
    assert kept == [(400, None, 0), (400, None, 0), (503, "503", 2)]
    assert told[2][0]["gen_ai.request.id"] == "fifth"


def test_what_has_no_key_or_asks_for_no_answer_is_no_span(start, collector):
    server = start(otlp_traces_endpoint=collector.url, api_keys=("key",))
    assert server.post(TEXT, body())[0] == 401
    assert server.get(TEXT)[0] == 401
    assert server.get("/health")[0] == 200
    assert server.request("GET", "/metrics", key="key")[0] == 200
    assert server.post("/tokenize", {"prompt": "x"}, key="key")[0] == 200
    assert server.post(TEXT, body(rid="asked"), key="key")[0] == 200
    (span,) = spans_after(server, collector)
    assert plain(span.attributes)["gen_ai.request.id"] == "asked"


@pytest.mark.parametrize(("first", "kind"), [(FAIL, "StepError"), (KILL, "EngineDeadError")])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_engine_could_not_give_is_an_error(traced, collector, first, kind, stream):
    traced.post(TEXT, body(first, stream=stream))
    traced.until(lambda: traced.get("/health")[0] == 200)
    (span,) = spans_after(traced, collector)
    told = plain(span.attributes)
    assert (told["error.type"], told["gen_ai.response.finish_reasons"]) == (kind, ["error"])
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert span.status.message == ""


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_waited_for_was_aborted(traced, collector, stream):
    with traced.raw_stream(body(ENDLESS, stream=stream)):
        traced.until(lambda: traced.stat("num_running") == 1)
    traced.until(lambda: traced.stat("num_running") == 0)
    (span,) = spans_after(traced, collector)
    told = plain(span.attributes)
    assert told["gen_ai.response.finish_reasons"] == ["abort"]
    assert told["gen_ai.latency.e2e"] >= told["gen_ai.latency.time_to_first_token"]
    assert "error.type" not in told


def test_a_request_that_ends_with_the_server_is_told(start, collector):
    server = start(otlp_traces_endpoint=collector.url, shutdown_timeout_s=0.2)
    with server.raw_stream(body(ENDLESS, stream=True)):
        server.until(lambda: server.stat("num_running") == 1)
        (span,) = spans_after(server, collector)
    assert plain(span.attributes)["error.type"] == "DrainingError"


def test_the_service_has_its_name_unless_opentelemetrys_own_variables_give_it_another(start, collector, monkeypatch):
    for name, said in (("samebit", ""), ("mine", "mine")):
        monkeypatch.setenv("OTEL_SERVICE_NAME", said)
        server = start(otlp_traces_endpoint=collector.url)
        server.complete([1, 2])
        spans_after(server, collector)
        assert plain(collector.groups[-1].resource.attributes)["service.name"] == name


def dropped(server):
    return float(re.search(r"^samebit:dropped_spans_total\S* (\S+)$", server.get("/metrics")[2], re.MULTILINE)[1])


def test_without_a_collector_requests_are_answered_and_lost_spans_counted_and_told_once(start, otel, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = start(otlp_traces_endpoint=f"http://127.0.0.1:{port}/v1/traces")
    whole = server.complete([1, 2], seed=1)["choices"]
    for count in (1, 2, 3):
        server.until(lambda count=count: dropped(server) == count)
        assert server.complete([1, 2], seed=1)["choices"] == whole
    server.signal()
    assert server.wait() == 0
    warnings = [line for line in server.log.splitlines() if "span" in line or "xport" in line or "Traceback" in line]
    assert len(warnings) == 1, server.log
    assert "samebit:dropped_spans_total" in warnings[0]


def test_a_collector_that_recovers_gets_what_comes_then(start, otel, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Collector(status=400).running() as collector:
        server = start(otlp_traces_endpoint=collector.url)
        server.complete([1, 2], rid="lost")
        server.until(lambda: dropped(server) == 1)
        collector.bodies.clear()
        collector.status = 200
        server.complete([1, 2], rid="kept")
        (span,) = spans_after(server, collector)
    assert plain(span.attributes)["gen_ai.request.id"] == "kept"


@pytest.mark.parametrize("signals", [1, 2])
def test_a_collector_that_never_answers_holds_up_neither_requests_nor_the_end(start, collector, monkeypatch, signals):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    collector.gate.clear()
    server = start(otlp_traces_endpoint=collector.url, shutdown_timeout_s=0.2 if signals == 1 else 600)
    for _ in range(3):
        server.complete([1, 2])
    assert collector.asked.wait(60)
    server.signal(signal.SIGINT)
    if signals == 2:
        server.until(lambda: "serving" in server.log and not _is_listening(server))
        server.signal(signal.SIGINT)
    assert server.wait(25) == 0, "left to itself, the SDK waits for 30 s"
    assert "samebit:dropped_spans_total" in server.log


def _is_listening(server):
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex((server.host, server.port)) == 0


class Slow:
    """An exporter that takes nothing until `gate` is set."""

    def __init__(self):
        self.gate, self.spans, self.is_shut = threading.Event(), [], False

    def export(self, spans):
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.gate.wait(120)
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.is_shut = True


def slow_traces():
    """Traces to a slow exporter, that, what they dropped and said, and a function that records spans."""
    from samebit.server.otlp import OtlpTraces
    from samebit.server.traces import RequestSpan

    exporter, lost, said = Slow(), [], []
    traces = OtlpTraces("http://unused", "1", drop=lost.append, say=said.append, exporter=exporter)

    def record(count, **parent):
        for _ in range(count):
            traces.record(RequestSpan("x", 1, 2, {}, [], parent, is_error=False))

    return traces, exporter, lost, said, record


def test_what_cannot_wait_is_dropped_and_never_waited_for(otel):
    from samebit.server.otlp import MAX_WAITING_SPANS

    traces, exporter, lost, said, record = slow_traces()
    record(900, traceparent=f"00-{TRACE}-{PARENT}-00")  # nobody wants these, so they need no room
    record(MAX_WAITING_SPANS)
    assert (lost, said) == ([], [])
    record(700)
    assert sum(lost) == 700
    assert len(said) == 1
    exporter.gate.set()
    asyncio.run(traces.close(600))
    assert exporter.is_shut
    assert len(exporter.spans) == MAX_WAITING_SPANS
    assert sum(lost) == 700


def test_the_end_waits_no_longer_than_it_may(otel):
    traces, exporter, lost, _, record = slow_traces()
    record(600)
    asyncio.run(traces.close(0.01))
    assert not exporter.is_shut, "its thread still waits"
    assert sum(lost) == 600
    exporter.gate.set()


def test_without_the_extra_the_flag_is_refused_with_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "samebit.server.otlp", raising=False)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: .*pip install 'samebit\[otel\]'"):
        server_run._open_traces("http://127.0.0.1:4318/v1/traces", ServerMetrics("x"))


@pytest.mark.parametrize("url", ["", "localhost:4318", "grpc://h:1", "http://", "http://[::1/v1/traces", "/v1/traces"])
def test_an_endpoint_that_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint: must be a whole URL"):
        server_run._open_traces(url, ServerMetrics("x"))


def test_settings_that_opentelemetry_does_not_take_are_a_plain_error(otel, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "99999")
    with pytest.raises(ConfigError, match="otlp_traces_endpoint: opentelemetry does not take its settings"):
        server_run._open_traces("http://127.0.0.1:4318/v1/traces", ServerMetrics("x"))


@pytest.mark.parametrize(
    ("flags", "variable", "taken"),
    [([], None, None), ([], "http://v", "http://v"), (["--otlp-traces-endpoint", "http://f"], "http://v", "http://f")],
)
def test_the_flag_goes_before_opentelemetrys_variable(monkeypatch, flags, variable, taken):
    given = []
    monkeypatch.setattr(server_run, "serve", lambda _, options: given.append(options) or 0)
    env = {} if variable is None else {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": variable}
    done = CliRunner().invoke(app, ["serve", "nano", *flags], env=env)
    assert done.exit_code == 0, done.output
    assert [options.otlp_traces_endpoint for options in given] == [taken]
