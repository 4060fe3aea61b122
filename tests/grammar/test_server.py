"""Structured output over HTTP: every field that asks for it, on the bundled model, and what is refused."""

import json

import pytest
from pydantic import BaseModel

from tests.server.driver import COMMAND, events_of, running

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Make up a person as JSON."}]
NAMED = {"name": "person", "schema": SCHEMA, "strict": True}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"additionalProperties": False}}},
]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    flags = ["--num-threads", "1", "--port", "0", "--cache-bytes", "200000000"]
    guesses = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"]
    log = tmp_path_factory.mktemp("structured") / "log"
    with running([COMMAND, "serve", "nano", *flags, *guesses], log) as server:
        yield server.wait_ready()


def chat(served, **fields):
    status, _, found = served.post(CHAT, {"messages": ASK, "max_tokens": 200, "seed": 3, **fields})
    assert status == 200, found
    return found["choices"][0]


def is_person(text):
    value = json.loads(text)
    return value.keys() == {"name", "age"} and len(value["name"]) <= 12 and 0 <= value["age"] <= 99


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
@pytest.mark.parametrize("effort", ["none", "high"])
def test_the_content_of_a_chat_answer_satisfies_a_schema_whether_it_thinks_or_not(served, fields, effort):
    choice = chat(served, reasoning_effort=effort, **fields)
    assert choice["finish_reason"] == "stop"
    assert is_person(choice["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"json_object": True}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"regex": r"\d{3}"}}, lambda text: text.isdecimal() and len(text) == 3),
        ({"structured_outputs": {"choice": ["left", "right"]}}, lambda text: text in ("left", "right")),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, lambda text: text == "ab"),
        ({"regex": "x|y"}, lambda text: text in "xy"),
        ({"ebnf": 'root ::= "up" | "down"'}, lambda text: text in ("up", "down")),
        ({"response_format": {"type": "text"}}, bool),
    ],
)
def test_each_field_holds_chats_and_completions_to_what_it_says(served, fields, is_right):
    assert is_right(chat(served, **fields)["message"]["content"])
    status, _, found = served.post(COMPLETIONS, {"prompt": "It is ", "max_tokens": 60, "seed": 3, **fields})
    assert status == 200, found
    choice = found["choices"][0]
    assert choice["finish_reason"] == "length" or is_right(choice["text"])


def test_a_responses_answer_satisfies_a_schema_and_says_which(served):
    wanted = {"type": "json_schema", **NAMED}
    status, _, found = served.post(RESPONSES, {"input": "Make up a person.", "seed": 3, "text": {"format": wanted}})
    assert status == 200, found
    body = found
    assert body["text"]["format"] == wanted
    message = next(item for item in body["output"] if item["type"] == "message")
    assert is_person(message["content"][0]["text"])


class Person(BaseModel):
    name: str
    age: int


def test_openais_client_parses_what_a_model_of_pydantic_asks_for(served):
    import openai

    with openai.OpenAI(base_url=served.base_url, api_key="x", max_retries=0, timeout=60) as client:
        found = client.chat.completions.parse(
            model="nano", messages=ASK, response_format=Person, seed=5, max_tokens=400
        )
    assert isinstance(found.choices[0].message.parsed, Person)


