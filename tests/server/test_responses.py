"""/v1/responses through the openai client, and text to tokens and back."""

import pytest

from tests.server.test_api import ASK, CODE

QUESTION = {"model": "nano", "input": ASK, "temperature": 0}


def test_a_response_is_the_chat_answer_in_another_shape(client):
    chat = client.chat.completions.create(model="nano", messages=ASK, temperature=0)
    response = client.responses.create(**QUESTION)
    assert response.output_text == chat.choices[0].message.content
    assert "4821" in response.output_text
    assert response.status == "completed"
    assert response.id.startswith("resp-")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.input_tokens_details.cached_tokens >= 0
    assert response.system_fingerprint == chat.system_fingerprint
    assert response.incomplete_details is None


def test_a_string_and_instructions_are_a_conversation(client, server):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    chat = server.post("/v1/chat/completions", {"messages": messages, "seed": 4, "max_tokens": 9})[2]
    response = client.responses.create(
        model="nano", input="hi", instructions="Be brief.", max_output_tokens=9, extra_body={"seed": 4}
    )
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.instructions == "Be brief."


def test_a_streamed_response_is_the_whole_response_in_typed_events(client):
    asked = {**QUESTION, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-1].response.output_text
    logprobs = [item.logprob for event in deltas for item in event.logprobs]
    (content,) = whole.output[0].content
    assert logprobs == [item.logprob for item in content.logprobs]
    assert all(len(item.top_logprobs) == 2 for item in content.logprobs)
    usage = events[-1].response.usage
    assert usage.output_tokens == whole.usage.output_tokens == len(logprobs) + 3, "what marks text as such has none"
    with client.responses.stream(**QUESTION) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_an_answer_that_is_cut_off_is_incomplete(client):
    response = client.responses.create(model="nano", input="hi", max_output_tokens=1)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(model="nano", input="hi", max_output_tokens=1, stream=True)
    assert last.type == "response.incomplete"


def test_an_answer_can_be_sent_back_as_input(client):
    first = client.responses.create(**QUESTION)
    said = [item.model_dump() for item in first.output]
    again = client.responses.create(
        model="nano", input=[*ASK, *said, {"role": "user", "content": "Once more."}], max_output_tokens=4
    )
    parts = [
        *ASK,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": [{"type": "input_text", "text": "Once more."}]},
    ]
    same = client.responses.create(model="nano", input=parts, max_output_tokens=4)
    assert again.usage.input_tokens == same.usage.input_tokens > first.usage.input_tokens


def test_a_stream_that_cannot_begin_is_a_status_and_not_an_event(server):
    body = {"input": "x = 1\n" * 20_000, "stream": True}
    status, _, answer = server.post("/v1/responses", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_no_answer_is_kept(server):
    made = server.post("/v1/responses", {"input": "hi", "max_output_tokens": 1})[2]
    assert made["store"] is False
    assert server.get(f"/v1/responses/{made['id']}")[0] in (404, 405)


@pytest.mark.parametrize("text", [CODE, "é = '日本'\n", "", "<|end_message|>"])
def test_text_becomes_tokens_and_tokens_become_text(server, text):
    status, _, made = server.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 8192
    bare = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})[2]["tokens"]
    assert made["tokens"][len(made["tokens"]) - len(bare) :] == bare
    assert server.post("/detokenize", {"tokens": bare})[2] == {"prompt": text}


def test_tokens_are_those_that_the_model_would_get(server):
    prompt = server.post("/tokenize", {"prompt": CODE})[2]["tokens"]
    seen = server.complete(CODE, return_token_ids=True, max_tokens=1)["choices"][0]["prompt_token_ids"]
    assert prompt == seen
    chat = server.post("/tokenize", {"messages": ASK})[2]["tokens"]
    body = {"messages": ASK, "return_token_ids": True, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body)[2]["prompt_token_ids"] == chat
    closed = server.post("/tokenize", {"messages": ASK, "add_generation_prompt": False})[2]["tokens"]
    assert chat[: len(closed)] == closed
    assert len(closed) < len(chat)
