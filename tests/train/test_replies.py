"""What counts as a loop, as one message, as valid JSON and as a valid call."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.errors import ConfigError
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from samebit.train.replies import (
    LOOP_BLOCK,
    LOOP_REPEATS,
    LOOP_TOKENS,
    Message,
    is_loop,
    is_valid_call,
    only_message,
    parse_json,
    same_json,
    satisfies,
)
from samebit.workloads import document

TOOL = {
    "name": "set_alarm",
    "parameters": {
        "type": "object",
        "properties": {"hour": {"type": "integer"}, "day": {"type": "string", "enum": ["today", "tomorrow"]}},
        "required": ["hour"],
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model("nano"))


def call(body, author="set_alarm", kind="<|content_invoke_tool_json|>"):
    return Message(author, kind, body)


@given(
    start=st.lists(st.integers(0, 4095), max_size=160),
    block=st.lists(st.integers(0, 4095), min_size=1, max_size=LOOP_BLOCK),
    phase=st.integers(0, LOOP_BLOCK),
)
def test_a_repeated_block_is_found_wherever_it_is_cut(start, block, phase):
    length = max(LOOP_TOKENS, LOOP_REPEATS * len(block))
    loop = (block * (2 * LOOP_TOKENS // len(block) + 2 * LOOP_REPEATS))[phase : phase + length]
    assert len(loop) == length
    assert is_loop(start + loop)


@given(block=st.lists(st.integers(0, 4095), min_size=LOOP_BLOCK, max_size=LOOP_BLOCK, unique=True))
def test_a_loop_is_long_enough_short_in_period_and_goes_on_to_the_end(block):
    # Six different tokens four times are no loop: it takes 96 tokens.
    assert not is_loop(block[:6] * 4)
    assert not is_loop((block[:6] * 16)[: LOOP_TOKENS - 1])
    assert is_loop(block[:6] * 16)
    # A block of 48 needs three whole copies, although two fill 96 tokens.
    assert not is_loop((block * 3)[1:])
    assert not is_loop([*range(5000, 5100), *block * 2])
    assert is_loop(block * 3)
    # A block of 49 is text of its own.
    assert not is_loop([*block, 5000] * 4)
    assert not is_loop([*block[:6] * 20, 5000])


def test_natural_code_is_no_loop_at_any_point(tokenizer):
    for seed in range(12):
        token_ids = tokenizer.encode(document(seed, 4000), allow_special=False)
        assert not any(is_loop(token_ids[:end]) for end in range(1, len(token_ids)))


def test_tokens_drawn_at_random_are_no_loop():
    rng = random.Random(0)
    assert not any(is_loop([rng.randrange(9) for _ in range(256)]) for _ in range(200))


def test_a_finished_turn_of_one_message_is_told_apart_in_its_parts(tokenizer):
    def read(text):
        return only_message(tokenizer, tokenizer.encode(text, allow_special=True))

    end = "<|end_message|><|content_model_end_sampling|>"
    assert read(f"<|content_text|>It is 5.{end}") == Message("", "<|content_text|>", "It is 5.")
    assert read(f"f<|content_invoke_tool_json|>{{}}{end}") == call("{}", "f")
    for wrong in (
        "<|content_text|>It is 5.",
        "<|content_text|>It is 5.<|end_message|>",
        "<|content_text|>It is 5.<|content_model_end_sampling|>",
        f"It is 5.{end}",
        f"<|content_text|>a<|end_message|><|message_model|><|content_text|>b{end}",
        end,
        "",
    ):
        assert read(wrong) is None, wrong


def test_json_is_read_strictly():
    assert parse_json(' {"a": [1, true, null]}') == {"a": [1, True, None]}
    for wrong in ("{'a': 1}", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1} and more', "", '{"a": 1,}'):
        with pytest.raises(ValueError):  # noqa: PT011 - the class is the contract
            parse_json(wrong)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_equal_json_does_not_depend_on_the_order_of_names(value):
    turned = dict(reversed(value.items())) if isinstance(value, dict) else value
    assert same_json(value, turned)
    assert not same_json(value, [value])


def test_one_and_true_are_different_json():
    assert not same_json(1, True)
    assert not same_json({"a": 0}, {"a": False})
    assert not same_json("1", 1)


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"hour": 7}, True),
        ({"hour": 7, "day": "today"}, True),
        ({"day": "today"}, False),
        ({"hour": "7"}, False),
        ({"hour": True}, False),
        ({"hour": 7.5}, False),
        ({"hour": 7, "day": "friday"}, False),
        ({"hour": 7, "minute": 5}, False),
        ([7], False),
        (None, False),
    ],
)
def test_arguments_are_checked_against_the_declared_schema(arguments, is_right):
    assert satisfies(arguments, TOOL["parameters"]) == is_right


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("string", "", 0),
        ("integer", 0, False),
        ("number", 1.5, True),
        ("number", 2, "2"),
        ("boolean", False, 0),
        ("null", None, 0),
        ("array", [], {}),
        ("object", {}, []),
    ],
)
def test_each_type_takes_its_own_values_only(kind, right, wrong):
    assert satisfies(right, {"type": kind})
    assert not satisfies(wrong, {"type": kind})


def test_items_of_a_list_are_checked():
    schema = {"type": "array", "items": {"type": "integer"}}
    assert satisfies([1, 2], schema)
    assert not satisfies([1, "2"], schema)


def test_a_keyword_that_is_not_checked_is_refused():
    for schema in ({"type": "integer", "minimum": 3}, {"type": "object", "additionalProperties": True}):
        with pytest.raises(ConfigError, match=r"minimum|additionalProperties"):
            satisfies(5, schema)


def test_a_call_names_a_declared_tool_and_satisfies_its_parameters():
    right = '{"name":"set_alarm","args":{"hour":7}}'
    assert is_valid_call(call(right), [TOOL])
    assert not is_valid_call(call(right), [])
    assert not is_valid_call(call(right, kind="<|content_text|>"), [TOOL])
    assert not is_valid_call(call(right, author="set_clock"), [TOOL])
    assert not is_valid_call(None, [TOOL])
    for wrong in (
        '{"name":"set_alarm","args":{"hour":"7"}}',
        '{"name":"set_alarm"}',
        '{"name":"set_alarm","args":{"hour":7}',
        '{"name":"set_alarm","args":{"hour":7},"id":1}',
        "[1]",
    ):
        assert not is_valid_call(call(wrong), [TOOL]), wrong
