"""What of an answer a grammar holds, in every place that a prompt can leave off."""

import json

import pytest

from samebit.core.errors import InvalidRequestError
from samebit.core.request import Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams, ToolShape
from samebit.engine.engine import vocabulary_of
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from samebit.grammar.grammars import Grammars
from samebit.grammar.matcher import is_allowed

CHOICE = StructuredOutputsParams(choice=["yes", "no"])
ADD = ToolShape(name="add", parameters={"properties": {"a": {"type": "integer"}}, "additionalProperties": False})
PING = ToolShape(name="ping")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model("nano"))


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(vocabulary_of(tokenizer, tokenizer.vocab_size))


@pytest.fixture(scope="module")
def spell(tokenizer):
    return lambda text: tokenizer.encode(text, allow_special=True)


@pytest.fixture(scope="module")
def follows(grammars, spell):
    """Whether a reply is allowed behind a prompt, and whether it may end there: both as marked-up text."""

    def follow(wanted, prompt, reply, eos=(6,)):
        params = SamplingParams(structured_outputs=wanted)
        params.validate()
        request = Request(
            request_id="r", prompt_token_ids=spell(prompt) or [300], params=params, seed=0, eos_token_ids=eos
        )
        matcher = grammars.matcher(request)
        for token_id in spell(reply):
            if not is_allowed(matcher.masks([])[0], token_id):
                return "refused"
            matcher.accept(token_id)
        return "over" if matcher.is_over else "open"

    return follow


USER = "<|endoftext|><|message_user|><|content_text|>Is it?<|end_message|>"
END = "<|end_message|><|content_model_end_sampling|>"


def test_a_reply_is_free_thinking_and_then_the_text_that_was_asked_for(follows):
    asked = USER + "<|message_model|>"
    assert follows(CHOICE, asked, f"<|content_text|>yes{END}") == "over"
    assert follows(CHOICE, asked, "<|content_text|>maybe") == "refused"
    thought = "<|content_thinking|>Hm, no? {maybe}<|end_message|><|message_model|>"
    assert follows(CHOICE, asked, f"{thought}{thought}<|content_text|>no{END}") == "over"
    assert follows(CHOICE, asked, f"{thought}<|content_text|>maybe") == "refused"
    assert follows(CHOICE, asked, "<|content_thinking|>Hm<|message_user|>") == "refused"
    assert follows(CHOICE, asked, f"<|content_thinking|>Hm{END}") == "refused"
    assert follows(CHOICE, asked, "yes") == "refused"
    assert follows(CHOICE, asked, "<|content_text|>yes<|end_message|><|message_model|>") == "refused"
    assert follows(CHOICE, asked, "<|content_text|>yes<|content_model_end_sampling|>") == "refused"


@pytest.mark.parametrize(
    ("prompt", "reply"),
    [
        (USER, f"<|message_model|><|content_text|>yes{END}"),
        (
            f"{USER}<|message_model|><|content_thinking|>I th",
            f"ink<|end_message|><|message_model|><|content_text|>yes{END}",
        ),
        (f"{USER}<|message_model|><|content_text|>", f"yes{END}"),
        (f"{USER}<|message_model|><|content_text|>I say: ", f"yes{END}"),
        ("Is it? ", "yes<|content_model_end_sampling|>"),
        ("<|endoftext|>Is it? ", "yes<|content_model_end_sampling|>"),
        ("<|endoftext|><|message_user|><|content_text|>Is it", "yes<|content_model_end_sampling|>"),
        ("", "yes<|content_model_end_sampling|>"),
    ],
)
def test_a_grammar_begins_wherever_the_prompt_leaves_off(follows, prompt, reply):
    assert follows(CHOICE, prompt, reply) == "over"
    assert follows(CHOICE, prompt, reply.replace("yes", "maybe")) == "refused"
    if "thinking" not in prompt:
        assert follows(CHOICE, prompt, "maybe") == "refused"


def test_a_model_without_an_end_token_ends_where_nothing_else_is_allowed(follows):
    assert follows(CHOICE, "Is it? ", "yes", eos=()) == "over"
    assert follows(StructuredOutputsParams(regex="a+"), "Is it? ", "aaa", eos=()) == "open"


def call(name, arguments):
    return f'{name}<|content_invoke_tool_json|>{{"name":"{name}","args":{arguments}}}'


