"""The page as files and JSON: what it may do, who may see what, and that its numbers are those of /metrics."""

import re
from pathlib import Path
from typing import get_args

import pytest

import samebit.server.routes_ui
from samebit.core.request import MissReason
from samebit.server.app import create_app
from samebit.server.routes_ui import page_files
from samebit.server.service import Service
from tests.server.fakes import ENDLESS, KILL

FOLDER = Path(samebit.server.routes_ui.__file__).parent / "ui"
SCRIPTS = sorted(FOLDER.glob("*.js"))
PROMPT = "The same request gets the same answer, whoever asks beside it and whatever is cached."


def look(server, subject, key=None, **fields):
    status, _, body = server.post(f"/ui/api/{subject}", fields, key=key)
    assert status == 200, body
    return body


def tokens_of(cache, tenant=None):
    return sum(span["num_tokens"] for span in cache["spans"] if tenant in (None, span["tenant"]))


def test_no_file_is_longer_than_400_lines_or_wider_than_160_columns():
    for path in FOLDER.iterdir():
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path.name
        assert max(map(len, lines)) <= 160 or path.suffix == ".svg", path.name


def test_every_file_that_the_page_names_is_served_and_no_other():
    named = set()
    for path in FOLDER.iterdir():
        text = path.read_text()
        named |= set(re.findall(r'(?:src|href)="(ui/[^"]+)"', text)) if path.suffix == ".html" else set()
        named |= {f"ui/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert {f"/{name}" for name in named} | {"/"} == set(page_files())


def test_the_page_asks_for_nothing_that_is_not_served():
    asked = {path for script in SCRIPTS for path in re.findall(r'(?:Json|events)\("([^"]+)"', script.read_text())}
    paths = create_app(Service(None, None, None, None, None, started=0, max_body_bytes=1)).openapi()["paths"]
    assert len(asked) > 4
    assert {f"/{path}" for path in asked} - set(paths) == set()


def test_the_page_has_a_sentence_for_every_reason_of_a_miss():
    sentences = (FOLDER / "cache.js").read_text().partition("const MISSES = {\n")[2].partition("};")[0]
    assert sorted(re.findall(r"^  (\w+): ", sentences, re.MULTILINE)) == sorted(get_args(MissReason))


def test_the_page_makes_no_markup_from_text_and_names_no_other_host():
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text), (
            path.name
        )
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), path.name
        assert not re.search(r"<script>|<style|\sstyle=|\son[a-z]+=\"", text), path.name


