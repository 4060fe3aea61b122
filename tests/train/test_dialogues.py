"""Training dialogues: what they weigh, what a probe may share with them, and that their grammar is the chat template's."""

import collections
import functools
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from samebit.engine.chat_template import load_chat_template
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer
from samebit.train.dialogues import DialogueWriter
from samebit.train.facts import Known
from samebit.train.phrases import ANSWERS, OPENINGS, PHRASES
from samebit.train.tokens import SPECIAL_TOKENS
from samebit.train.tools import declaration, declare, tool_use
from samebit.train.transcript import ANSWER, PLAIN, STATED, Transcript
from samebit.train.words import MINE, subject


def writer(data, seed=0, split="train"):
    return DialogueWriter(data.tokenizer, data.train, data.sentences, seed, split)


def text_of(data, ids):
    return data.tokenizer.decode(ids, skip_special_tokens=False)


def test_dialogues_are_seeded_and_have_the_length_asked_for(data):
    for length in (64, 512, 3000):
        ids, classes = writer(data).dialogue(length)
        assert (ids, classes) == writer(data).dialogue(length)
        assert ids != writer(data, seed=1).dialogue(length)[0]
        assert len(ids) == len(classes) == length


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["train", "probe"]))
def test_a_sentence_in_pieces_is_encoded_as_the_whole(data, seed, kind):
    rng = random.Random(seed)
    found = subject(rng, kind)
    fact = Known(found, found.make(rng), old_value=found.make(rng))
    phrases = PHRASES[kind][found.kind]
    for template in (*phrases.state, *phrases.correct, *phrases.ask, ANSWERS[found.kind]):
        for token_class in (ANSWER, STATED):
            opening = rng.choice(("", *OPENINGS))
            pieces = fact.fill(opening + template, token_class)
            attribute, _, thing = found.key.partition(" of the ")
            words = {"k": found.key, "v": fact.value, "old": fact.old_value, "a": attribute, "t": thing}
            whole = (opening + template).format_map(words)
            assert "".join(text for text, _ in pieces) == whole
            apart = [i for text, _ in pieces for i in data.tokenizer.encode(text).ids]
            assert apart == data.tokenizer.encode(whole).ids


def messages_of(data, ids):
    """(role token, content token, body ids, place of the body) of each message in a dialogue; the last may be cut."""
    end = SPECIAL_TOKENS.index("<|end_message|>")
    begin = 0
    while end in ids[begin:]:
        stop = ids.index(end, begin)
        special = [i for i in range(begin, stop) if ids[i] in range(1, 16) and ids[i] != 6]
        yield (
            SPECIAL_TOKENS[ids[special[0]]],
            SPECIAL_TOKENS[ids[special[1]]],
            ids[special[1] + 1 : stop],
            special[1] + 1,
        )
        begin = stop + 1


VALUE = r"\d[\d.]*(?: dollars)?|[\w-]+(?: \d+)?"
PLACES = {
    "k": rf"[a-z ]+ of the [a-z]+ [a-z]+|{'|'.join(MINE)}|[A-Z]+_[A-Z]+",
    "a": "[a-z ]+",
    "t": "[a-z]+ [a-z]+",
    "v": VALUE,
    "old": VALUE,
}


ABOUT = r"(?:Describe|about|Give me|JSON for|for this|schema for) the (?P<t>[a-z]+ [a-z]+)\b(?:\.| as |\?|, |:)"


@functools.cache
def pattern_of(template):
    pattern = re.escape(template)
    for name, words in PLACES.items():
        pattern = pattern.replace(rf"\{{{name}\}}", f"(?P<{name}>{words})")
    return re.compile(f"(?:{'|'.join(map(re.escape, OPENINGS))})?{pattern}")


def parsed(templates, text):
    """Key and value of a sentence that one of `templates` makes, whatever its opening; None if none does."""
    for template in templates:
        if found := pattern_of(template).fullmatch(text):
            said = found.groupdict()
            return said if "k" in said else said | {"k": f"{said['a']} of the {said['t']}"}
    return None


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_is_the_value_that_was_stated_last(data, seed):
    ids, classes = writer(data, seed).dialogue(8000)
    stating = templates_of("train", "correct", "state")
    now, answered, question = {}, 0, ""
    for role, _, body, place in messages_of(data, ids):
        text = data.tokenizer.decode(body)
        weighed = data.tokenizer.decode([i for i, c in zip(body, classes[place:], strict=False) if c == ANSWER])
        question = text if role == "<|message_user|>" else question
        if role == "<|message_user|>" and (found := parsed(stating, text)):
            now[found["k"]] = found["v"]
        elif role == "<|message_model|>" and text.startswith('{"') and '"args"' not in text:
            told = json.loads(text)
            if "properties" in question:
                continue
            assert told == {key: now[key] for key in told}
            assert weighed == "".join(told.values())
            assert data.tokenizer.encode(text).ids == body
            answered += 1
        elif (
            role == "<|message_model|>" and weighed and (found := parsed(ANSWERS.values(), text)) and found["k"] in now
        ):
            assert found["v"] == now[found["k"]]
            assert weighed == f" {found['v']}."
            answered += 1
    assert answered > 10


def test_an_object_about_a_thing_holds_the_values_that_were_stated_last(data):
    stating = templates_of("train", "correct", "state")
    num_objects = 0
    for seed in range(8):
        ids, _ = writer(data, seed).dialogue(8000)
        now, question = {}, ""
        for role, _, body, _ in messages_of(data, ids):
            text = data.tokenizer.decode(body)
            if role == "<|message_user|>":
                question = text
                found = parsed(stating, text)
                now |= {found["k"]: found["v"]} if found else {}
            elif '{"properties"' in question and (about := re.search(ABOUT, question)):
                told = {name.replace("_", " "): str(value) for name, value in json.loads(text).items()}
                assert told == {name: now[f"{name} of the {about['t']}"] for name in told}
                num_objects += 1
    assert num_objects > 3


