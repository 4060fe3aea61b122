"""Fields that change how samples are drawn or told, through the API: n, bias, penalties, details on request."""

from tests.server.driver import events_of
from tests.server.test_api import ASK, CODE


def ids_of(body):
    return [choice["token_ids"] for choice in body["choices"]]


def test_samples_differ_and_each_is_what_it_is_alone(server):
    asked = {"seed": 5, "temperature": 1.5, "max_tokens": 16, "return_token_ids": True}
    four = server.complete(CODE, n=4, **asked)
    assert len({tuple(ids) for ids in ids_of(four)}) == 4
    assert ids_of(server.complete(CODE, n=2, **asked)) == ids_of(four)[:2]
    usage = four["usage"]
    assert usage["completion_tokens"] == sum(map(len, ids_of(four)))
    assert usage["prompt_tokens"] == server.complete(CODE, **asked)["usage"]["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_samples_of_several_prompts_have_their_usage_added_up(server):
    prompts = [CODE, "import os\n"]
    alone = [server.complete(prompt, n=2, seed=1)["usage"] for prompt in prompts]
    together = server.complete(prompts, n=2, seed=1)["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together[name] == sum(usage[name] for usage in alone)


def test_a_bias_decides_on_both_endpoints_and_in_the_client(client, server):
    wanted = server.post("/tokenize", {"prompt": "yes", "add_special_tokens": False})[2]["tokens"][0]
    asked = {"logit_bias": {str(wanted): 100}, "max_tokens": 3, "seed": 1}
    assert ids_of(server.complete(CODE, **asked, return_token_ids=True)) == [[wanted] * 3]
    chat = client.chat.completions.create(model="nano", messages=ASK, **asked, logprobs=True, top_logprobs=1)
    told = chat.choices[0].logprobs.content
    assert len({item.token for item in told}) == 1
    assert all(item.logprob <= item.top_logprobs[0].logprob for item in told)


def test_penalties_keep_an_answer_from_repeating_itself(server):
    asked = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    (plain,) = ids_of(server.complete("value = 1\n" * 8, **asked))
    for rule in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 1.5}):
        (ruled,) = ids_of(server.complete("value = 1\n" * 8, **asked, **rule))
        assert len(set(ruled)) > len(set(plain)), rule


def test_a_stream_under_penalties_is_the_whole_answer(server):
    asked = {"prompt": CODE, "seed": 2, "max_tokens": 20, "frequency_penalty": 1, "logit_bias": {"40": 2}}
    whole = server.complete(**asked)["choices"][0]["text"]
    events = events_of(server.post("/v1/completions", {**asked, "stream": True})[2])
    assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_why_nothing_was_cached_is_told_on_request(server):
    prompt = "# nothing that was ever asked before\n" + "other = 2\n" * 40
    asked = {"seed": 1, "max_tokens": 1, "return_cached_tokens_details": True}
    details = [server.complete(prompt, **asked)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details[0]["cached_tokens_details"] == [{"cached_tokens": 0, "miss_reason": "cold"}]
    assert details[1]["cached_tokens_details"] == [{"cached_tokens": details[1]["cached_tokens"], "miss_reason": None}]
    assert details[1]["cached_tokens"] > 0
    three = server.complete(prompt, n=3, **asked)["usage"]["prompt_tokens_details"]
    assert three == details[1], "a prompt counts once, however many samples are drawn"
    two = server.complete([prompt, "a"], **asked)["usage"]["prompt_tokens_details"]
    assert [item["miss_reason"] is None for item in two["cached_tokens_details"]] == [True, False]
    assert "cached_tokens_details" not in server.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]


def test_who_guesses_nothing_has_no_figures(server):
    made = server.complete(CODE, max_tokens=1, return_spec_tokens_details=True)
    assert made["metrics"] == {"speculative_decoding": None}
    assert "metrics" not in server.complete(CODE, max_tokens=1)


def test_a_priority_changes_no_answer(server):
    plain = server.complete(CODE, seed=3)["choices"]
    assert server.complete(CODE, seed=3, priority=7)["choices"] == plain
    assert server.complete(CODE, seed=3, priority=-7)["choices"] == plain


def test_a_client_can_name_its_answers_even_twice_and_end_them_by_that_name(server):
    body = {"prompt": CODE, "max_tokens": 4000, "ignore_eos": True, "stream": True, "seed": 1}
    with server.raw_stream({**body, "rid": "mine"}) as one, server.raw_stream({**body, "request_id": "mine"}) as two:
        assert b'"id":"mine"' in one.recv(4096) + one.recv(4096)
        assert b'"id":"mine"' in two.recv(4096) + two.recv(4096)
        assert server.post("/abort_request", {"rid": "mine"})[2] == {"num_aborted": 2}
        assert server.post("/abort_request", {"rid": "mine"})[2] == {"num_aborted": 0}
    server.until(lambda: server.stat("num_running") == 0)


def test_a_prompt_can_be_cut_to_its_last_tokens(server):
    asked = {"seed": 1, "max_tokens": 4, "return_token_ids": True}
    whole = server.complete(CODE * 3, **asked)["choices"][0]["prompt_token_ids"]
    cut = server.complete(CODE * 3, **asked, truncate_prompt_tokens=5)["choices"][0]
    assert cut["prompt_token_ids"] == whole[-5:]
    assert cut["token_ids"] == server.complete(whole[-5:], **asked)["choices"][0]["token_ids"]
