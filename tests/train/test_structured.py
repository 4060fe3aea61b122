"""Tools and JSON in training dialogues: what is declared, asked and answered fits together, and probes hold what is unseen."""

import collections
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebit.engine.tokenizer import Tokenizer
from samebit.train.dialogues import DialogueWriter
from samebit.train.fields import fields
from samebit.train.json_answers import json_task, object_pieces, task_about
from samebit.train.replies import called, is_valid_call, only_message, parsed, same_json, satisfies
from samebit.train.tokens import SPECIAL_TOKENS
from samebit.train.tools import declaration, declare, tool_use
from samebit.train.transcript import ANSWER

SEEDS = st.integers(0, 10**6)
SPLITS = st.sampled_from(["train", "probe"])


@pytest.fixture(scope="module")
def tokenizer(corpus_folder):
    return Tokenizer(corpus_folder)


@given(seed=SEEDS, split=SPLITS)
def test_every_call_is_valid_under_its_declaration(seed, split):
    rng = random.Random(seed)
    tools = declare(rng, split)
    use = tool_use(rng, tools)
    call = json.loads(use.call)
    assert call == {"name": use.name, "args": use.arguments}
    (declared,) = (t for t in json.loads(declaration(tools)) if t["name"] == use.name)
    assert satisfies(call["args"], declared["parameters"])
    assert call["args"].keys() >= set(declared["parameters"]["required"]) > set()


@given(seed=SEEDS, split=SPLITS)
def test_what_a_call_says_stands_in_the_question(seed, split):
    rng = random.Random(seed)
    use = tool_use(rng, declare(rng, split))
    for name, value in use.arguments.items():
        if isinstance(value, bool):
            negated = any(text in use.question for text in (f"not {name}", f"{name}: no", f"{name} = false"))
            assert name in use.question
            assert negated != value
        else:
            assert str(value) in use.question


def test_one_to_four_tools_are_declared_and_optional_arguments_are_left_out_at_times():
    rng = random.Random(0)
    counts, left_out, given_all = set(), 0, 0
    for _ in range(300):
        tools = declare(rng)
        counts.add(len(tools))
        use = tool_use(rng, tools)
        (tool,) = (t for t in tools if t.name == use.name)
        is_all = len(use.arguments) == len(tool.arguments)
        left_out += not is_all
        given_all += is_all and tool.required < len(tool.arguments)
    assert counts == {1, 2, 3, 4}
    assert left_out > 20
    assert given_all > 20


def test_probes_share_no_tool_with_training():
    names = {}
    for split in ("train", "probe"):
        rng = random.Random(0)
        names[split] = {tool.name for _ in range(1000) for tool in declare(rng, split)}
    assert names["train"].isdisjoint(names["probe"])
    assert len(names["train"]) > 1500


def test_no_request_of_training_has_the_words_of_a_probe():
    rng = random.Random(0)
    asked = [tool_use(rng, declare(rng)).question for _ in range(4000)]
    known = {"port": "8080", "owner": "Ada"}
    wanted = [
        task for _ in range(4000) for task in (json_task(rng, "train"), task_about(rng, "train", "red oven", known))
    ]
    said = "\n".join((*asked, *(task.question for task in wanted)))
    marks = (
        "Go ahead and", "I want to", "It is time to", "The details are", "Would you", "Help me", "Represent this", "a JSON object that",
        "convert the text", "according to {", "Summarise", "I need the",
    )  # fmt: skip
    assert [mark for mark in marks if mark in said] == []
    probes = [tool_use(rng, declare(rng, "probe")).question for _ in range(400)]
    probes += [
        task.question
        for _ in range(400)
        for task in (json_task(rng, "probe"), task_about(rng, "probe", "red oven", known))
    ]
    assert all(any(mark in text for mark in marks) for text in probes)
    assert not any(told in said for told in ("comes with", "I received"))


@given(seed=SEEDS, split=SPLITS)
def test_what_an_object_holds_stands_in_the_question(seed, split):
    task = json_task(random.Random(seed), split)
    for name, value in task.expected.items():
        assert (name if isinstance(value, bool) else str(value)) in task.question


def test_a_name_of_a_field_tells_no_type():
    rng = random.Random(0)
    kinds = collections.defaultdict(set)
    for field in (f for _ in range(4000) for f in fields(rng, "train", 2)):
        kinds[field.name].add("choice" if "enum" in field.schema else field.schema["type"])
    assert len(kinds) > 1000
    assert sum(len(found) > 2 for found in kinds.values()) > 200


@given(seed=SEEDS, split=SPLITS)
def test_an_object_satisfies_the_schema_in_its_question(seed, split):
    task = json_task(random.Random(seed), split)
    assert satisfies(task.expected, task.schema)
    assert json.dumps(task.schema, separators=(",", ":"), sort_keys=True, ensure_ascii=False) in task.question
    assert set(task.schema["required"]) == task.expected.keys()


@given(seed=SEEDS, split=SPLITS)
def test_an_object_about_a_thing_holds_what_was_told(seed, split):
    known = {"port": "8080", "owner": "Ada", "branch": "fix-a", "price": "12 dollars", "room number": "7"}
    task = task_about(random.Random(seed), split, "red lantern", known)
    assert satisfies(task.expected, task.schema)
    assert "red lantern" in task.question
    assert len(task.expected) == 4
    for name, value in task.expected.items():
        assert str(value) == known[name.replace("_", " ")]
        assert isinstance(value, int) == (name in ("port", "room_number"))


@settings(max_examples=30)
@given(seed=SEEDS, split=SPLITS)
def test_an_object_in_pieces_is_encoded_as_the_whole_and_its_values_are_answers(data, seed, split):
    task = json_task(random.Random(seed), split)
    pieces = object_pieces(task.expected)
    whole = json.dumps(dict(task.expected), ensure_ascii=False)
    assert "".join(text for text, _ in pieces) == whole
    apart = [i for text, _ in pieces for i in data.tokenizer.encode(text).ids]
    assert apart == data.tokenizer.encode(whole).ids
    values = [value if isinstance(value, str) else json.dumps(value) for value in task.expected.values()]
    assert [text.strip() for text, token_class in pieces if token_class == ANSWER] == values


@pytest.mark.parametrize("seed", range(5))
def test_a_tool_probe_expects_a_valid_call_of_what_it_declares(data, tokenizer, seed):
    probe = DialogueWriter(data.tokenizer, data.train, data.sentences, seed, "probe").tool_probe()
    assert SPECIAL_TOKENS[probe.prompt[-1]] == "<|message_model|>"
    message = only_message(tokenizer, probe.reply)
    assert is_valid_call(message, probe.tools)
    assert same_json(called(message), probe.call)
    text = data.tokenizer.decode(probe.prompt, skip_special_tokens=False)
    declared = text.partition("tool_declare<|content_xml|>")[2].partition("<|end_message|>")[0]
    assert same_json(json.loads(declared), list(probe.tools))


@pytest.mark.parametrize("seed", range(5))
def test_a_json_probe_expects_an_object_that_fits_its_schema(data, tokenizer, seed):
    probe = DialogueWriter(data.tokenizer, data.train, data.sentences, seed, "probe").json_probe()
    assert SPECIAL_TOKENS[probe.prompt[-1]] == "<|message_model|>"
    message = only_message(tokenizer, probe.reply)
    assert message.kind == "<|content_text|>"
    assert same_json(parsed(message), probe.expected)
    assert satisfies(parsed(message), probe.schema)