def test_samples_of_a_request_are_all_held_to_it_and_differ(served):
    fields = {"messages": ASK, "n": 4, "seed": 3, "temperature": 1.5, "structured_outputs": {"json": SCHEMA}}
    choices = served.post(CHAT, fields)[2]["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert all(map(is_person, texts))
    assert len(set(texts)) > 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_must_be_made_is_made_with_the_right_arguments(served, choice, parallel):
    for seed in range(3):
        answer = chat(served, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel, seed=seed, temperature=1.5)
        calls = answer["message"]["tool_calls"]
        assert answer["finish_reason"] == "tool_calls"
        assert len(calls) == 1 or parallel
        for call in calls:
            if call["function"]["name"] == "find":
                assert is_person(call["function"]["arguments"])
            else:
                assert choice == "required"
                assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_where_a_text_is_held_to_a_schema_tools_may_be_called_instead(served):
    for seed in range(4):
        format_ = {"type": "json_schema", "json_schema": NAMED}
        message = chat(served, tools=TOOLS, response_format=format_, seed=seed, temperature=1.5)["message"]
        assert message.get("tool_calls") or is_person(message["content"])


@pytest.mark.parametrize(
    ("path", "fields", "param", "reason"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}}, "response_format", "type must be"),
        (CHAT, {"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        (COMPLETIONS, {"regex": "(?=a)"}, "regex", "look-around"),
        (COMPLETIONS, {"ebnf": "root ::= nobody"}, "ebnf", "nobody"),
        (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs", "choice has 0"),
        (CHAT, {"response_format": {"type": "json_object"}, "ebnf": 'root ::= "a"'}, "ebnf", "cannot be had together"),
        (CHAT, {"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex", "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "x"}}}}}], "tool_choice": "required"}, "tools", "parameters of tool 'bad'"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/no"}}}}, "text.format", "does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_a_400_that_names_the_field_and_the_reason(served, path, fields, param, reason):
    asked = {CHAT: {"messages": ASK}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}[path]
    status, _, found = served.post(path, {**asked, **fields})
    error = found["error"]
    assert (status, error["param"]) == (400, param)
    assert reason in error["message"]


def test_streams_add_up_to_the_same_answer_and_metrics_tell_of_compilations(served):
    fields = {"response_format": {"type": "json_schema", "json_schema": NAMED}, "seed": 11}
    whole = chat(served, **fields)["message"]["content"]
    status, _, found = served.post(CHAT, {"messages": ASK, "stream": True, "max_tokens": 200, **fields})
    assert status == 200
    events = events_of(found)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
    served.until(lambda: served.stat("num_grammar_masks"))
    text = served.get("/metrics")[2]
    assert 'samebit:grammar_compilation_time_seconds_count{model_name="nano"}' in text
    assert 'samebit:grammar_masks_total{model_name="nano"}' in text


def schema_text(depth):
    return '{"items":' * depth + "{}" + "}" * depth


LONG_CHAIN = "\n".join(["start: a0", *(f"a{number}: a{number + 1}" for number in range(9000)), 'a9000: "x"'])
MANY_REFERENCES = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(5000)} | {"a5000": {}},
}
FAR = {"minimum": 10**40}
MANY_SETS = "".join(f"[^{chr(0x100 + 7 * number)}{chr(0x900 + 5 * number)}]{{1,60}}" for number in range(400))


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"ebnf": LONG_CHAIN}, "ebnf", "9002 rules and opening brackets: at most 1000"),
        ({"structured_outputs": {"json": MANY_REFERENCES}}, "structured_outputs", "5001 different references: at most 500"),
        ({"tools": [{"type": "function", "function": {"name": "far", "strict": True, "parameters": FAR}}]}, "tools", "64 bits"),
        ({"structured_outputs": {"json": FAR}}, "structured_outputs", "64 bits"),
        ({"structured_outputs": {"json": schema_text(100)}}, "structured_outputs", "at most 100 levels"),
        ({"structured_outputs": {"json": schema_text(20000)}}, "structured_outputs", "at most 100 levels"),
        ({"structured_outputs": {"json": json.loads(schema_text(300))}}, None, "at most 200 levels"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * (1 << 20)]}}}}, "response_format", "at most 262144"),
        ({"structured_outputs": {"json": {"properties": {f"p{number}": {} for number in range(6000)}}}}, "structured_outputs", "limit for this grammar"),
        ({"regex": MANY_SETS}, "regex", "limit for this grammar: 50000"),
        ({"ebnf": "start[lazy]: /.*/"}, "ebnf", "assertion failed: !state.has_lowest_match()"),
    ],
)  # fmt: skip
def test_what_is_beyond_a_limit_is_a_400_that_names_it_and_the_engine_stays(served, fields, param, reason):
    engine = served.engine_pid()
    status, _, found = served.post(CHAT, {"messages": ASK, "max_tokens": 100, "seed": 1, **fields})
    error = found["error"]
    assert (status, error["param"]) == (400, param), error
    assert reason in error["message"]
    assert "<backtrace>" not in error["message"]
    assert chat(served, max_tokens=2)["finish_reason"] == "length"
    assert served.engine_pid() == engine


def test_a_schema_as_deep_as_is_allowed_is_compiled_and_followed(served):
    """500 references in a row, each ten levels down: more than the stack of an ordinary thread holds."""
    wrapped = {"$ref": "#/$defs/a%d"}
    for _ in range(10):
        wrapped = {"allOf": [wrapped]}
    text = json.dumps(wrapped)
    defs = {f"a{number}": json.loads(text % (number + 1)) for number in range(490)} | {"a490": {"type": "string"}}
    engine = served.engine_pid()
    answer = chat(served, structured_outputs={"json": {"$ref": "#/$defs/a0", "$defs": defs}}, max_tokens=200)
    assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["message"]["content"]), str)
    assert served.engine_pid() == engine
