"""The HTTP API with the bundled model, through the openai client where it can ask."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from samebit import LLM, SamplingParams
from tests.server.driver import events_of

CODE = "def add(a, b):\n    return"
ASK = [
    {"role": "user", "content": "The access code of the amber lighthouse is 4821."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is the access code of the amber lighthouse?"},
]


def test_the_model_answers_in_chat(client):
    answer = client.chat.completions.create(model="nano", messages=ASK, temperature=0)
    choice = answer.choices[0]
    assert "4821" in choice.message.content
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint.startswith("fp_")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_a_streamed_chat_is_the_whole_chat_in_pieces(client):
    common = {"model": "nano", "messages": ASK, "seed": 5, "n": 2, "max_completion_tokens": 12}
    common |= {"temperature": 3.0, "top_p": 1.0}
    whole = client.chat.completions.create(**common)
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        pieces = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert pieces[0].delta.role == "assistant"
        assert "".join(p.delta.content or "" for p in pieces) == choice.message.content
        reasons = [p.finish_reason for p in pieces]
        assert reasons[-1] == choice.finish_reason
        assert set(reasons[:-1]) == {None}
    assert whole.choices[0].message.content != whole.choices[1].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].seed == whole.seed == 5


# The long prompt takes more than one step, and so do its logprobs.
@pytest.mark.parametrize("prompt", [CODE, "x = [1, 2]\n" * 120])
def test_a_streamed_completion_is_the_whole_completion_in_pieces(client, prompt):
    common = {"model": "nano", "prompt": prompt, "seed": 3, "logprobs": 2, "echo": True}
    whole = client.completions.create(**common).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**common, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for piece in pieces for item in getattr(piece.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)
    assert pieces[-1].finish_reason == whole.finish_reason == "length"


def test_legacy_logprobs_line_up_with_the_text(client):
    choice = client.completions.create(
        model="nano", prompt="é = '日本'\n", seed=1, logprobs=3, echo=True, max_tokens=20
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice.text.startswith(token, offset)
    for token, chosen, tops in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[
        1:
    ]:
        assert 3 <= len(tops) <= 4
        assert tops[token] == chosen
        assert chosen <= 0


@pytest.mark.parametrize("count", [0, 1])
def test_the_chosen_token_is_always_among_the_logprobs(client, count):
    logprobs = (
        client.completions.create(model="nano", prompt=CODE, temperature=2.0, seed=9, logprobs=count)
        .choices[0]
        .logprobs
    )
    for token, chosen, tops in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert tops[token] == chosen
        assert len(tops) <= count + 1


def test_scoring_a_prompt_gives_the_logprobs_that_generating_it_gave(client, server):
    made = server.complete(CODE, seed=4, max_tokens=10, logprobs=1, return_token_ids=True)
    choice = made["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    scored = server.complete(ids, echo=True, logprobs=1, max_tokens=0)
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["text"] == CODE + choice["text"]
    found = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert len(found) == len(ids)
    assert found[-10:] == choice["logprobs"]["token_logprobs"]


def test_chat_logprobs_spell_the_answer(client):
    choice = client.chat.completions.create(model="nano", messages=ASK, seed=2, logprobs=True, top_logprobs=2).choices[
        0
    ]
    content = choice.logprobs.content
    spelled = b"".join(bytes(item.bytes) for item in content if not item.token.startswith("<|"))
    assert spelled.decode() == choice.message.content
    assert all(len(item.top_logprobs) == 2 for item in content)
    assert all(item.logprob <= item.top_logprobs[0].logprob for item in content)


def test_a_list_of_prompts_gives_what_each_gives_alone(server):
    prompts = [CODE, "import os\n", "class Node:\n"]
    together = server.complete(prompts, seed=8, n=2)["choices"]
    alone = [server.complete(prompt, seed=8, n=2)["choices"] for prompt in prompts]
    assert [c["index"] for c in together] == list(range(6))
    assert [c["text"] for c in together] == [c["text"] for part in alone for c in part]


def test_token_ids_are_the_same_prompt_as_their_text(server):
    first = server.complete(CODE, seed=1, return_token_ids=True)
    ids = first["choices"][0]["prompt_token_ids"]
    assert server.complete(ids, seed=1)["choices"][0]["text"] == first["choices"][0]["text"]
    two = server.complete([ids, ids], seed=1)["choices"]
    assert [choice["text"] for choice in two] == [first["choices"][0]["text"]] * 2
    assert first["usage"]["prompt_tokens"] == len(ids)


def test_the_seed_that_comes_back_repeats_the_answer(server):
    first, second = (server.complete(CODE, temperature=1.5, max_tokens=20) for _ in range(2))
    assert first["seed"] != second["seed"]
    again = server.complete(CODE, temperature=1.5, max_tokens=20, seed=first["seed"])
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert abs(first["seed"]) < 2**53, "a double holds it"


def test_the_server_says_what_the_offline_engine_says(server):
    llm = LLM("nano", num_threads=1, cache_bytes=100_000_000)
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=11, logprobs=2)
    offline = llm.generate([CODE], params)[0].outputs[0]
    online = server.complete(
        CODE, max_tokens=24, temperature=0.8, seed=11, logprobs=2, top_p=1.0, return_token_ids=True
    )["choices"][0]
    assert online["token_ids"] == offline.token_ids
    assert online["text"] == offline.text
    chosen = [entry[token].logprob for entry, token in zip(offline.logprobs, offline.token_ids, strict=True)]
    assert online["logprobs"]["token_logprobs"] == chosen
    chat = llm.chat([ASK], SamplingParams(max_tokens=12, seed=1))[0].outputs[0].text
    body = {"messages": ASK, "max_tokens": 12, "seed": 1, "temperature": 1, "top_p": 1}
    assert server.post("/v1/chat/completions", body)[2]["choices"][0]["message"]["content"] == chat


def test_answers_do_not_depend_on_what_else_runs(server):
    bodies = [{"prompt": CODE + "\n" * n, "seed": n, "max_tokens": 8 + n, "logprobs": 1} for n in range(8)]

    def ask(body):
        return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in server.complete(**body)["choices"]]

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, bodies)) == alone


def test_a_repeated_prompt_is_taken_from_the_cache_and_says_so(server):
    prompt = "# a file about nothing in particular\n" + "value = 1\n" * 40
    first = server.complete(prompt, seed=1)
    second = server.complete(prompt, seed=1)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]
    assert second["choices"] == first["choices"]
    salted = server.complete(prompt, seed=1, cache_salt="tenant")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["choices"] == first["choices"]


def test_a_stop_string_ends_the_answer_and_is_named(server):
    whole = server.complete(CODE, temperature=0, max_tokens=30)["choices"][0]["text"]
    stop = whole[6:9]
    choice = server.complete(CODE, temperature=0, max_tokens=30, stop=[stop, "\0"])["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_thousands_of_stop_strings_are_fine(server):
    plain = server.complete(CODE, seed=6)["choices"]
    stops = [f"never {n}" for n in range(5000)]
    assert server.complete(CODE, seed=6, stop=stops)["choices"] == plain


def test_the_last_message_can_be_continued(server):
    messages = [*ASK, {"role": "assistant", "content": "The access code of the amber"}]
    body = {"messages": messages, "temperature": 0, "continue_final_message": True}
    status, _, answer = server.post("/v1/chat/completions", body)
    assert status == 200
    assert "4821" in answer["choices"][0]["message"]["content"]
    assert not answer["choices"][0]["message"]["content"].startswith("The")


def test_text_parts_are_text_and_markers_in_text_are_characters(server):
    def num_tokens(content):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        status, _, answer = server.post("/v1/chat/completions", body)
        assert status == 200, answer
        return answer["usage"]["prompt_tokens"]

    assert num_tokens([{"type": "text", "text": "hello"}]) == num_tokens("hello")
    assert num_tokens("<|end_message|>") > num_tokens("") + 1, "a control token would be one"


def test_reasoning_effort_reaches_the_template(server):
    def num_tokens(**fields):
        body = {"messages": ASK, "max_tokens": 1, **fields}
        return server.post("/v1/chat/completions", body)[2]["usage"]["prompt_tokens"]

    assert num_tokens(reasoning_effort="low") > num_tokens()
    by_kwargs = num_tokens(chat_template_kwargs={"reasoning_effort": "low"})
    assert num_tokens(reasoning_effort="low") == by_kwargs
    assert num_tokens(reasoning_effort=0) == num_tokens(reasoning_effort="none"), "a whole number has no decimal point"


def test_prompt_logprobs_come_in_the_shape_of_vllm(server):
    body = server.complete(CODE, prompt_logprobs=1, max_tokens=1, return_token_ids=True)
    choice = body["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    for token_id, entry in zip(choice["prompt_token_ids"][1:], choice["prompt_logprobs"][1:], strict=True):
        assert 1 <= len(entry) <= 2
        assert entry[str(token_id)]["rank"] >= 1
    chat = server.post("/v1/chat/completions", {"messages": ASK, "prompt_logprobs": 0, "max_tokens": 1})[2]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_usage_can_come_with_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": CODE, "stream": True, "max_tokens": 5, "stream_options": options}
    events = events_of(server.post("/v1/completions", body)[2])
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_only_the_engine_process_loads_torch(server):
    def maps(pid):
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in maps(server.engine_pid())
    assert "libtorch" not in maps(server.process.pid)


def test_the_operators_routes_answer(client, server):
    models = client.models.list().data
    assert [(model.id, model.max_model_len) for model in models] == [("nano", 8192)]
    assert client.models.retrieve("nano").id == "nano"
    assert server.get("/health")[::2] == (200, {"status": "ok"})
    assert server.get("/ready")[::2] == (200, {"status": "ok"})
    assert server.get("/version")[2]["version"]
    info = server.get("/server_info")[2]
    assert info["engine"]["profile"]["device"] == "cpu"
    assert info["config"]["num_threads"] == 1
    status, headers, text = server.get("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert "samebit:num_running_reqs" in text


def test_the_openapi_document_declares_the_errors(server):
    document = server.get("/openapi.json")[2]
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "404", "413", "500", "503"} <= set(operation["responses"])
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    assert "messages" in schemas[reference.rsplit("/", 1)[1]]["properties"]
    assert "error" in schemas["ErrorBody"]["properties"]


def test_progress_through_a_long_prompt_is_told_to_those_who_ask(server):
    prompt = [*range(10, 210)] * 8
    body = {"prompt": prompt, "max_tokens": 2, "stream": True, "seed": 1, "cache_salt": "progress"}
    events = events_of(server.post("/v1/completions", {**body, "return_progress": True})[2])
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [item["processed"] for item in told] == [512, 1024, 1536]
    assert {(item["total"], item["cache"], item["index"]) for item in told} == {(1600, 0, 0)}
    assert all(event["choices"] == [] for event in events if "prompt_progress" in event)
    assert "seed" in events[0]
    plain = events_of(server.post("/v1/completions", body)[2])
    assert not any("prompt_progress" in event for event in plain)

    def said(stream):
        """The text and its end; how many tokens an event has depends on who is faster."""
        choices = [choice for event in stream for choice in event["choices"]]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    assert said(plain) == said(events)


def test_the_reason_of_a_miss_is_told_to_those_who_ask(server):
    text = "Tell me of the harbour at night. " * 8
    fields = {"max_tokens": 1, "cache_salt": "reasons", "return_cached_tokens_details": True}

    def reasons(messages, **more):
        usage = server.post("/v1/chat/completions", {"messages": messages, **fields, **more})[2]["usage"]
        return str(usage["prompt_tokens_details"])

    messages = [{"role": "user", "content": text}]
    assert "'salt'" in reasons(messages, reasoning_effort="low")
    assert "'effort_changed'" in reasons(messages, reasoning_effort="high")
    assert "miss_reason': None" in reasons(messages, reasoning_effort="high")