@pytest.mark.parametrize("seed", range(4))
def test_a_correction_changes_the_value_and_names_the_one_before(data, seed):
    ids, _ = writer(data, seed).dialogue(8000)
    now, changed, named = {}, 0, 0
    for role, _, body, _ in messages_of(data, ids):
        text = data.tokenizer.decode(body)
        if role != "<|message_user|>":
            continue
        if found := parsed(templates_of("train", "correct"), text):
            assert found["v"] != now[found["k"]]
            assert found.get("old", now[found["k"]]) == now[found["k"]]
            changed, named = changed + 1, named + ("old" in found)
        found = found or parsed(templates_of("train", "state"), text)
        now |= {found["k"]: found["v"]} if found else {}
    assert changed > 5
    assert 0 < named < changed


def test_facts_are_asked_for_before_between_and_after_several_corrections(data):
    asked, seen = collections.Counter(), collections.Counter()
    for seed in range(6):
        ids, _ = writer(data, seed).dialogue(8000)
        corrections = collections.Counter()
        for role, _, body, _ in messages_of(data, ids):
            text = data.tokenizer.decode(body)
            if role == "<|message_user|>" and (found := parsed(templates_of("train", "correct"), text)):
                corrections[found["k"]] += 1
            elif role == "<|message_model|>" and (found := parsed(ANSWERS.values(), text)):
                asked[min(3, corrections[found["k"]])] += 1
                seen[seed, found["k"], corrections[found["k"]]] += 1
    assert min(asked[n] for n in range(4)) > 0.1 * asked.total()
    assert any((seed, key, n + 1) in seen for seed, key, n in seen if n)


def test_there_are_many_sentences_of_each_kind():
    for split, least in (("train", (12, 10, 10)), ("probe", (6, 4, 5))):
        for phrases in PHRASES[split].values():
            counts = [len(set(choices)) for choices in (phrases.state, phrases.correct, phrases.ask)]
            assert all(count >= low for count, low in zip(counts, least, strict=True))


@pytest.mark.parametrize("num_corrections", [0, 1, 3])
@pytest.mark.parametrize("distance", [250, 1000])
def test_a_probe_ends_with_the_value_that_was_stated_last(data, distance, num_corrections):
    probe = writer(data, distance, "probe").probe(distance, num_corrections)
    first, last = probe.value
    said = text_of(data, probe.token_ids[first:last])
    assert said.endswith(".")
    stated = probe.token_ids[first - probe.distance :]
    assert text_of(data, stated).startswith(said[:-1])
    assert abs(probe.distance - distance) < 60
    assert probe.reply[0] < first
    reply = text_of(data, probe.token_ids[probe.reply[0] :])
    assert reply.startswith("<|content_text|>")
    assert reply.endswith("<|end_message|><|content_model_end_sampling|>")
    assert last == probe.reply[1] == len(probe.token_ids) - 2
    said = [data.tokenizer.decode(body) for role, _, body, _ in messages_of(data, probe.token_ids) if "user" in role]
    seen = {split: [parsed(templates_of(split, "correct", "state"), text) for text in said] for split in PHRASES}
    assert not any(seen["train"])
    assert sum(map(bool, seen["probe"])) > num_corrections


def templates_of(split, *kinds):
    return [t for phrases in PHRASES[split].values() for kind in kinds for t in getattr(phrases, kind)]


def test_probes_share_neither_things_nor_sentences_with_training(data):
    names = {split: set() for split in ("train", "probe")}
    for split, found in names.items():
        rng = random.Random(1)
        drawn = [subject(rng, split) for _ in range(4000)]
        found |= {s.key.partition(" of the ")[2] for s in drawn if s.kind == "thing"}
    assert names["train"].isdisjoint(names["probe"])
    for kind in ("thing", "mine", "setting"):
        one, other = (PHRASES[split][kind] for split in ("train", "probe"))
        assert not {*one.state, *one.correct, *one.ask} & {*other.state, *other.correct, *other.ask}


def test_tools_effort_and_system_prompts_occur(data):
    text = "".join(text_of(data, writer(data, seed).dialogue(1500)[0]) for seed in range(8))
    for mark in ("tool_declare<|content_xml|>", "<|content_invoke_tool_json|>", "Thinking effort level", "JSON"):
        assert mark in text


def test_a_tool_turn_is_what_the_chat_template_renders():
    folder = resolve_model("nano")
    template = load_chat_template(folder, Tokenizer(folder))
    tools = declare(random.Random(0))
    text, use = declaration(tools), tool_use(random.Random(0), tools)
    called = {"name": use.name, "arguments": json.loads(use.call)["args"]}
    rendered = template.render(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": use.question},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": called}]},
            {"role": "tool", "tool_call_id": "1", "content": use.result},
            {"role": "assistant", "content": use.answer},
        ],
        tools=json.loads(text),
        add_generation_prompt=False,
        variables={"reasoning_effort": "high"},
    )
    out = Transcript(RawTokenizer.from_file(str(folder / "tokenizer.json")))
    out.message("system", [("Be brief.", PLAIN)])
    out.message("system", [(text, PLAIN)], content="xml", author="tool_declare")
    out.message("system", [("Thinking effort level: 0.9", PLAIN)])
    out.use_tool(use)
    assert out.token_ids == rendered
