"""The black-box audit against a fake server: each broken promise is found, nothing that holds is blamed, gaps are told."""

import json
import shlex
import subprocess

import pytest

from samebit.audit.battery import PROMISES
from samebit.audit.black_box import audit_server
from samebit.audit.http import Limits
from samebit.core.errors import ConfigError
from tests.audit.fake_server import FakeServer, serving

FAST = Limits(rate=10_000)


def audit(fake, limits=FAST, names=None, **fields):
    promises = [promise for promise in PROMISES if names is None or promise.name in names]
    with serving(fake) as url:
        return audit_server(url, limits=limits, promises=promises, **fields)


def verdicts(report):
    return {check.name: check.verdict for check in report.checks}


def test_a_server_that_keeps_its_promises_passes_all_checks():
    report = audit(FakeServer())
    assert set(verdicts(report).values()) == {"holds"}
    assert len(report.checks) == 9
    assert (report.status, report.system_fingerprint, report.model) == (0, "fp_fake", "fake")
    assert all(report.abilities.values())
    assert all(check.comparisons > 0 for check in report.checks)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("repeat", "repeat"),
        ("batch", "batch"),
        ("warm", "warm prefix"),
        ("warm", "conversation"),
        ("warm", "shared prefix"),
        ("echo", "rescore"),
        ("abort", "abort"),
        ("stream", "streaming"),
        ("seed", "seed"),
    ],
)
@pytest.mark.parametrize("lacks", [(), ("completions",), ("logprobs", "token_ids", "usage")], ids=["", "chat", "text"])
def test_a_broken_promise_is_found_with_requests_that_show_it(fault, check, lacks):
    report = audit(FakeServer({fault}, lacks), names=[check])
    (found,) = report.checks
    if check == "rescore" and lacks:
        assert (found.verdict, report.status) == ("not checkable", 2)
        return
    assert (found.verdict, report.status) == ("broken", 1)
    assert found.reproduce
    for line in found.reproduce:
        assert line == "wait" or line.startswith("curl -sS http://127.0.0.1:")


def test_only_the_promise_that_is_broken_is_blamed():
    report = audit(FakeServer({"stream"}))
    assert [name for name, verdict in verdicts(report).items() if verdict != "holds"] == ["streaming"]


def test_the_reproducing_requests_are_small():
    (found,) = audit(FakeServer({"batch"}), names=["batch"]).checks
    assert found.detail.startswith("token 2: logprob of ")
    bodies = [json.loads(shlex.split(line.removesuffix(" &"))[-1]) for line in found.reproduce if line != "wait"]
    # One warms the prefix, one is the answer alone, and then it has one neighbour.
    assert len(bodies) == 4
    assert [body["max_tokens"] for body in bodies if body["prompt"] == bodies[0]["prompt"]] == [3, 3, 3]
    assert len(bodies[0]["prompt"]) < 60


def test_the_printed_lines_show_the_difference_again():
    fake = FakeServer({"repeat"})
    with serving(fake) as url:
        promises = [promise for promise in PROMISES if promise.name == "repeat"]
        (found,) = audit_server(url, limits=FAST, promises=promises).checks
        answers = {
            subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout
            for line in found.reproduce
        }
    assert len(found.reproduce) == 3
    assert len(answers) > 1


@pytest.mark.parametrize(
    "lacks", ["logprobs", "seed", "streaming", "echo", "token_ids", "cache_salt", "ignore_eos", "usage"]
)
def test_a_server_that_lacks_something_is_audited_for_the_rest(lacks):
    report = audit(FakeServer(lacks={lacks}))
    unchecked = {
        "logprobs": {"rescore"},
        "seed": {"seed"},
        "streaming": {"abort", "streaming"},
        "echo": {"rescore"},
    }.get(lacks, set())
    assert {name for name, verdict in verdicts(report).items() if verdict == "not checkable"} == unchecked
    assert {name for name, verdict in verdicts(report).items() if verdict == "broken"} == set()
    assert report.status == 0
    assert report.abilities["cached_tokens" if lacks == "usage" else lacks] is False


def test_a_cache_that_was_never_hit_proves_nothing():
    class Forgetful(FakeServer):
        def body(self, kind, body, ids, tokens, is_warm):
            return super().body(kind, body, ids, tokens, is_warm=False)

    report = audit(Forgetful(), names=["warm prefix", "repeat"])
    assert verdicts(report) == {"repeat": "holds", "warm prefix": "not checkable"}


def test_no_more_requests_are_sent_than_allowed():
    fake = FakeServer()
    report = audit(fake, Limits(max_requests=30, rate=10_000))
    assert len(fake.bodies) <= 30
    assert report.num_requests == 30
    assert verdicts(report)["seed"] == "not checkable"
    assert "30 requests" in report.checks[-1].detail


def test_requests_keep_their_distance():
    fake = FakeServer()
    audit(fake, Limits(rate=100), names=["repeat"])
    times = sorted(fake.times)
    assert times[-1] - times[0] > 0.9 * (len(times) - 1) / 100


def test_a_busy_server_is_asked_again(monkeypatch):
    monkeypatch.setattr("samebit.audit.http._WAITS_S", (0.01, 0.01))
    assert audit(FakeServer(busy=2), names=["repeat"]).status == 0


def test_the_key_is_sent_and_not_shown():
    report = audit(FakeServer({"repeat"}, key="sesame"), names=["repeat"], api_key="sesame")
    (found,) = report.checks
    assert all('-H "Authorization: Bearer $API_KEY"' in line for line in found.reproduce)
    assert "sesame" not in str(report)


def test_a_server_that_wants_a_key_is_asked_once():
    fake = FakeServer(key="sesame")
    with pytest.raises(ConfigError, match=r"401.*needs a key: give it by --api-key"):
        audit(fake)
    assert len(fake.bodies) == 1
    with pytest.raises(ConfigError, match=r"401.*does not take this key \(--api-key\)"):
        audit(fake, api_key="guessed")


def test_a_salt_makes_later_turns_cold_where_there_is_one():
    for lacks, num_salts in (((), 3), (("cache_salt",), 0)):
        fake = FakeServer(lacks=lacks)
        audit(fake, names=["shared prefix"])
        salts = [body["cache_salt"] for body in fake.bodies[10:] if "cache_salt" in body]
        assert len(salts) == len(set(salts)) == 2 * num_salts


@pytest.mark.parametrize(
    ("fake", "fields"),
    [
        (FakeServer(lacks={"completions", "chat"}), {}),
        (FakeServer(lacks={"completions", "chat"}), {"model": "other"}),
    ],
)
def test_a_server_that_answers_nothing_cannot_be_audited(fake, fields):
    with pytest.raises(ConfigError):
        audit(fake, **fields)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "127.0.0.1:8000", "ftp://x/v1"])
def test_an_address_where_nobody_listens_is_named(url):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1|ftp"):
        audit_server(url)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of transformers and torch, which are the subject and not ours
def test_a_server_that_batches_a_dense_library_is_found_out():
    from benchmarks.reference import load_reference
    from samebit.engine.model_source import resolve_model
    from samebit.engine.tokenizer import Tokenizer
    from tests.audit.batching_server import BatchingServer, serving_batches

    folder = resolve_model("nano")
    server = BatchingServer(load_reference(folder), Tokenizer(folder), vocab_size=4096)
    promises = [promise for promise in PROMISES if promise.name in ("repeat", "batch")]
    with serving_batches(server) as url:
        report = audit_server(url, limits=FAST, promises=promises)
    assert server.largest_batch > 1
    assert verdicts(report) == {"repeat": "holds", "batch": "broken"}
    assert report.checks[1].reproduce
