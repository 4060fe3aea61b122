"""What clients get wrong, and what they get for it. The server goes on as if nothing had happened."""

import json
import socket
import struct
import threading

import openai
import pytest

import samebit.server.openapi  # noqa: F401 - names all bodies
from samebit.server.body import Body
from samebit.server.efforts import EFFORTS

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAY = [{"role": "user", "content": "hi"}]
GOOD = {"prompt": "import os\n", "seed": 1, "max_tokens": 8, "logprobs": 1}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]
PART = {"type": "text", "text": "hi"}
DEEP = b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

WRONG = [
    # path, body, param
    (TEXT, b"", None),
    (TEXT, b"{", None),
    (TEXT, b'{"prompt": "a",}', None),
    (TEXT, b'{"prompt": "\xff\xfe"}', None),
    (TEXT, b'{"prompt": "\\ud800"}', None),
    (TEXT, b"[1, 2]", None),
    (TEXT, b"null", None),
    (TEXT, DEEP, None),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', "temperature"),
    (TEXT, b'{"prompt": "a", "top_p": Infinity}', "top_p"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [1, 4096]}, "prompt"),
    (TEXT, {"prompt": [2**70]}, "prompt"),
    (TEXT, {"prompt": [1.5]}, "prompt"),
    (
        CHAT,
        {"messages": SAY, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (CHAT, {"messages": SAY, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": SAY, "response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 2**80}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 5.5}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": True}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 100_000}, "max_tokens"),
    (TEXT, {"prompt": [1] * 8192}, "prompt"),
    (TEXT, {"prompt": [1] * 8190}, "prompt"),
    (TEXT, {"max_tokens": 16, "prompt": [1] * 8190}, "max_tokens"),
    (TEXT, {"prompt": "x = 1\n" * 100_000}, "prompt"),
    (TEXT, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
    (TEXT, {"prompt": "a", "temperature": -0.1}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": [1]}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": 1e-40}, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "a", "top_p": 1.1}, "top_p"),
    (TEXT, {"prompt": "a", "top_k": -2}, "top_k"),
    (TEXT, {"prompt": "a", "min_p": 2}, "min_p"),
    (TEXT, {"prompt": "a", "n": 0}, "n"),
    (TEXT, {"prompt": "a", "n": 129}, "n"),
    (TEXT, {"prompt": ["a", "b"], "n": 2**62}, "n"),
    (TEXT, {"prompt": "a", "seed": 2**63}, "seed"),
    (TEXT, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
    (TEXT, {"prompt": "a", "stop": ""}, "stop"),
    (TEXT, {"prompt": "a", "stop": [1]}, "stop"),
    (TEXT, {"prompt": "a", "stop": ["s"] * 20_000}, "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [4096]}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    (TEXT, {"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"05": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"4096": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"9" * 4301: 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    (TEXT, {"prompt": "a", "priority": 2000}, "priority"),
    (TEXT, {"prompt": "a", "rid": ""}, "rid"),
    (TEXT, {"prompt": "a", "rid": "a", "request_id": "b"}, "rid"),
    (TEXT, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (TEXT, {"prompt": "a", "allowed_token_ids": [1]}, "allowed_token_ids"),
    (CHAT, {"messages": SAY, "structured_outputs": {"lark": "a"}}, "structured_outputs.lark"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content",
    ),
    (RESPONSES, {"input": [*SAY, {**SAY[0], "foo": 1}]}, "input.1.foo"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input.0.arguments"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
    (RESPONSES, {"input": [5]}, "input.0"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "foo": 1}]}]},
        "input.0.content.0.foo",
    ),
    (RESPONSES, {"input": "a", "store": True}, "store"),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"input": "a", "background": True}, "background"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
    (RESPONSES, {"input": "a", "include": ["file_search_call.results"]}, "include.0"),
    (RESPONSES, {"input": "a", "top_logprobs": 2}, "top_logprobs"),
    (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"input": "a", "reasoning": {"summary": "auto"}}, "reasoning.summary"),
    (RESPONSES, {"input": [{"role": "clown", "content": "a"}]}, "input"),
    (RESPONSES, {"input": "a", "max_output_tokens": 100_000}, "max_output_tokens"),
    (RESPONSES, {"input": "a", "max_output_tokens": 5, "min_tokens": 6}, "min_tokens"),
    (RESPONSES, {"input": "x = 1\n" * 100_000}, "input"),
    (RESPONSES, {"stream": True, "input": "x = 1\n" * 100_000}, "input"),
    (RESPONSES, {"input": "a", "reasoning": {"effort": [1]}}, "reasoning.effort"),
    (RESPONSES, {"input": "a", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    (CHAT, {"messages": SAY, "max_completion_tokens": 100_000}, "max_completion_tokens"),
    (CHAT, {"messages": SAY, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x = 1\n" * 100_000}]}, "messages"),
    (CHAT, {"messages": SAY, "reasoning_effort": {"a": 1}}, "reasoning_effort"),
    (CHAT, {"messages": SAY, "reasoning_effort": True}, "reasoning_effort"),
    (
        CHAT,
        {"messages": SAY, "chat_template_kwargs": {"reasoning_effort": [1]}},
        "chat_template_kwargs.reasoning_effort",
    ),
    (
        CHAT,
        {"messages": SAY, "chat_template_kwargs": {"reasoning_effort": 1}, "reasoning_effort": 0.5},
        "reasoning_effort",
    ),
    (CHAT, {"messages": SAY, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"messages": SAY, "chat_template_kwargs": {"tools": None}}, "chat_template_kwargs.tools"),
    (
        CHAT,
        {"messages": SAY, "chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs.add_generation_prompt",
    ),
    ("/tokenize", {"messages": SAY, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": SAY}, "prompt"),
    ("/tokenize", {"messages": SAY, "add_special_tokens": True}, "add_special_tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [4096]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    (TEXT, {"prompt": "a", "temprature": 0}, "temprature"),
    (TEXT, {"prompt": "a", "messages": SAY}, "messages"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (TEXT, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages.0.mood"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{**PART, "cache_control": {}}]}]},
        "messages.0.content.0.cache_control",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    (CHAT, {"messages": SAY, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": SAY, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": SAY, "logprobs": 1}, "logprobs"),
    (CHAT, {"messages": SAY, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"messages": SAY, "tools": [{}]}, "tools.0.type"),
    (CHAT, {"messages": SAY, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": SAY, "functions": [{}]}, "functions"),
    (CHAT, {"messages": SAY, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": SAY, "response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    (CHAT, {"messages": SAY, "structured_outputs": {}}, "structured_outputs"),
    (CHAT, {"messages": SAY, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": SAY, "store": True}, "store"),
    (
        CHAT,
        {"messages": SAY, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), WRONG, ids=[f"{n}-{param}" for n, (_, _, param) in enumerate(WRONG)]
)
def test_a_wrong_request_is_a_400_that_names_the_field(server, path, body, param):
    status, headers, answer = server.post(path, body)
    assert status == 400, answer
    assert headers["content-type"] == "application/json"
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 1000
    if param:
        assert param in error["message"]


def test_all_of_that_changed_nothing_for_others(server):
    before = server.complete(**GOOD)["choices"]
    for path, body, _ in WRONG[::5]:
        server.post(path, body)
    assert server.complete(**GOOD)["choices"] == before
    server.until(lambda: server.stat("num_running") == 0)


def kinds_of(kind):
    yield kind
    for narrower in kind.__subclasses__():
        yield from kinds_of(narrower)


OPTIONAL = [
    (kind, name) for kind in kinds_of(Body) for name, field in kind.model_fields.items() if not field.is_required()
]


@pytest.mark.parametrize(("kind", "name"), OPTIONAL, ids=lambda value: getattr(value, "__name__", value))
def test_a_field_that_need_not_be_sent_may_be_null(kind, name):
    kind.__pydantic_validator__.validate_assignment(kind.model_construct(), name, None)


EFFORT_FIELDS = {
    "reasoning_effort": lambda effort: (CHAT, {"messages": SAY, "reasoning_effort": effort}),
    "reasoning.effort": lambda effort: (RESPONSES, {"input": "a", "reasoning": {"effort": effort}}),
    "chat_template_kwargs.reasoning_effort": lambda effort: (
        "/tokenize",
        {"messages": SAY, "chat_template_kwargs": {"reasoning_effort": effort}},
    ),
}


@pytest.mark.parametrize("field", EFFORT_FIELDS)
@pytest.mark.parametrize("effort", ["", "banana", "High", "0.5", -1, 1.01, 1e9], ids=repr)
def test_an_effort_that_there_is_not_is_named_with_those_that_there_are(server, field, effort):
    status, _, answer = server.post(*EFFORT_FIELDS[field](effort))
    assert (status, answer["error"]["param"]) == (400, field)
    for told in (f"{field}={effort!r}", "'none'", "'max'", "from 0 to 1"):
        assert told in answer["error"]["message"]


@pytest.mark.parametrize("field", EFFORT_FIELDS)
@pytest.mark.parametrize("effort", [*EFFORTS, 0, 0.35, 1, None], ids=repr)
def test_an_effort_that_there_is_is_taken(server, field, effort):
    path, body = EFFORT_FIELDS[field](effort)
    limit = {CHAT: {"max_tokens": 1}, RESPONSES: {"max_output_tokens": 1}}.get(path, {})
    assert server.post(path, {**body, **limit})[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{**PART, "cache_control": None}], "x": None}], "x": None}),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "x": None}], "x": None}]},
        ),
    ],
    ids=["chat", "responses"],
)
def test_a_field_that_nobody_knows_may_be_null_anywhere(server, path, body):
    limit = {"max_tokens" if path == CHAT else "max_output_tokens": 1}
    status, _, answer = server.post(path, {**body, **limit})
    assert status == 200, answer


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "n": 2, "best_of": 2},
        {"user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": True, "store": False},
        {"stop": None, "seed": None, "n": None, "logprobs": None, "stream": None, "max_tokens": None},
        {"stream": False, "service_tier": "auto", "modalities": ["text"], "top_k": 2**40},
    ],
    ids=str,
)
def test_fields_that_ask_for_nothing_are_welcome(server, fields):
    body = {"messages": SAY, "max_completion_tokens": 2, **fields}
    status, _, answer = server.post(CHAT, body)
    assert status == 200, answer


def test_an_answer_can_be_sent_back_as_it_came(client):
    first = client.chat.completions.create(model="nano", messages=SAY, max_tokens=4)
    again = [*SAY, first.choices[0].message, *SAY]
    assert client.chat.completions.create(model="nano", messages=again, max_tokens=4).choices


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="a")
    assert caught.value.body["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_the_openai_client_understands_the_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="nano", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="nano", prompt=[1] * 9000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="nano", prompt="a", max_tokens=9000, stream=True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", TEXT, 405), ("PUT", CHAT, 405), ("POST", "/health", 405)],
)
def test_wrong_paths_and_methods_have_errors_of_the_same_shape(server, method, path, status):
    found, _, answer = server.request(method, path)
    assert found == status
    assert path in answer["error"]["message"]


