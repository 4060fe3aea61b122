"""Replies whose token ids are sent back: the next prompt begins with what the model has seen and said."""

import pytest

from samebit.core.errors import InvalidRequestError
from samebit.engine.chat_template import ChatTemplate, load_chat_template
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(resolve_model("nano"))
NANO = load_chat_template(resolve_model("nano"), TOKENIZER)
END, END_OF_TURN = (TOKENIZER.id_of(f"<|{name}|>") for name in ("end_message", "content_model_end_sampling"))
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
ASK = [{"role": "user", "content": "<|end_message|> W?"}]
BYE = [{"role": "user", "content": "Thanks"}]
# Without a marker for an opened turn: the model begins its own.
UNOPENED = "{% for m in messages %}<|message_{{ m.role }}|><|content_text|>{{ m.content }}<|end_message|>{% endfor %}"


def tokens(text):
    return TOKENIZER.encode(text, allow_special=True)


def spelled(text):
    """Tokens of `text`, character by character: never what the tokenizer would make of it."""
    return [i for character in text for i in TOKENIZER.encode(character, allow_special=False)]


REPLY = [
    *tokens("<|content_thinking|>"),
    *spelled("I look it up."),
    *tokens("<|end_message|><|message_model|>get_weather<|content_invoke_tool_json|>"),
    *spelled('{"name": "get_weather", "args": {"city": "Oslo"}}'),
    END,
    END_OF_TURN,
]


def said(ids, **fields):
    return {"role": "assistant", "content": None, "tool_calls": [CALL], "token_ids": ids, **fields}


def test_the_next_prompt_begins_with_the_last_one_and_its_reply():
    first = NANO.render(ASK, tools=TOOLS)
    result = {"role": "tool", "tool_call_id": "c1", "content": "cold"}
    second = NANO.render([*ASK, said(REPLY), result], tools=TOOLS)
    assert second == [
        *first,
        *REPLY,
        *tokens("<|message_tool|>get_weather<|content_text|>cold<|end_message|><|message_model|>"),
    ]
    answer = [*tokens("<|content_text|>"), *spelled("Cold."), END, END_OF_TURN]
    third = NANO.render([*ASK, said(REPLY), result, said(answer), *BYE], tools=TOOLS)
    assert third[: len(second)] == second
    assert third[len(second) :][: len(answer)] == answer


def test_a_reply_of_the_templates_own_tokens_changes_nothing():
    plain = NANO.render([*ASK, {"role": "assistant", "content": "Hello"}, *BYE])
    ids = tokens("<|content_text|>Hello<|end_message|><|content_model_end_sampling|>")
    assert NANO.render([*ASK, said(ids), *BYE]) == plain


@pytest.mark.parametrize("cut", range(1, len(REPLY)))
def test_a_reply_that_was_cut_off_is_ended(cut):
    first = NANO.render(ASK)
    second = NANO.render([*ASK, said(REPLY[:cut]), *BYE], add_generation_prompt=False)
    lacking = [END_OF_TURN] if REPLY[cut - 1] == END else [END, END_OF_TURN]
    assert second == [*first, *REPLY[:cut], *lacking, *tokens("<|message_user|><|content_text|>Thanks<|end_message|>")]


def test_a_reply_that_was_cut_off_can_go_on():
    for history in (ASK, [*ASK, said(REPLY), *BYE]):
        messages = [*history, said(REPLY[:9])]
        ids = NANO.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert ids == [*NANO.render(history), *REPLY[:9]]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_other_formats_keep_replies_too(role):
    chatml = (
        "{% for m in messages %}<|unused_0|>{{ m.role }}\n{{ m.content | trim }}<|unused_1|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|unused_0|>assistant\n{% endif %}"
    )
    template = ChatTemplate(chatml, TOKENIZER)
    ids = [*spelled("Hello"), TOKENIZER.id_of("<|unused_1|>")]
    after = template.render([*ASK, said(ids), {"role": role, "content": "x"}], add_generation_prompt=False)
    expected = f"\n<|unused_0|>{role}\nx<|unused_1|>\n"
    assert after == [*template.render(ASK), *ids, *tokens(expected)]


def test_a_template_that_opens_no_turn_leaves_the_header_to_the_model():
    template = ChatTemplate(UNOPENED.replace("{{ m.role }}", "user"), TOKENIZER)
    ids = tokens("<|message_model|><|content_text|>Hello<|end_message|>")
    assert template.render([*ASK, said(ids), *BYE]) == [*template.render(ASK), *ids, *template.render(BYE)]


def test_markers_that_a_template_assembles_do_no_harm():
    source = "{% for m in messages %}{{ '<|message_user|>' + m.content + '<|end_' }}message|>{% endfor %}"
    template = ChatTemplate(source, TOKENIZER)
    ids = tokens("<|message_user|>Hello<|end_message|>")
    assert template.render([*ASK, said(ids), *BYE]) == [*template.render(ASK), *ids, *template.render(BYE)]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}",
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ loop.length if loop.index == 2 }}{% endfor %}",
        "{% for m in messages %}{{ loop.length if loop.index == 2 }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content if loop.index == 2 and not loop.last }}{% endfor %}",
    ],
    ids=["hidden", "another beginning", "another tail", "another head", "twice"],
)
def test_a_template_that_shows_a_reply_otherwise_later_is_refused(source):
    with pytest.raises(InvalidRequestError, match="token_ids cannot be kept") as caught:
        ChatTemplate(source, TOKENIZER).render([*ASK, said(REPLY), *BYE])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "token_ids": [1]}, "messages.1.token_ids"),
        ({"role": "assistant", "token_ids": "abc"}, "messages.1.token_ids"),
        ({"role": "assistant", "token_ids": [1, True]}, "messages.1.token_ids"),
        (said(REPLY, tool_calls=[{"id": "a"}]), "messages"),
    ],
)
def test_what_is_no_reply_is_refused(message, param):
    with pytest.raises(InvalidRequestError) as caught:
        NANO.render([*ASK, message])
    assert caught.value.param == param
