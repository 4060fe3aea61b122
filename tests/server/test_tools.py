"""Reasoning and calls of tools, through the openai client: replies that are spelled out, and what nano says by itself."""

import json

import openai
import pytest

from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from tests.server.driver import events_of, fake_arguments, running

TOKENIZER = Tokenizer(resolve_model("nano"))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": about, "parameters": CITY}}
    for name, about in (("get_weather", "Weather of a city"), ("get_time", "Local time of a city"))
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
THOUGHT = "[[content_thinking]]I must look it up.[[end_message]][[message_model]]"
SAID = "[[content_text]]One moment, é 日本 🙂.[[end_message]][[message_model]]"
CALL = '[[content_invoke_tool_json]]{"name":"get_weather","args":{"city":"Oslo"}}[[end_message]]'
SECOND = 'get_time[[content_invoke_tool_json]]{"name":"get_time","args":{"city":"日本"}}[[end_message]]'
END = "[[content_model_end_sampling]]"
ALL = f"{THOUGHT}{SAID}get_weather{CALL}[[message_model]]{SECOND}{END}"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    log = tmp_path_factory.mktemp("scripted") / "log"
    with running(fake_arguments(engine_class="tests.server.scripted:ScriptedEngine"), log) as server:
        yield server.wait_ready()
        assert "Traceback" not in server.log, server.log


@pytest.fixture
def actor(scripted):
    with openai.OpenAI(base_url=scripted.base_url, api_key="x", max_retries=0, timeout=60) as client:
        yield client


def asked(reply, **fields):
    return {"model": "nano", "messages": [{"role": "user", "content": reply}], "tools": TOOLS, "seed": 0, **fields}


