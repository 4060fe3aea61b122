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
from samebit.train.noise import LEADS
from samebit.train.phrases import ANSWERS, PROBE_PHRASES
from samebit.train.sentences import CHANGES, CLAUSES, QUESTIONS, correction, question, statement
from samebit.train.tokens import SPECIAL_TOKENS
from samebit.train.tools import declaration, declare, tool_use
from samebit.train.transcript import ANSWER, PLAIN, STATED, Transcript
from samebit.train.words import ADJECTIVES, MINE, NOUNS, THING, subject


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


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6), split=st.sampled_from(["train", "probe"]))
def test_a_sentence_in_pieces_is_encoded_as_the_whole(data, seed, split):
    rng = random.Random(seed)
    found = subject(rng, split)
    fact = Known(found, found.make(rng), old_value=found.make(rng))
    for template in (*(draw(rng, split, found.kind) for draw in DRAWS), ANSWERS[found.kind]):
        for token_class in (ANSWER, STATED):
            pieces = fact.fill(template, token_class)
            attribute, _, thing = found.key.partition(" of the ")
            words = {"k": found.key, "v": fact.value, "old": fact.old_value, "a": attribute, "t": thing}
            whole = template.format_map(words)
            assert "".join(text for text, _ in pieces) == whole
            apart = [i for text, _ in pieces for i in data.tokenizer.encode(text).ids]
            assert apart == data.tokenizer.encode(whole).ids


@given(seed=st.integers(0, 10**6), split=st.sampled_from(["train", "probe"]))
def test_a_statement_has_one_value_and_every_sentence_names_its_subject(seed, split):
    rng = random.Random(seed)
    found = subject(rng, split)
    for draw in DRAWS:
        template = draw(rng, split, found.kind)
        assert template.count("{v}") == (draw is not question)
        assert template.count("{old}") <= (draw is correction)
        assert subject_of(found.filled(template)) == found.key


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


DRAWS = (statement, correction, question)
THINGS = rf"\b(?:{'|'.join(ADJECTIVES)}) (?:{'|'.join(NOUNS)})\b"
VALUE = r"\d[\d.]*(?: dollars)?|[\w-]+(?: \d+)?"
PLACES = {"k": rf"[a-z ]+ of the [a-z]+ [a-z]+|{'|'.join(MINE)}|[A-Z]+_[A-Z]+", "v": VALUE}


def subject_of(text):
    """The key of what a sentence is about: a thing and its attribute, something of mine, or a setting."""
    if found := re.search(r"`([A-Z]+_[A-Z]+)`", text):
        return found[1]
    attributes = set(re.findall(rf"\b(?:{'|'.join(THING)})\b", text))
    if things := set(re.findall(THINGS, text)):
        assert len(attributes) == len(things) == 1, text
        return f"{attributes.pop()} of the {things.pop()}"
    (mine,) = set(re.findall("|".join(MINE), text))
    return mine


@functools.cache
def pattern_of(template):
    pattern = re.escape(template)
    for name, words in PLACES.items():
        pattern = pattern.replace(rf"\{{{name}\}}", f"(?P<{name}>{words})")
    return re.compile(pattern)


def answered_in(text):
    """Key and value of an answer; None if it is none."""
    return next((m.groupdict() for t in ANSWERS.values() if (m := pattern_of(t).fullmatch(text))), None)


def events(data, ids, classes):
    """(role, text, key and value that the message tells) of each message."""
    for role, _, body, place in messages_of(data, ids):
        text = data.tokenizer.decode(body)
        value = data.tokenizer.decode([i for i, c in zip(body, classes[place:], strict=False) if c == STATED])
        yield role, text, (subject_of(text), value.strip()) if value else None


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_is_the_value_that_was_stated_last(data, seed):
    ids, classes = writer(data, seed).dialogue(8000)
    now, num_answered, asked = {}, 0, ""
    weighed = [
        data.tokenizer.decode([i for i, c in zip(body, classes[place:], strict=False) if c == ANSWER])
        for _, _, body, place in messages_of(data, ids)
    ]
    for (role, text, told), weighs in zip(events(data, ids, classes), weighed, strict=True):
        now |= [told] if told else {}
        asked = text if role == "<|message_user|>" else asked
        if role != "<|message_model|>" or "properties" in asked:
            continue
        if text.startswith('{"') and '"args"' not in text:
            said = json.loads(text)
            assert said == {key: now[key] for key in said}
            assert weighs == "".join(said.values())
            num_answered += 1
        elif weighs and (found := answered_in(text)) and found["k"] in now:
            assert found["v"] == now[found["k"]]
            assert weighs == f" {found['v']}."
            assert subject_of(asked) == found["k"]
            num_answered += 1
    assert num_answered > 10


