"""Replies taken apart: what a trained model says, and whatever else a model could say."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from samebit.core.reply import MessageFormat, Place, joined
from samebit.engine.detokenizer import IncrementalDetokenizer, StopAutomaton
from samebit.engine.model_source import resolve_model
from samebit.engine.reply_parser import ReplyParser
from samebit.engine.tokenizer import Tokenizer
from samebit.train.dialogues import DialogueWriter
from samebit.train.tools import declare, tool_use
from samebit.train.transcript import PLAIN, Transcript
from samebit.workloads import document

TOKENIZER = Tokenizer(resolve_model("nano"))
RAW = RawTokenizer.from_file(str(resolve_model("nano") / "tokenizer.json"))
FORMAT = MessageFormat.of(TOKENIZER.special_tokens())
MODEL = TOKENIZER.id_of("<|message_model|>")
END = TOKENIZER.id_of("<|end_message|>")
END_OF_TURN = TOKENIZER.id_of("<|content_model_end_sampling|>")
WEATHER = '{"name":"get_weather","args":{"city":"Oslo"}}'
OTHERS = "<|content_thinking|>hm<|end_message|><|message_model|>"


def tokens(text):
    return TOKENIZER.encode(text, allow_special=True)


class Reply:
    """What came of a reply: text of both kinds, calls as (name, arguments), and the kind of each token."""

    def __init__(self, pieces, kinds):
        self.pieces, self.kinds = pieces, kinds
        self.content, self.reasoning = (
            "".join(p.text for p in pieces if p.kind == k) for k in ("content", "reasoning")
        )
        self.calls = []
        for piece in pieces:
            if piece.kind != "call":
                assert (piece.call_index, piece.name) == (-1, "")
            elif piece.name:
                assert (piece.call_index, piece.text) == (len(self.calls), ""), "the name comes first, and alone"
                self.calls.append((piece.name, ""))
            else:
                assert piece.call_index == len(self.calls) - 1, "calls come one after another"
                self.calls[-1] = (self.calls[-1][0], self.calls[-1][1] + piece.text)


def parse(ids, cuts=(), prompt=(MODEL,), **options):
    """All of a reply; what is certain is taken at each of `cuts` (places in `ids`)."""
    stop = options.pop("stop", None)
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=StopAutomaton(stop) if stop else None, **options)
    parser = ReplyParser(FORMAT, TOKENIZER, detokenizer)
    parser.begin(list(prompt))
    pieces, kinds = [], []
    for index, token_id in enumerate(ids):
        if index in cuts:
            more = parser.take()
            pieces += more[0]
            kinds += more[1]
        parser.push(token_id)
        if detokenizer.match is not None:
            break
    parser.finish()
    more = parser.take()
    return Reply(joined([*pieces, *more[0]]), [*kinds, *more[1]])


def check(ids, reply):
    """What must hold of any reply to a prompt that has opened a message: each text is that of its tokens, and none is a control token's."""
    assert len(reply.kinds) == len(ids)
    assert all(k == "control" for i, k in zip(ids, reply.kinds, strict=True) if FORMAT.is_control(i))
    texts = {"content": "", "reasoning": ""}
    for kind in texts:
        part = []
        for token_id, of in zip([*ids, END], [*reply.kinds, "control"], strict=True):
            if of == kind:
                part.append(token_id)
            if token_id in FORMAT.leads_to:
                texts[kind] += TOKENIZER.decode(part)
                part = []
    assert texts == {"content": reply.content, "reasoning": reply.reasoning}


def test_thinking_text_and_calls_are_told_apart():
    ids = tokens(
        "<|content_thinking|>I must look.<|end_message|><|message_model|><|content_text|>One moment.<|end_message|>"
        f"<|message_model|>get_weather<|content_invoke_tool_json|>{WEATHER}<|end_message|>"
        '<|message_model|>add<|content_invoke_tool_json|>{"name": "add", "args": {"x": [1, {"y": "}\\""}]}}<|end_message|>'
        "<|content_model_end_sampling|>"
    )
    reply = parse(ids)
    assert reply.reasoning == "I must look."
    assert reply.content == "One moment."
    assert reply.calls == [("get_weather", '{"city":"Oslo"}'), ("add", '{"x": [1, {"y": "}\\""}]}')]
    assert [piece.kind for piece in reply.pieces] == ["reasoning", "content", "call", "call", "call", "call"]
    assert reply.kinds.count("reasoning") == len(tokens("I must look."))
    check(ids, reply)