def gathered(chunks):
    """A streamed message put together as clients do, and the reason for its end."""
    message, reason = {"content": None, "reasoning_content": "", "reasoning": "", "tool_calls": []}, None
    for chunk in chunks:
        for choice in chunk.choices:
            assert reason is None, "nothing follows the reason"
            delta, reason = choice.delta.to_dict(), choice.finish_reason
            for name in ("content", "reasoning_content", "reasoning"):
                if delta.get(name) is not None:
                    message[name] = (message[name] or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    assert call["function"]["arguments"] == "", "the name comes first"
                    message["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def test_a_message_has_reasoning_content_and_calls(actor):
    answer = actor.chat.completions.create(**asked(ALL))
    message = answer.choices[0].message
    assert message.content == "One moment, é 日本 🙂."
    assert message.reasoning_content == message.reasoning == "I must look it up."
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_time", {"city": "日本"}),
    ]
    assert answer.choices[0].finish_reason == "tool_calls"
    ids = [call.id for call in message.tool_calls]
    assert len({*ids}) == 2
    assert all(i.startswith("call_") and len(i) <= 40 for i in ids)
    thought = TOKENIZER.encode("I must look it up.", allow_special=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize(
    "reply", [ALL, f"{SAID}get_weather{CALL}{END}", f"{THOUGHT}{SAID}", f"{CALL[:-25]}", f"{CALL}{END}", THOUGHT]
)
def test_a_streamed_message_is_the_whole_one_however_many_tokens_a_step_has(actor, reply, seed):
    whole = actor.chat.completions.create(**asked(reply, seed=seed)).choices[0]
    message, reason = gathered(actor.chat.completions.create(**asked(reply, seed=seed), stream=True))
    assert reason == whole.finish_reason
    assert message["content"] == whole.message.content
    assert message["reasoning_content"] == message["reasoning"] == getattr(whole.message, "reasoning", "")
    calls = [call.function.to_dict() for call in whole.message.tool_calls or ()]
    assert [call["function"] for call in message["tool_calls"]] == calls


def test_the_clients_own_accumulation_agrees(actor):
    with actor.chat.completions.stream(**asked(ALL)) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "get_time"]
    assert json.loads(message.tool_calls[1].function.arguments) == {"city": "日本"}


def test_content_is_null_only_where_there_are_calls_alone(actor):
    assert actor.chat.completions.create(**asked(f"{CALL}{END}")).choices[0].message.content is None
    silent = actor.chat.completions.create(**asked(f"{THOUGHT}")).choices[0].message
    assert (silent.content, silent.tool_calls) == ("", None)


def test_one_call_is_all_that_is_wanted_without_parallel_calls(actor):
    for seed in range(7):
        fields = asked(ALL, seed=seed, parallel_tool_calls=False, extra_body={"return_token_ids": True})
        answer = actor.chat.completions.create(**fields)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        assert answer.choices[0].finish_reason == "tool_calls"
        assert TOKENIZER.decode(answer.choices[0].token_ids, skip_special_tokens=False).endswith('"}}<|end_message|>')
        assert answer.usage.completion_tokens == len(answer.choices[0].token_ids)


def test_without_a_choice_no_token_can_begin_a_call(actor):
    message = (
        actor.chat.completions.create(**asked(f"{THOUGHT}get_weather{CALL}{END}", tool_choice="none"))
        .choices[0]
        .message
    )
    assert message.tool_calls is None
    assert message.content.startswith("get_weather{")


def test_an_unknown_tool_is_passed_on(actor):
    reply = f'[[content_invoke_tool_json]]{{"name":"fly","args":{{}}}}[[end_message]]{END}'
    (call,) = actor.chat.completions.create(**asked(reply)).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("fly", "{}")


def test_a_call_that_is_cut_off_says_so(actor):
    choice = actor.chat.completions.create(**asked(ALL, max_tokens=48)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "get_weather"


def test_thinking_can_be_part_of_the_content(actor):
    fields = asked(ALL, seed=2, extra_body={"separate_reasoning": False})
    message = actor.chat.completions.create(**fields).choices[0].message
    assert message.content == "I must look it up.One moment, é 日本 🙂."
    assert not hasattr(message, "reasoning")
    streamed, _ = gathered(actor.chat.completions.create(**fields, stream=True))
    assert (streamed["content"], streamed["reasoning"]) == (message.content, "")


def test_thinking_can_come_at_once(actor):
    def thoughts(**extra):
        chunks = actor.chat.completions.create(**asked(ALL, extra_body=extra), stream=True)
        deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks]
        return [delta["reasoning"] for delta in deltas if "reasoning" in delta]

    assert thoughts(stream_reasoning=False) == ["I must look it up."]
    assert len(thoughts()) > 3
    assert "".join(thoughts()) == "I must look it up."


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reply", [ALL, f"Bob[[message_model]]{SAID}"])
def test_logprobs_are_those_of_the_content(actor, reply, seed):
    fields = asked(reply, seed=seed, logprobs=True, top_logprobs=1)
    choice = actor.chat.completions.create(**fields).choices[0]
    spelled = b"".join(bytes(item.bytes) for item in choice.logprobs.content).decode()
    assert spelled == choice.message.content
    chunks = [chunk.choices[0] for chunk in actor.chat.completions.create(**fields, stream=True)]
    told = [item for chunk in chunks if chunk.logprobs for item in chunk.logprobs.content]
    assert told == choice.logprobs.content


def test_control_tokens_are_shown_to_those_who_ask_for_them(actor):
    fields = asked(ALL, extra_body={"skip_special_tokens": False, "include_stop_str_in_output": True})
    del fields["tools"]
    content = actor.chat.completions.create(**fields).choices[0].message.content
    assert content == ALL.replace("[[", "<|").replace("]]", "|>")


def test_a_response_has_items_of_all_kinds(actor):
    response = actor.responses.create(model="nano", input=ALL, tools=FLAT)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, call, _ = response.output
    assert thought.content[0].text == "I must look it up."
    assert said.content[0].text == response.output_text == "One moment, é 日本 🙂."
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Oslo"}, "completed")
    assert response.status == "completed"
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert [tool.name for tool in response.tools] == ["get_weather", "get_time"]
    assert len({item.id for item in response.output}) == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_streamed_response_is_the_whole_one_in_typed_events(actor, seed):
    fields = {"model": "nano", "input": ALL, "tools": FLAT, "extra_body": {"seed": seed}}
    events = list(actor.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind in dict.fromkeys(kinds) if not kind.endswith("delta")] == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done",
        "output_item.done", "output_text.done", "function_call_arguments.done", "completed",
    ]  # fmt: skip
    texts = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    final = events[-1].response.output
    assert [*texts.values()] == [
        item.arguments if item.type == "function_call" else item.content[0].text for item in final
    ]
    assert [event.item for event in events if event.type == "response.output_item.done"] == final
    with actor.responses.stream(**fields) as stream:
        parsed = stream.get_final_response().output
    assert [item.type for item in parsed] == [item.type for item in final]