@pytest.mark.parametrize(
    ("settings", "reply", "outcome"),
    [
        ({"must_call": True}, call("add", '{"a":1}') + END, "over"),
        ({"must_call": True}, call("ping", "{}") + "<|end_message|><|message_model|>" + call("add", '{"a": 2}') + END, "over"),
        ({"must_call": True}, call("add", '{"b":1}'), "refused"),
        ({"must_call": True}, call("sub", "{}"), "refused"),
        ({"must_call": True}, call("add", "[]"), "refused"),
        ({"must_call": True}, f"<|content_text|>No.{END}", "refused"),
        ({"must_call": True}, "<|content_thinking|>I call<|end_message|><|message_model|>" + call("ping", "{}") + END, "over"),
        ({"must_call": True, "may_call_again": False}, call("ping", "{}") + END, "over"),
        ({"must_call": True, "may_call_again": False}, call("ping", "{}") + "<|end_message|><|message_model|>", "refused"),
        ({}, f"<|content_text|>Anything.{END}", "over"),
        ({}, "<|content_text|>Well.<|end_message|><|message_model|>" + call("ping", "{}") + END, "over"),
        ({}, call("add", '{"a":true}'), "refused"),
        ({"choice": ["yes"]}, f"<|content_text|>yes{END}", "over"),
        ({"choice": [f"text {number}" for number in range(4096)]}, f"<|content_text|>text 4095{END}", "over"),
        ({"choice": ["absolute", "absolutely not"]}, f"<|content_text|>absolutely not{END}", "over"),
        ({"choice": ["absolute", "absolutely not"]}, f"<|content_text|>absolute{END}", "over"),
        ({"json": {"properties": {f"k{number}": {"type": "string"} for number in range(900)}}}, f'<|content_text|>{{"k899": "x"}}{END}', "over"),
        ({"choice": ["yes"]}, "<|content_text|>Anything", "refused"),
        ({"choice": ["yes"]}, call("ping", "{}") + END, "over"),
    ],
)  # fmt: skip
def test_calls_have_the_names_and_arguments_of_tools(follows, settings, reply, outcome):
    wanted = StructuredOutputsParams(tools=[ADD, PING], **settings)
    assert follows(wanted, USER + "<|message_model|>", reply) == outcome


def test_tools_need_a_conversation(follows):
    with pytest.raises(InvalidRequestError, match="tools need a conversation"):
        follows(StructuredOutputsParams(tools=[PING], must_call=True), "Say: ", "")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("settings", "good", "bad"),
    [
        ({"json": SCHEMA}, '{"a": 12}', '{"a": "x"}'),
        ({"json": json.dumps(SCHEMA)}, '{\n    "a": 12\n}', '{"b"'),
        ({"json_object": True}, '{"x": [1, {}]}', "[1]"),
        ({"regex": r"\d{3}/[a-c]+"}, "123/ab", "12a"),
        ({"choice": ['a "b"', "é/🙂", "\n"]}, "é/🙂", "e"),
        ({"grammar": 'start: "x" y\ny: /[0-9]+/'}, "x12", "xy"),
        ({"grammar": 'root ::= "x" y\ny ::= [0-9]+'}, "x12", "xy"),
    ],
)
def test_every_way_to_say_what_a_text_must_be(follows, settings, good, bad):
    wanted = StructuredOutputsParams(**settings)
    asked = USER + "<|message_model|><|content_text|>"
    assert follows(wanted, asked, good + END) == "over"
    assert follows(wanted, asked, bad) == "refused"


def test_white_space_in_json_has_an_end(follows):
    asked = "Say: "
    wanted = StructuredOutputsParams(json=SCHEMA)
    assert follows(wanted, asked, "{\n" + " " * 60 + '"a": 1\r\n}') == "open"
    assert follows(wanted, asked, "{\n\n") == "refused"
    assert follows(wanted, asked, "{  ") == "refused"
    assert follows(wanted, asked, "{\n" + " " * 70) == "refused"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"json": {"type": "objekt"}}, "json: Invalid type: objekt"),
        ({"json": {"type": "object", "dependentSchemas": {}}}, "json: Unimplemented keys"),
        ({"json": {"type": "string", "format": "nope"}}, "Unknown format: nope"),
        ({"json": {"$ref": "https://example.org/x"}}, "not present in a registry"),
        ({"json": {"$ref": "#"}}, "json: no token is allowed"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "Unsatisfiable"),
        ({"json": "{"}, "json: not a JSON text"),
        ({"json": "[1]"}, "json: must be an object"),
        ({"regex": "(a"}, "regex: .*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: foo"}, 'grammar: .*unknown name: "foo"'),
        ({"grammar": 'x: "a"'}, "no start rule"),
        ({"grammar": "start: @answer"}, "grammar: no token is allowed"),
        ({"grammar": 'root ::= "a'}, "grammar: not to be read as GBNF"),
        ({"choice": []}, "choice has 0 texts"),
        ({"choice": [""]}, "only an empty text"),
        ({"json": SCHEMA, "regex": "a"}, "json and regex cannot be had together"),
        ({}, "needs one of"),
        ({"must_call": True}, "needs one of"),
        ({"must_call": True, "tools": [PING], "regex": "a"}, "must_call needs tools, and nothing"),
        ({"tools": [PING, PING]}, "names are different"),
        ({"tools": [ToolShape(name="")]}, "names are different"),
        ({"tools": [PING, ToolShape(name="bad", parameters={"type": 3})], "regex": "a"}, "parameters of tool 'bad'"),
        ({"regex": "a" * (1 << 18)}, "at most 262144"),
        ({"json": {"enum": ["\ud800"]}}, "surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_field_and_the_reason(follows, settings, reason):
    wanted = StructuredOutputsParams(field="response_format", **settings)
    with pytest.raises(InvalidRequestError, match=f"response_format: .*{reason}") as raised:
        follows(wanted, USER + "<|message_model|>", "")
    assert raised.value.param == "response_format"


def test_a_grammar_is_compiled_once_and_what_was_found_wrong_is_found_at_once(grammars, spell):
    def ask(regex):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
        return grammars.matcher(Request(request_id="r", prompt_token_ids=spell("a"), params=params, seed=0))

    before = grammars.counts.num_compiled
    grammars.take_compile_times()
    for _ in range(3):
        ask("once")
        with pytest.raises(InvalidRequestError):
            ask("(once")
    assert grammars.counts.num_compiled == before + 2
    assert len(grammars.take_compile_times()) == 2
    assert grammars.take_compile_times() == []