def test_an_object_about_a_thing_holds_the_values_that_were_stated_last(data):
    num_objects = 0
    for seed in range(12):
        now, asked = {}, ""
        for role, text, told in events(data, *writer(data, seed).dialogue(8000)):
            now |= [told] if told else {}
            if role == "<|message_user|>":
                asked = text
            elif '{"properties"' in asked and (about := re.search(THINGS, asked)):
                said = {name.replace("_", " "): str(value) for name, value in json.loads(text).items()}
                assert said == {name: now[f"{name} of the {about[0]}"] for name in said}
                num_objects += 1
    assert num_objects > 3


@pytest.mark.parametrize("seed", range(4))
def test_a_correction_changes_the_value_and_at_times_names_the_one_before(data, seed):
    now, changed, named = {}, 0, 0
    for _, text, told in events(data, *writer(data, seed).dialogue(16000)):
        if told and told[0] in now:
            old = now[told[0]]
            assert told[1] != old
            changed, named = changed + 1, named + bool(re.search(rf"(?<!\w){re.escape(old)}\b", text))
        now |= [told] if told else {}
    assert changed > 5
    assert 0 < named < changed


def test_facts_are_asked_for_before_between_and_after_several_corrections(data):
    asked, seen = collections.Counter(), collections.Counter()
    for seed in range(6):
        corrections = collections.Counter()
        for role, text, told in events(data, *writer(data, seed).dialogue(8000)):
            if told:
                corrections[told[0]] += 1
            elif role == "<|message_model|>" and (found := answered_in(text)) and corrections[found["k"]]:
                num_corrections = corrections[found["k"]] - 1
                asked[min(3, num_corrections)] += 1
                seen[seed, found["k"], num_corrections] += 1
    assert min(asked[n] for n in range(4)) > 0.1 * asked.total()
    assert any((seed, key, n + 1) in seen for seed, key, n in seen if n)


@pytest.mark.parametrize("kind", ["thing", "mine", "setting"])
def test_sentences_of_training_have_thousands_of_forms(kind):
    for num_forms in (CLAUSES[kind].count * LEADS.count, CHANGES[kind].count, QUESTIONS[kind].count):
        assert num_forms > 500
    for draw in DRAWS:
        rng = random.Random(0)
        assert len({draw(rng, "train", kind) for _ in range(4000)}) > 1500


@pytest.mark.parametrize("kind", ["thing", "mine", "setting"])
def test_two_in_five_corrections_are_told_in_the_words_of_a_statement(kind):
    rng = random.Random(0)
    with_old = sum("{old}" in correction(rng, "train", kind) for _ in range(4000))
    assert 0.12 < with_old / 4000 < 0.3
    unmarked = 0
    for seed in range(2000):
        unmarked += correction(random.Random(seed), "train", kind) == statement_behind_a_draw(seed, kind)
    assert 0.35 < unmarked / 2000 < 0.45


def statement_behind_a_draw(seed, kind):
    rng = random.Random(seed)
    rng.random()
    return statement(rng, "train", kind)


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
    texts = [data.tokenizer.decode(body) for role, _, body, _ in messages_of(data, probe.token_ids) if "user" in role]
    marks = [mark for kind in PROBE_PHRASES for mark in probe_marks(kind, "state", "correct")]
    assert sum(any(mark in text for mark in marks) for text in texts) > num_corrections


def probe_marks(kind, *choices):
    """Of each sentence of a probe its longest part between places: the words that tell what it is."""
    for template in (t for choice in choices for t in getattr(PROBE_PHRASES[kind], choice)):
        parts = re.split(r"`?\{\w+\}`?", template)
        yield re.sub(r" (the|my)$", "", max((part.strip(" .,?") for part in parts), key=len))


@pytest.mark.parametrize("kind", ["thing", "mine", "setting"])
def test_no_training_sentence_has_the_words_of_a_probe(kind):
    rng = random.Random(0)
    said = "\n".join(draw(rng, "train", kind) for draw in DRAWS for _ in range(20_000))
    marks = [
        *probe_marks(kind, "state", "correct", "ask"),
        "I was wrong",
        "News:",
        "used to be",
        "Which was",
        "Do you know",
    ]
    assert len(marks) > 15
    assert [mark for mark in marks if mark in said] == []


def test_probes_and_training_share_no_things():
    names = {split: set() for split in ("train", "probe")}
    for split, found in names.items():
        rng = random.Random(1)
        drawn = [subject(rng, split) for _ in range(4000)]
        found |= {s.key.partition(" of the ")[2] for s in drawn if s.kind == "thing"}
    assert names["train"].isdisjoint(names["probe"])


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