def test_the_items_of_a_turn_are_sent_back_as_one_message(scripted, actor):
    first = actor.responses.create(model="nano", input=ALL, tools=FLAT)
    items = [{"role": "user", "content": ALL}, *(item.model_dump() for item in first.output)]
    results = [
        {"type": "function_call_output", "call_id": first.output[2 + n].call_id, "output": "x"} for n in range(2)
    ]
    again = actor.responses.create(
        model="nano", input=[*items, *results, {"role": "user", "content": "hi"}], tools=FLAT
    )
    chat = actor.chat.completions.create(**asked(ALL)).choices[0].message
    messages = [
        {"role": "user", "content": ALL},
        chat,
        *({"role": "tool", "tool_call_id": call.id, "content": "x"} for call in chat.tool_calls),
        {"role": "user", "content": "hi"},
    ]
    same = actor.chat.completions.create(model="nano", messages=messages, tools=TOOLS)
    assert again.usage.input_tokens == same.usage.prompt_tokens
    named = [{**tool, "name": ""} for tool in results]
    assert scripted.post(RESPONSES, {"input": [*items, *named]})[0] == 400


def test_what_a_client_made_of_an_answer_is_passed_over(scripted, actor):
    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    message = actor.chat.completions.parse(**asked(ALL) | {"tools": tools}).choices[0].message
    said = message.model_dump() | {"parsed": {"a": [1]}}
    assert said["tool_calls"][0]["function"]["parsed_arguments"] == {"city": "Oslo"}
    plain = {name: said[name] for name in ("role", "content", "reasoning_content")}
    calls = [{**call, "function": call["function"] | {"parsed_arguments": None}} for call in said["tool_calls"]]
    kinds = (message.to_dict(), said, {**plain, "tool_calls": calls})
    first, *others = [scripted.post("/tokenize", {"messages": [sent]})[2]["tokens"] for sent in kinds]
    assert others == [first, first]


def test_an_answer_that_is_sent_back_is_what_the_model_has_seen(scripted):
    """By its token ids, and by its text where the model writes as the template does."""
    body = asked(ALL, return_token_ids=True)
    first = scripted.post(CHAT, body)[2]
    message = first["choices"][0]["message"]
    said = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    next_one = {"role": "user", "content": "hi"}
    for sent in (message, {name: value for name, value in message.items() if name != "token_ids"}):
        prompt = scripted.post(CHAT, {**body, "messages": [*body["messages"], sent, next_one]})[2]["prompt_token_ids"]
        assert prompt[: len(said)] == said


def ask_nano(server, messages, **fields):
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 40, "return_token_ids": True}
    status, _, answer = server.post(CHAT, body | fields)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("start", ["", "<|content_thinking|>Let me see.<|end_message|><|message_model|>"])
def test_the_next_turn_takes_the_whole_reply_from_the_cache(server, start):
    """Also a reply with thinking and a call, which nano goes on with."""
    call = f'{start}get_weather<|content_invoke_tool_json|>{{"name": "get_weather", "args": {{"city":'
    begun = {"role": "assistant", "token_ids": TOKENIZER.encode(call, allow_special=True)}
    question = [{"role": "user", "content": f"How is the weather in Oslo? {start[:9]}"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    first = ask_nano(server, [*question, begun], **fields, min_tokens=20)
    reply = begun["token_ids"] + first["choices"][0]["token_ids"]
    calls = first["choices"][0]["message"]["tool_calls"]
    assert calls[0]["function"]["name"] == "get_weather"
    sent = {"role": "assistant", "token_ids": reply, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "sunny"}
    ask_nano(server, [{"role": "user", "content": "x"}], max_tokens=1)  # what has ended is published with the next step
    second = ask_nano(server, [*question, sent, result])
    said = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(said)] == said
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(said) - 1) // 16 * 16
    told = TOKENIZER.decode(second["prompt_token_ids"], skip_special_tokens=False)
    assert told.endswith("<|message_tool|>get_weather<|content_text|>sunny<|end_message|><|message_model|>")


def test_tools_stay_in_the_prompt_of_a_turn_without_them(server):
    question = [{"role": "user", "content": "How is the weather in Oslo?"}]
    chosen, free = (ask_nano(server, question, tool_choice=choice) for choice in ("none", "auto"))
    assert chosen["prompt_token_ids"] == free["prompt_token_ids"]
    assert TOKENIZER.id_of("<|content_invoke_tool_json|>") not in chosen["choices"][0]["token_ids"]
    assert "tool_calls" not in chosen["choices"][0]["message"]


QUESTION = [{"role": "user", "content": "Tell me about Oslo."}]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("streams", [False, True])
def test_a_required_call_is_made_and_is_valid(client, seed, streams):
    fields = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 400}
    fields |= {"model": "nano", "temperature": 1.5, "parallel_tool_calls": seed % 2 == 0}
    if streams:
        message, reason = gathered(client.chat.completions.create(**fields, stream=True))
        calls = [call["function"] for call in message["tool_calls"]]
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        calls, reason = [call.function.to_dict() for call in choice.message.tool_calls], choice.finish_reason
        assert choice.message.content is None
    assert len(calls) == 1 or (calls and seed % 2 == 0)
    for call in calls:
        assert call["name"] in ("get_weather", "get_time")
        if reason == "tool_calls" or call is not calls[-1]:
            assert isinstance(json.loads(call["arguments"])["city"], str)