def test_arguments_come_before_the_call_has_ended():
    parser = ReplyParser(FORMAT, TOKENIZER, IncrementalDetokenizer(TOKENIZER))
    parser.begin([MODEL])
    came = []
    for token_id in tokens(f"get_weather<|content_invoke_tool_json|>{WEATHER}"):
        parser.push(token_id)
        came += [piece.name or piece.text for piece in parser.take()[0]]
    assert came[0] == "get_weather"
    assert len(came) > 3, "name and several fragments"
    assert "".join(came[1:]) == '{"city":"Oslo"}'


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("", "", "", []),
        ("hello", "hello", "", []),
        ("hello<|end_message|>", "hello", "", []),
        ("Bob<|content_text|>hello", "hello", "", []),
        ("hello<|message_model|><|content_text|> you", "hello you", "", []),
        ("<|content_text|>a<|content_thinking|>b<|content_text|>c", "ac", "b", []),
        ("<|content_text|>a<|message_user|><|content_text|>b", "ab", "", []),
        ("<|content_text|>a<|end_message|>b", "ab", "", []),
        ("<|content_text|>a<|content_model_end_sampling|><|message_model|><|content_text|>b", "ab", "", []),
        ("<|unused_0|>Bob<|unused_1|><|content_text|>a<|endoftext|>b", "ab", "", []),
        ("<|content_xml|>a", "a", "", []),
        (f"<|content_invoke_tool_json|>{WEATHER}", "", "", [("get_weather", '{"city":"Oslo"}')]),
        (f"<|content_invoke_tool_json|>{WEATHER}<|unused_0|>!", "", "", [("get_weather", '{"city":"Oslo"}')]),
        (f"get_time<|content_invoke_tool_json|>{WEATHER}<|end_message|>", WEATHER, "", []),
        ('<|content_invoke_tool_json|>{"args": {"a": 1}, "name": "f"}', "", "", [("f", '{"a": 1}')]),
        ('<|content_invoke_tool_json|>{"args": {}, "name": "f", "x": 1}', '{"args": {}, "name": "f", "x": 1}', "", []),
        ('<|content_invoke_tool_json|>{"name": "f", "args": {"a": 1', "", "", [("f", '{"a": 1')]),
        ('<|content_invoke_tool_json|>{"name": "f", "args": {}, "x": 2}', "", "", [("f", "{}")]),
        ('<|content_invoke_tool_json|>{"name": "f", "args": 3}', '{"name": "f", "args": 3}', "", []),
        ('<|content_invoke_tool_json|>{"name": "f", "ar', '{"name": "f", "ar', "", []),
        ('<|content_invoke_tool_json|>{"name": "", "args": {}}', '{"name": "", "args": {}}', "", []),
        ('<|content_invoke_tool_json|>{"name": "\\ud800", "args": {}}', '{"name": "\\ud800", "args": {}}', "", []),
        ("f<|content_invoke_tool_json|>" + "[" * 9000, "[" * 9000, "", []),
        ("f<|content_invoke_tool_json|><|content_text|>a", "a", "", []),
    ],
)  # fmt: skip
def test_whatever_is_said_has_a_meaning(text, content, reasoning, calls):
    ids = tokens(text)
    reply = parse(ids)
    assert (reply.content, reply.reasoning, reply.calls) == (content, reasoning, calls)
    check(ids, reply)


def test_a_header_that_is_too_long_for_a_name_is_shown_as_it_comes():
    parser = ReplyParser(FORMAT, TOKENIZER, IncrementalDetokenizer(TOKENIZER))
    parser.begin([MODEL])
    for token_id in tokens("no header ends here, " * 20):
        parser.push(token_id)
    assert len(parser.take()[0][0].text) > 300
    assert parser.place is Place.TEXT


def turns(ids):
    """The model's turns in a dialogue, each behind its first `<|message_model|>`."""
    begin = None
    for index, token_id in enumerate(ids):
        if begin is None and token_id == MODEL:
            begin = index + 1
        elif begin is not None and token_id == END_OF_TURN:
            yield ids[begin : index + 1]
            begin = None


def generated_turns(count):
    """Turns of training dialogues, and as many with thinking and several calls, which those lack."""
    code = np.array(RAW.encode("".join(document(seed, 3000) for seed in range(3))).ids, dtype=np.uint16)
    writer = DialogueWriter(RAW, code, ["The reader of a file may close it twice."], 5, "train")
    found = []
    while len(found) < count // 2:
        found += turns(writer.dialogue(1500)[0])
    rng = random.Random(7)
    while len(found) < count:
        out, tools = Transcript(RAW), declare(rng)
        if rng.random() < 0.7:
            out.message(
                "model", [(rng.choice(("Let me see.", "日本 → é 🙂", "<|end_message|>")), PLAIN)], content="thinking"
            )
        if rng.random() < 0.5:
            out.message("model", [(rng.choice(("I look it up.", "🙂🙂", '{"name":')), PLAIN)])
        for use in (tool_use(rng, tools) for _ in range(rng.randrange(4))):
            out.message("model", [(use.call, PLAIN)], content="invoke_tool_json", author=use.name)
        out.end_turn()
        found += turns(out.token_ids)
    return found


