"""The black-box audit of our own server: every promise is checkable, and holds."""

from samebit.audit.battery import PROMISES
from samebit.audit.black_box import audit_server
from samebit.audit.http import Limits
from tests.server.driver import COMMAND, fake_arguments, running


def test_our_server_keeps_every_promise(tmp_path):
    flags = ["--num-threads", "1", "--port", "0", "--cache-bytes", "200000000"]
    with running([COMMAND, "serve", "nano", *flags], tmp_path / "log") as server:
        url = server.wait_ready().base_url
        promises = [promise._replace(num_rounds=1) for promise in PROMISES]
        report = audit_server(url, limits=Limits(rate=1000), promises=promises)
    assert {check.name: check.verdict for check in report.checks} == {name.name: "holds" for name in PROMISES}
    assert all(report.abilities.values())
    assert report.system_fingerprint.startswith("fp_")
    assert report.status == 0


def test_our_server_with_an_inexact_kernel_is_found_out(tmp_path):
    arguments = fake_arguments({"cache_bytes": 200_000_000}, engine_class="tests.audit.inexact_engine:InexactEngine")
    with running(arguments, tmp_path / "log") as server:
        url = server.wait_ready().base_url
        promises = [promise for promise in PROMISES if promise.name in ("repeat", "batch")]
        report = audit_server(url, limits=Limits(rate=1000), promises=promises)
    assert {check.name: check.verdict for check in report.checks} == {"repeat": "holds", "batch": "broken"}
    assert "curl" in report.checks[1].reproduce[0]
    assert report.status == 1
