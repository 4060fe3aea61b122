"""A conversation that goes on with another reasoning effort is noticed."""

import pytest

from samebit.server.efforts import _MAX_REMEMBERED, EffortMemory
from samebit.server.request_models import ChatBody

START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
LATER = [*START, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Why?"}]


def body(messages, **fields):
    return ChatBody.model_validate({"messages": messages, **fields})


def test_another_effort_in_the_next_turn_is_noticed_once():
    memory = EffortMemory()
    told = [memory.is_changed(body(LATER, reasoning_effort=effort)) for effort in ("low", "low", "high", "high", 0.5)]
    assert told == [False, False, True, False, True]
    assert memory.is_changed(body(LATER, chat_template_kwargs={"reasoning_effort": 0.5})) is False


@pytest.mark.parametrize(
    "fields",
    [{"messages": [*START[:1], {"role": "user", "content": "Bye"}]}, {"cache_salt": "tenant"}],
    ids=["messages", "salt"],
)
def test_another_conversation_is_not_the_same_one(fields):
    memory = EffortMemory()
    memory.is_changed(body(START, reasoning_effort="low"))
    assert not memory.is_changed(ChatBody.model_validate({"messages": START, "reasoning_effort": "high", **fields}))
    assert memory.is_changed(body(START, reasoning_effort="high"))


def test_only_the_latest_conversations_are_remembered():
    memory = EffortMemory()
    memory.is_changed(body(START, reasoning_effort="low"))
    for number in range(_MAX_REMEMBERED):
        memory.is_changed(body([{"role": "user", "content": str(number)}]))
    assert not memory.is_changed(body(START, reasoning_effort="high"))


def test_half_a_character_is_no_reason_to_fail():
    assert not EffortMemory().is_changed(body([{"role": "user", "content": "\ud800"}]))