def test_turns_of_dialogues_are_the_same_however_they_are_cut():
    rng = random.Random(3)
    num_calls = 0
    for ids in generated_turns(2200):
        whole = parse(ids)
        check(ids, whole)
        cut = parse(ids, cuts=set(rng.sample(range(len(ids)), rng.randrange(len(ids)))))
        assert (cut.pieces, cut.kinds) == (whole.pieces, whole.kinds)
        assert "<|" not in whole.content.replace("<|end_message|>", "")
        for _, arguments in whole.calls:
            assert isinstance(json.loads(arguments), dict)
            num_calls += 1
        short = ids[: rng.randrange(len(ids))]
        check(short, parse(short))
    assert num_calls > 1000


hostile = st.lists(
    st.sampled_from(sorted(TOKENIZER.special_ids))
    | st.integers(0, TOKENIZER.vocab_size - 1)
    | st.sampled_from(tokens('{"name": "f", "args": {"a": "b"}}f\\')),
    max_size=60,
)


@given(
    hostile, st.sets(st.integers(0, 60)), st.sampled_from([(MODEL,), (), tokens(OTHERS), tokens("<|content_text|>a")])
)
def test_any_tokens_are_a_reply_and_cuts_do_not_show(ids, cuts, prompt):
    whole, cut = parse(ids, prompt=prompt), parse(ids, cuts, prompt=prompt)
    assert (cut.pieces, cut.kinds) == (whole.pieces, whole.kinds)
    check(ids, whole)
    for piece in whole.pieces:
        (piece.text + piece.name).encode()


@given(hostile, st.lists(st.sampled_from(["a", "f", "\ufffd", '"', "am", 'f"']), min_size=1, max_size=3))
def test_stop_strings_are_found_in_the_content_and_nowhere_else(ids, stop):
    content = parse(ids).content
    places = [content.index(s) for s in stop if s in content]
    ends = [content.index(s) + len(s) for s in stop if s in content]
    stopped = parse(ids, stop=stop)
    if not places:
        assert stopped.content == content
        assert stopped.calls == parse(ids).calls
    else:
        assert content.startswith(stopped.content)
        assert len(stopped.content) < min(ends)


def test_no_character_goes_on_in_another_message():
    first, second = TOKENIZER.encode("é", allow_special=False)[:1], TOKENIZER.encode("日", allow_special=False)
    halves = [token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token) in (b"\xc3", b"\xa9")]
    head, tail = sorted(halves, key=TOKENIZER.token_bytes, reverse=True)
    assert parse([head, tail]).content == "é"
    for between in ("<|end_message|>", "<|message_model|><|content_text|>", "<|content_text|>"):
        assert parse([*tokens("<|content_text|>"), head, *tokens(between), tail]).content == "\ufffd\ufffd"
    assert parse([*first, *tokens(OTHERS), *second]).content.endswith("日")


def test_every_token_of_a_reply_counts_before_a_stop_string_does():
    ids = tokens(f"{OTHERS}Bob<|content_text|>!")
    for least in range(len(ids) + 1):
        assert parse(ids, stop=["!"], min_tokens=least).content == ("" if least < len(ids) else "!")


def test_a_stop_string_does_not_cut_a_call_or_a_thought():
    ids = tokens(f"{OTHERS}get_weather<|content_invoke_tool_json|>{WEATHER}<|end_message|>")
    reply = parse(ids, stop=["hm", "Oslo", "get"])
    assert (reply.reasoning, reply.calls) == ("hm", [("get_weather", '{"city":"Oslo"}')])


def test_a_reply_goes_on_where_the_prompt_leaves_off():
    head = tokens("<|message_user|><|content_text|>W?<|end_message|><|message_model|>")
    assert parse(tokens("more"), prompt=[*head, *tokens("<|content_text|>some")]).content == "more"
    assert parse(tokens("more"), prompt=[*head, *tokens("<|content_thinking|>some")]).reasoning == "more"
    named = parse(tokens(f"weather<|content_invoke_tool_json|>{WEATHER}"), prompt=[*head, *tokens("get_")])
    assert named.calls == [("get_weather", '{"city":"Oslo"}')]
    whole = tokens(f"get_weather<|content_invoke_tool_json|>{WEATHER}")
    for cut in range(len(whole)):
        rest = parse(whole[cut:], prompt=[*head, *whole[:cut]])
        ((name, arguments),) = rest.calls
        assert (name, rest.content) == ("get_weather", "")
        assert '{"city":"Oslo"}'.endswith(arguments)
    assert parse(tokens("<|message_model|><|content_text|>a"), prompt=head[:-1]).content == "a"


def test_a_model_without_these_tokens_has_no_such_format():
    assert MessageFormat.of({"<|im_start|>": 1, "<|im_end|>": 2}) is None
    known = MessageFormat.of({"<|message_model|>": 3, "<|content_text|>": 4, "<|end_message|>": 5})
    assert known.end_of_turn is None
    assert known.after_all([3, 9, 4, 9, 9, 5]) is Place.BETWEEN
