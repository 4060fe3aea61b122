"""What the translation of bodies must not do: keep others waiting, and show a template what is not for the model."""

import asyncio
import threading

import pytest

from samebit.core.request import EngineInfo
from samebit.engine.model_source import resolve_model
from samebit.server.request_models import ChatBody, ChatMessage, CompletionBody
from samebit.server.translate import Translator, _plain

INFO = EngineInfo(model="nano", max_length=64, vocab_size=4096, system_fingerprint="", profile={}, memory={})
LONG = "x " * 10_000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": LONG}}]}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": LONG}]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"note": LONG}},
    ],
    ids=["content", "tool call", "reasoning", "variable"],
)
def test_a_long_chat_is_rendered_outside_the_event_loop(fields, monkeypatch):
    translator = Translator(resolve_model("nano"), INFO, "nano")
    threads = []

    def render(*_, **__):
        threads.append(threading.current_thread())
        return [1]

    monkeypatch.setattr(translator._template, "render", render)
    asyncio.run(translator.chat(ChatBody(**fields)))
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(("wanted", "kept"), [(None, 100), (7, 7), (200, 100), (-1, 54)])
def test_a_prompt_is_cut_to_what_is_wanted_or_what_fits(wanted, kept):
    translator = Translator(resolve_model("nano"), INFO, "nano")
    body = CompletionBody(prompt=list(range(100)), max_tokens=10, truncate_prompt_tokens=wanted)
    job = asyncio.run(translator.complete(body))
    assert job.requests[0].prompt_token_ids == list(range(100))[-kept:]


@pytest.mark.parametrize(
    ("prompt", "number"), [("text", 1), ("", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2], [3]], 3), ([], 0)]
)
def test_prompts_are_counted_by_kind(prompt, number):
    assert CompletionBody(prompt=prompt).num_prompts == number


def test_a_template_sees_nothing_of_what_a_client_made_of_an_answer():
    said = {"role": "assistant", "content": "1", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    made = {
        "parsed": 1,
        "annotations": [],
        "tool_calls": [{"function": {**said["tool_calls"][0]["function"], "parsed_arguments": {}}}],
    }
    assert _plain(ChatMessage.model_validate(said | made)) == said