def test_a_body_of_ten_megabytes_is_refused_before_it_is_parsed(server):
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    status, headers, answer = server.post(TEXT, body)
    assert status == 413
    assert answer["error"]["code"] == "body_too_large"
    assert headers["connection"] == "close"
    # Not even JSON, and the answer is the same.
    assert server.post(TEXT, b"x" * 10_000_000)[0] == 413


def test_a_body_that_claims_to_be_huge_is_refused_unread(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999999999999\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_large_body_below_the_limit_is_read(server):
    status, _, answer = server.post(TEXT, {"prompt": [1] * 2_000_000})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


ENDLESS = {"prompt": "import os\n", "max_tokens": 8000, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server, stream):
    body = {**ENDLESS, "stream": stream, "n": 2, "prompt": ["a", "b"]}
    with server.raw_stream(body):
        server.until(lambda: server.stat("num_running") == 4)
    # Long before the answers would have ended.
    server.until(lambda: server.stat("num_running") == 0)
    server.until(lambda: server.stat("num_waiting") == 0)


def test_a_client_that_resets_its_connection_ends_its_request(server):
    with server.raw_stream(ENDLESS) as connection:
        connection.recv(100)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.until(lambda: server.stat("num_running") == 0)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(head + b'{"prompt"')
    assert server.get("/health")[0] == 200
    assert "Exception" not in server.log


def test_a_client_that_does_not_read_holds_nobody_up(server):
    alone = server.complete(**GOOD)["choices"]
    body = {**ENDLESS, "logprobs": 20, "max_tokens": 600, "prompt": ["a", "b"]}
    with server.raw_stream(body):
        server.until(lambda: server.stat("num_running") == 2)
        assert server.complete(**GOOD)["choices"] == alone
        # The engine finishes its answer although nobody takes it.
        server.until(lambda: server.stat("num_running") == 0, limit_s=30)
        assert server.complete(**GOOD)["choices"] == alone


def test_abuse_changes_no_bit_of_an_answer_in_progress(server):
    body = {"prompt": "class Node:\n", "seed": 3, "max_tokens": 150, "logprobs": 2, "ignore_eos": True}
    alone = server.complete(**body)["choices"]
    with server.raw_stream({**body, "stream": True, "max_tokens": 8000}):
        results = []
        worker = threading.Thread(target=lambda: results.append(server.complete(**body)["choices"]))
        worker.start()
        while worker.is_alive():
            server.post(TEXT, {"prompt": "a", "stop": [f"{n}#" for n in range(4000)], "max_tokens": 2})
            server.post(TEXT, b"x" * 9_000_000)
            server.post(TEXT, {"prompt": "x" * 1_000_000})
            with server.raw_stream({**ENDLESS, "n": 3}):
                pass
        worker.join()
    assert results == [alone]
    server.until(lambda: server.stat("num_running") == 0)