def test_every_script_is_a_value_of_its_own_page_only(server):
    for path in page_files():
        status, headers, _ = server.get(path)
        assert status == 200
        rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
        assert rules.pop("default-src") == rules["frame-ancestors"] == rules["form-action"] == "'none'"
        assert {rules[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert headers["x-content-type-options"] == "nosniff"
        assert server.request("HEAD", path)[0] == 200


def test_the_page_can_be_switched_off(start):
    server = start(has_page=False)
    for path in ("/", "/ui/app.js", "/ui/api/dashboard"):
        assert server.get(path)[0] == 404, path


def test_dashboard_numbers_are_those_of_the_metrics(server):
    server.complete(PROMPT, max_tokens=8)
    server.until(lambda: server.stat("num_running") == 0)
    seen = server.get("/ui/api/dashboard")[2]
    text = server.get("/metrics")[2]
    plain = {
        name: float(value) for name, value in re.findall(r'^(\S+)\{model_name="nano"\} (\S+)$', text, re.MULTILINE)
    }
    shown = {**seen["metrics"]}
    for name, histogram in seen["histograms"].items():
        shown |= {f"{name}_count": histogram["count"], f"{name}_sum": histogram["sum"]}
    plain = {name: value for name, value in plain.items() if not name.endswith("_created")}
    # Since the last moment of work only the rate may have changed.
    for numbers in (plain, shown):
        numbers.pop("samebit:gen_throughput")
    assert shown == plain
    labelled = re.findall(r'^(\S+)\{model_name="nano",(?!le)\w+="(\w+)"\} (\S+)$', text, re.MULTILINE)
    labelled += re.findall(r'^(\S+)\{(?!le)\w+="(\w+)",model_name="nano"\} (\S+)$', text, re.MULTILINE)
    wanted = {(name, label): float(value) for name, label, value in labelled if not name.endswith("_created")}
    assert wanted
    assert {(name, label): value for name, of in seen["labelled"].items() for label, value in of.items()} == wanted


def test_the_tree_grows_with_what_is_asked_and_tells_where_it_attached(server):
    assert server.post("/flush_cache", {})[0] == 200
    ids = list(range(100, 180))
    first = server.complete(ids, max_tokens=4, temperature=0, return_token_ids=True)
    # An answer is published in the step after its last.
    server.until(lambda: tokens_of(look(server, "cache")) == 80)
    before = look(server, "cache", name=first["id"])
    assert before["attachment"] == {"num_attached": 0, "num_matched": 0, "num_possible": 64, "miss_reason": "cold"}
    answer = first["choices"][0]["token_ids"]
    second = server.complete([*ids, *answer, *range(200, 240)], max_tokens=4, temperature=0)
    server.until(lambda: tokens_of(look(server, "cache")) > 80)
    after = look(server, "cache", name=second["id"])
    assert after["attachment"]["num_attached"] == 80
    assert after["attachment"]["miss_reason"] is None
    span = after["spans"][after["attached_span"]]
    assert span["start"] + span["num_tokens"] == 80
    assert span["checkpoint"]["num_hits"] == 1
    assert span["num_hits"] == 1
    assert sum(span["checkpoint"]["window_pages"].values()) > 0


def test_where_a_prompt_attached_and_why_no_deeper_is_told_as_its_answer_tells_it(server):
    assert server.post("/flush_cache", {})[0] == 200
    ids = list(range(300, 380))
    server.complete(ids, max_tokens=1)
    found = {}
    for name, prompt in {
        "same": ids,
        "on": [*ids, *range(64)],
        "fork": [*ids[:40], *range(64)],
        "other": [*range(500, 580)],
        "scored": ids,
        "short": ids[:9],
    }.items():
        fields = {"prompt_logprobs": 1} if name == "scored" else {}
        answer = server.complete(prompt, max_tokens=1, return_cached_tokens_details=True, **fields)
        attachment = look(server, "cache", name=answer["id"])["attachment"]
        found[name] = tuple(attachment.values())
        (details,) = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
        assert details == {"cached_tokens": attachment["num_attached"], "miss_reason": attachment["miss_reason"]}
        (request,) = look(server, "requests", name=answer["id"])["requests"]
        assert request["attachment"] == attachment
    # Attached, matched and possible tokens. One is always left to compute; where a prompt leaves the path there is no checkpoint yet.
    assert found == {
        "same": (64, 64, 64, None),
        "on": (80, 80, 128, None),
        "fork": (0, 32, 96, "no_checkpoint"),
        "other": (0, 0, 64, "cold"),
        "scored": (0, 0, 0, "prompt_logprobs"),
        "short": (0, 0, 0, "shorter_than_page"),
    }


def test_steps_add_up_to_the_request(server):
    answer = server.complete([*range(600, 700)], max_tokens=20, temperature=0, ignore_eos=True, return_token_ids=True)
    (request,) = look(server, "requests", name=answer["id"])["requests"]
    assert request["num_prompt_tokens"] == 100
    assert request["finish_reason"] == "length"
    assert request["num_drawn_tokens"] >= 20
    prefill = [step for step in request["steps"] if step["kind"] == "prefill"]
    assert prefill[0]["first"] == request["num_cached_tokens"]
    assert sum(step["num_tokens"] for step in prefill) == 100 - request["num_cached_tokens"]
    ends = [step["end_s"] for step in request["steps"]]
    starts = [step["start_s"] for step in request["steps"]]
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    (found,) = [one for one in look(server, "requests")["requests"] if one["label"] == request["label"]]
    drawing = [step for step in found["steps"] if step["kind"] in ("decode", "verify")]
    assert len(drawing) == 1
    assert drawing[0]["num_steps"] == sum(step["kind"] in ("decode", "verify") for step in request["steps"])
    assert found["num_drawn_tokens"] == request["num_drawn_tokens"]


def test_guesses_in_the_steps_are_those_of_the_answer(server):
    fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_spec_tokens_details": True}
    answer = server.complete(PROMPT, **fields)
    (request,) = look(server, "requests", name=answer["id"])["requests"]
    told = answer["metrics"]["speculative_decoding"]
    verified = [step for step in request["steps"] if step["num_drafts"]]
    assert len(verified) == told["num_spec_steps"] > 0
    assert sum(step["num_drafts"] for step in verified) == told["num_draft_tokens"]
    assert sum(step["num_accepted"] for step in verified) >= told["num_accepted_draft_tokens"]


def test_a_trace_has_an_event_for_each_step_that_chrome_understands(server):
    answer = server.complete(PROMPT, max_tokens=6)
    (request,) = look(server, "requests", name=answer["id"])["requests"]
    trace = look(server, "trace", name=answer["id"])
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    assert [event["cat"] for event in events].count("step") == len(request["steps"])
    assert {event["ph"] for event in events} == {"X"}
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in events)
    whole = events[0]
    assert all(whole["ts"] <= e["ts"] and e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1e6 for e in events)


def test_without_its_key_the_page_loads_and_shows_nothing(start):
    server = start(api_keys=("sesame",), admin_api_key="open")
    for path in page_files():
        assert server.get(path)[0] == 200
    assert server.get("/ui/api/dashboard")[0] == 401
    for subject in ("cache", "requests", "trace"):
        assert server.post(f"/ui/api/{subject}", {})[0] == 401
    assert server.request("GET", "/ui/api/dashboard", key="sesame")[2]["is_admin"] is False
    assert server.request("GET", "/ui/api/dashboard", key="open")[2]["is_admin"] is True


def test_a_page_of_another_origin_cannot_look(start):
    server = start()
    headers = {"Origin": "https://elsewhere.example"}
    assert server.request("POST", "/ui/api/cache", {}, headers=headers)[0] == 403
    assert "Access-Control-Allow-Origin" not in server.request("GET", "/ui/api/dashboard", headers=headers)[1]


def test_a_look_that_fails_is_an_error_of_its_own(start):
    server = start()
    status, _, body = server.post("/ui/api/requests", {"name": "broken"})
    assert (status, body["error"]["code"]) == (500, "engine_error")
    assert server.complete([1, 2], max_tokens=2)["usage"]["completion_tokens"] == 2
    assert server.post("/ui/api/requests", {})[0] == 200


@pytest.mark.parametrize("body", [{"nam": "x"}, {"name": 3}, []])
def test_a_wrong_question_is_refused(start, body):
    assert start().post("/ui/api/cache", body)[0] == 400


def test_a_look_is_answered_while_requests_run(start):
    server = start()
    with server.raw_stream({"prompt": [ENDLESS], "stream": True, "max_tokens": 4000}) as _:
        server.until(lambda: server.stat("num_running") == 1)
        assert look(server, "requests")["num_hidden"] == 1


def test_a_dead_engine_shows_nothing_and_says_so(start):
    server = start(max_engine_restarts=3)
    server.post("/v1/completions", {"prompt": [KILL]})
    status, _, body = server.post("/ui/api/cache", {})
    # The engine may be back by now.
    assert status == 200 or body["error"]["code"] == "engine_dead"
    server.until(lambda: server.post("/ui/api/requests", {})[0] == 200)
    assert server.get("/ui/api/dashboard")[2]["state"] == "ok"
