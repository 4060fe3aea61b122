"""A server whose tokens are guessed ahead: the same answers, and counts of guesses where dashboards and clients look."""

import re

import pytest

from tests.server.driver import COMMAND, events_of, running

PROMPT = "import os\nimport sys\nimport re\n\nimport os\nimport sys\n"
ASK = {"temperature": 0, "max_tokens": 24, "logprobs": 1, "return_spec_tokens_details": True}


@pytest.fixture(scope="module")
def guessing(tmp_path_factory):
    flags = ["--num-threads", "1", "--port", "0", "--cache-bytes", "200000000"]
    sglang = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"]
    log = tmp_path_factory.mktemp("speculation") / "log"
    with running([COMMAND, "serve", "nano", *flags, *sglang, "--metrics-compat", "vllm"], log) as server:
        yield server.wait_ready()


def figures(body):
    return body["metrics"]["speculative_decoding"]


def test_an_answer_tells_on_request_how_guesses_fared_under_the_names_of_vllm(guessing):
    whole = guessing.complete(PROMPT, **ASK)
    found = figures(whole)
    accepted, guessed, steps = (
        found[name] for name in ("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_steps")
    )
    assert 0 < accepted < whole["usage"]["completion_tokens"] == 24
    assert accepted < guessed
    assert found["num_spec_tokens"] == 4
    histogram = found["acceptance_histogram"]
    assert len(histogram) == 5
    assert sum(histogram) == steps
    assert sum(k * count for k, count in enumerate(histogram)) == accepted
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert found["draft_acceptance_rate"] == pytest.approx(accepted / guessed)
    body = {"prompt": PROMPT, **ASK, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(guessing.post("/v1/completions", body)[2])
    assert figures(events[-1]) == found
    pieces = [event["choices"][0] for event in events[:-1]]
    assert "".join(piece["text"] for piece in pieces) == whole["choices"][0]["text"]


def test_a_request_can_go_without_guesses_and_has_the_same_answer(guessing):
    without = guessing.complete(PROMPT, **ASK, speculation=False)
    assert figures(without)["num_draft_tokens"] == figures(without)["num_spec_steps"] == 0
    guessed = guessing.complete(PROMPT, **ASK)
    assert figures(guessed)["num_draft_tokens"] > 0
    assert without["choices"] == guessed["choices"]


def test_metrics_have_the_names_that_dashboards_know(guessing):
    guessing.complete(PROMPT, **ASK)
    guessing.until(lambda: guessing.stat("num_drafts"))
    text = guessing.get("/metrics")[2]

    def value(name, labels=""):
        first = 'engine="0",' if name.startswith("vllm") else ""
        return float(re.search(rf'^{name}{{{first}model_name="nano"{labels}}} (\S+)$', text, re.MULTILINE)[1])

    for prefix in ("samebit", "vllm"):
        rows = value(f"{prefix}:spec_decode_num_drafts_total")
        accepted = value(f"{prefix}:spec_decode_num_accepted_tokens_total")
        guessed = value(f"{prefix}:spec_decode_num_draft_tokens_total")
        by_position = [
            value(f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total", f',position="{n}"') for n in range(4)
        ]
        assert 0 < accepted < guessed <= 4 * rows
        assert sum(by_position) == accepted
    assert value("samebit:spec_accept_length") == pytest.approx(1 + accepted / rows)
    assert value("samebit:spec_accept_rate") == pytest.approx(accepted / guessed)