@pytest.mark.parametrize("name", ["get_weather", "get_time"])
def test_a_named_tool_is_called_once(client, name):
    chosen = {"type": "function", "function": {"name": name}}
    fields = {"model": "nano", "tools": TOOLS, "tool_choice": chosen, "temperature": 0, "max_tokens": 200}
    choice = client.chat.completions.create(messages=QUESTION, **fields).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == name
    assert choice.finish_reason == "tool_calls"
    response = client.responses.create(
        model="nano",
        input="Tell me about Oslo.",
        tools=FLAT,
        tool_choice={"type": "function", "name": name},
        temperature=0,
    )
    (item,) = response.output
    assert (item.type, item.name, json.loads(item.arguments)) == (
        "function_call",
        name,
        json.loads(call.function.arguments),
    )


def test_a_conversation_with_calls_goes_on(client):
    """As an agent has it: a call, its result, an answer, and another call."""
    messages = list(QUESTION)
    for turn in range(2):
        fields = {"model": "nano", "tools": TOOLS, "temperature": 0, "extra_body": {"return_token_ids": True}}
        asked_for = client.chat.completions.create(messages=messages, tool_choice="required", **fields).choices[0]
        messages.append(asked_for.message)
        ids = [call.id for call in asked_for.message.tool_calls]
        messages += [{"role": "tool", "tool_call_id": call_id, "content": "sunny"} for call_id in ids]
        said = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=60, **fields).choices[0]
        assert said.message.tool_calls is None
        assert said.message.content
        messages += [said.message, {"role": "user", "content": f"And now? {turn}"}]


def test_tokenize_counts_tools(scripted):
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    counted = scripted.post("/tokenize", body)[2]["tokens"]
    assert counted == scripted.post(CHAT, {**body, "return_token_ids": True})[2]["prompt_token_ids"]


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


HI = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [tool(), {"type": "web_search"}]}, "tools.1.type"),
        (CHAT, {"tools": [tool(), tool("a b")]}, "tools.1.function.name"),
        (CHAT, {"tools": [tool("x" * 65)]}, "tools.0.function.name"),
        (CHAT, {"tools": [tool(), tool()]}, "tools"),
        (CHAT, {"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        (CHAT, {"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters"),
        (CHAT, {"tools": [tool(parameters={"properties": {"a": 1}})]}, "tools.0.function.parameters"),
        (CHAT, {"tools": [tool(parameters={"required": [1]})]}, "tools.0.function.parameters"),
        (CHAT, {"tools": [tool(f"f{n}") for n in range(129)]}, "tools"),
        (CHAT, {"tools": [tool()], "tool_choice": NAMED}, "tool_choice"),
        (CHAT, {"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        (CHAT, {"tools": [tool()], "skip_special_tokens": False}, "tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.1.tool_calls.0.function"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "token_ids": [4096]}]}, "messages.1.token_ids"),
        (CHAT, {"messages": [*HI, {"role": "user", "content": "a", "token_ids": [1]}]}, "messages.1.token_ids"),
        (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        (RESPONSES, {"tools": [{"type": "function", "name": "a"}] * 2}, "tools"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    ],
    ids=lambda value: str(value)[-50:],
)  # fmt: skip
def test_wrong_tools_are_named(scripted, path, fields, param):
    body = {"input": "hi"} if path == RESPONSES else {"messages": HI}
    status, _, answer = scripted.post(path, body | fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert param.split(".")[0] in answer["error"]["message"]


def test_an_event_of_a_stream_has_one_kind_of_delta(scripted):
    events = events_of(scripted.post(CHAT, asked(ALL, stream=True, seed=6))[2])
    for event in events:
        for choice in event["choices"]:
            assert len({"content", "reasoning", "tool_calls"} & choice["delta"].keys()) <= 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_kind_of_tool_that_there_is_not_is_named_with_the_kind_that_there_is(scripted, path):
    body = {"input": "hi"} if path == RESPONSES else {"messages": HI}
    status, _, answer = scripted.post(path, body | {"tools": [{"type": "web_search"}]})
    assert (status, answer["error"]["param"]) == (400, "tools.0.type")
    assert answer["error"]["message"] == "tools.0.type: 'web_search' is not supported; only 'function' is"
