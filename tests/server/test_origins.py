"""What web pages may ask of a server on their reader's machine: those of other origins nothing, unless they are allowed."""

import pytest

from samebit.cli.serve import _listed
from samebit.core.errors import ConfigError
from samebit.server.origins import Origins
from tests.server.driver import fake_arguments, running
from tests.server.test_lifecycle import TEXT, body
from tests.server.test_operations import ADMIN_PATHS

FOREIGN = ["https://evil.example", "http://localhost:1", "null", "http://127.0.0.1.evil.example"]
FRIEND = "https://chat.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origins")
    with running(fake_arguments(None, allowed_origins=(FRIEND,)), folder / "log") as server:
        yield server.wait_ready()


def as_page(origin, **headers):
    return {"headers": {"Origin": origin, **headers}}


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_page_of_another_origin_changes_nothing(server, origin):
    server.complete([1])
    server.until(lambda: server.stat("num_running") == 0)
    flushes = server.stat("num_flushes")
    for path, fields in ({**ADMIN_PATHS, TEXT: body()}).items():
        for kind in ("application/json", "text/plain", None):
            status, _, answer = server.post(path, fields, **as_page(origin, **{"Content-Type": kind}))
            assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")
    status, headers, _ = server.request("OPTIONS", TEXT, **as_page(origin, **{"Access-Control-Request-Method": "POST"}))
    assert status == 403
    assert "access-control-allow-origin" not in headers
    headers = server.request("GET", "/v1/models", **as_page(origin))[1]
    assert "access-control-allow-origin" not in headers, "its browser keeps the answer from it"
    server.complete([1])
    server.until(lambda: server.stat("num_running") == 0)
    assert server.stat("num_flushes") == flushes


def test_a_page_of_the_server_itself_may_do_what_everyone_may(server):
    for host in (f"127.0.0.1:{server.port}", f"localhost:{server.port}"):
        for scheme in ("http", "https"):
            page = as_page(f"{scheme}://{host}", Host=host)
            assert server.post(TEXT, body(), **page)[0] == 200
            assert server.post("/flush_cache", None, **page)[0] == 200


def test_a_page_of_an_allowed_origin_sees_its_answers(server):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers, _ = server.request("OPTIONS", TEXT, **as_page(FRIEND, **asks))
    assert status == 204
    assert headers["access-control-allow-origin"] == FRIEND
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in headers["access-control-allow-methods"]
    for fields, expected in ((body(), 200), (body(stream=True), 200), ({}, 400)):
        status, headers, _ = server.post(TEXT, fields, **as_page(FRIEND))
        assert status == expected
        assert headers["access-control-allow-origin"] == FRIEND
        assert headers["vary"] == "Origin"


def test_a_browser_may_ask_before_it_sends_the_key(start):
    server = start(api_keys=("one",), allowed_origins=("*",))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert server.request("OPTIONS", TEXT, **as_page(FRIEND, **asks))[0] == 204
    assert server.post(TEXT, body(), key="one", **as_page(FRIEND))[0] == 200
    status, headers, _ = server.post(TEXT, body(), **as_page(FRIEND))
    assert (status, headers["access-control-allow-origin"]) == (401, FRIEND)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "0.0.0.0", "[", "8.8.8.8"]
)
def test_a_name_that_was_pointed_at_this_machine_is_not_answered(server, host):
    for method, path in (("GET", "/server_info"), ("POST", "/flush_cache")):
        status, _, answer = server.request(method, path, **as_page(f"http://{host}", Host=host))
        assert (status, answer["error"]["code"]) == (403, "host_not_allowed")


def test_names_are_free_where_a_key_is_needed_or_others_can_connect(start):
    for options in ({"api_keys": ("one",)}, {"host": "0.0.0.0"}, {"allowed_hosts": ("gpu.lan",)}):
        assert start(**options).request("GET", "/v1/models", key="one", headers={"Host": "gpu.lan:80"})[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None, "application/jsonx"])
def test_a_body_that_is_not_called_json_is_not_read(server, kind):
    for path in ("/update_weights_from_disk", "/abort_request", TEXT, "/v1/chat/completions", "/tokenize"):
        status, _, answer = server.post(path, body(), headers={"Content-Type": kind})
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert server.post(TEXT, body(), headers={"Content-Type": "Application/JSON; charset=utf-8"})[0] == 200


@pytest.mark.parametrize(
    "host", [None, "localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000"]
)
def test_the_loopback_has_these_names(host):
    assert Origins(hosts=()).knows(host)


@pytest.mark.parametrize("origin", ["evil.example", "https://a.example/", "https://", "https://a.example/x", ""])
def test_an_origin_that_no_browser_sends_is_a_mistake(origin):
    with pytest.raises(ConfigError, match="allowed_origins"):
        Origins(allowed=(origin,))


@pytest.mark.parametrize("text", ["https://A.example,http://b:1", ' ["https://a.example", "http://b:1"] '])
def test_origins_are_listed_with_commas_or_as_vllm_lists_them(text):
    assert _listed(text) == ("https://a.example", "http://b:1")
