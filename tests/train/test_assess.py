"""Assessing a model by generating with the engine: what is asked, what counts as right, and what the card says of it."""

import dataclasses
import json
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from samebit import LLM
from samebit.core.errors import ConfigError
from samebit.core.request import CompletionOutput, RequestOutput
from samebit.engine.tokenizer import Tokenizer
from samebit.train import assess as arms
from samebit.train.assess import _Subject, assess, code_prefixes, judge_call, judge_fact, judge_json
from samebit.train.assessment import (
    Answers,
    Assessment,
    Completions,
    HeldOutLoss,
    Nats,
    Recall,
    markdown,
    read_assessment,
)
from samebit.train.dialogues import DialogueWriter
from samebit.train.export import export, write_card
from samebit.train.heldout import HeldOutPackage, documents_stream, held_out_packages, measured, token_losses, windows
from samebit.train.layout import load_model
from samebit.train.model import Inkling
from samebit.train.recipe import RECIPES
from samebit.train.tokens import DOCUMENT_START
from tests.train.conftest import tiny_corpus

END = 6


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(corpus_folder, tmp_path_factory):
    """An exported toy that has learnt nothing."""
    folder = tmp_path_factory.mktemp("fresh") / "toy"
    export(Inkling(RECIPES["toy"].raw), corpus_folder, folder, [], name="toy")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def packages(corpus_folder, data):
    return held_out_packages(corpus_folder, data)


@pytest.fixture(scope="module")
def found(folder, corpus_folder):
    return assess(str(folder), corpus_folder, probes=1, num_threads=1)


def writer(data, seed=0):
    return DialogueWriter(data.tokenizer, data.held_out, data.sentences, seed, "probe")


def answers(*counts):
    return Answers(*counts)


def made_up(**changes):
    """An assessment whose figures are all different."""
    held_out = [
        HeldOutLoss("gamma", 64, Nats(693.1471805599453, 500, 1000)),
        HeldOutLoss("delta", 64, Nats(2079.4415416798357, 500, 1000)),
    ]
    given_ = {
        "model": "toy",
        "fingerprint": "fp_1",
        "profile": {"device": "cpu", "threads": 2},
        "corpus": "abcd" * 16,
        "probes": 4,
        "seconds": 12.0,
        "held_out": held_out,
        "recall": [
            Recall(250, 0, answers(4, 4, 3, 4)),
            Recall(250, 1, answers(4, 4, 2, 3)),
            Recall(250, 3, answers(4, 2, 0, 1)),
        ],
        "tools": answers(16, 16, 8, 12),
        "familiar_tools": answers(16, 16, 15, 15),
        "json": answers(16, 15, 4, 10),
        "completions": Completions(16, 256, 6, 2),
    }
    return Assessment(**given_ | changes)


def test_held_out_texts_are_those_of_the_corpus(packages):
    assert [(p.name, p.texts) for p in packages] == [(p.name, p.texts) for p in tiny_corpus().held_out]


def test_a_manifest_of_other_documents_is_refused(corpus_folder, data, tmp_path):
    manifest = json.loads((corpus_folder / "manifest.json").read_text())
    manifest["held_out"][0]["files"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="does not tell of 4"):
        held_out_packages(tmp_path, data)


@given(length=st.integers(1, 500), context=st.integers(1, 64), most=st.integers(1, 20))
def test_windows_do_not_overlap_and_are_whole(length, context, most):
    found = windows(range(length), context, most)
    assert len(found) == min(most, max(1, length // context))
    assert all(len(window) == min(context, length) for window in found)
    assert all(a[-1] < b[0] for a, b in pairwise(found))
    assert all(window == list(range(window[0], window[0] + len(window))) for window in found)


def test_the_engines_loss_is_the_training_models(folder, packages, tokenizer):
    llm = LLM(folder, num_threads=1, max_model_len=256)
    stream = documents_stream(tokenizer, packages[0].texts)
    second = stream.index(DOCUMENT_START, 1)
    contexts = [*windows(stream, 96, 2), stream[second - 40 : second + 56]]
    model = load_model(folder)
    with torch.no_grad():
        for context, losses in zip(contexts, token_losses(llm, contexts), strict=True):
            ids = torch.tensor([context])
            logits = model.logits(model(ids)[0])[0, :-1]
            expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            torch.testing.assert_close(torch.tensor(losses), expected, atol=1e-4, rtol=0)
    total = measured(llm, contexts)
    assert total.num_tokens == 3 * 95
    # Control tokens are predicted, and stand for no byte of text.
    predicted = [t for c in contexts for t in c[1:] if t != DOCUMENT_START]
    assert total.num_bytes == len(b"".join(map(tokenizer.token_bytes, predicted)))
    assert total.nats == pytest.approx(sum(sum(losses) for losses in token_losses(llm, contexts)))


def test_bits_per_byte_count_all_bytes_alike():
    one, other = (loss.measured for loss in made_up().held_out)
    assert one.bits_per_byte == pytest.approx(1)
    assert (one + other).bits_per_byte == pytest.approx(2)
    assert (one + other).per_token == pytest.approx(2.7725887)


def test_a_prefix_is_whole_lines_with_text_behind_them(packages, data):
    texts = tuple(text.strip("\n") + "\n" for package in packages for text in package.texts)
    prefixes = code_prefixes([HeldOutPackage("all", texts)], data.tokenizer, 40)
    assert prefixes == code_prefixes([HeldOutPackage("all", texts)], data.tokenizer, 40)
    assert len(set(prefixes)) > 30
    for prefix in prefixes:
        assert 200 <= len(data.tokenizer.encode(prefix).ids) <= 600
        assert any(f"\n{prefix}\n" in f"\n{text}" and not text.endswith(f"{prefix}\n") for text in texts)


def test_texts_too_short_for_a_prefix_are_refused(data):
    with pytest.raises(ConfigError, match="0 of 2 prefixes"):
        code_prefixes([HeldOutPackage("short", ("import this\n" * 4,))], data.tokenizer, 2)


def test_a_fact_is_exact_if_the_whole_turn_is_and_right_if_the_value_is(data, tokenizer):
    made = writer(data)
    for num_corrections in (0, 1, 3):
        probe = made.probe(250, num_corrections)
        reply = probe.token_ids[probe.reply[0] :]
        assert reply[-1] == END
        assert judge_fact(tokenizer, probe, reply) == (True, True)
        # It has not stopped by itself, or goes on.
        assert judge_fact(tokenizer, probe, reply[:-1]) == (False, True)
        assert judge_fact(tokenizer, probe, [*reply[:-1], *reply]) == (False, True)
        # Another word in front of it, and another value.
        assert judge_fact(tokenizer, probe, [reply[0], *tokenizer.encode("So", allow_special=False), *reply[1:]]) == (
            False,
            True,
        )
        begin, end = (i - probe.reply[0] for i in probe.value)
        other = tokenizer.encode(" quite different.", allow_special=False)
        assert judge_fact(tokenizer, probe, [*reply[:begin], *other, *reply[end:]]) == (False, False)


def test_a_value_that_goes_on_is_not_the_value(data, tokenizer):
    probe = writer(data).probe(250)
    end = probe.value[1] - probe.reply[0]
    reply = probe.token_ids[probe.reply[0] :]
    longer = tokenizer.encode("5.", allow_special=False)
    assert judge_fact(tokenizer, probe, [*reply[: end - 1], *longer, *reply[end:]]) == (False, False)


def test_the_expected_call_is_exact_and_another_argument_is_not(data, tokenizer):
    made = writer(data)
    for _ in range(20):
        probe = made.tool_probe()
        assert judge_call(tokenizer, probe, probe.reply) == (True, True)
        other = dataclasses.replace(probe, call={"name": probe.call["name"], "args": {"hour": 7}})
        assert judge_call(tokenizer, other, probe.reply) == (False, True)
        none = dataclasses.replace(probe, tools=[t for t in probe.tools if t["name"] != probe.call["name"]])
        assert judge_call(tokenizer, none, probe.reply) == (True, False)
        assert judge_call(tokenizer, probe, probe.reply[:-1]) == (False, False)


def test_expected_json_is_exact_and_must_be_the_answers_text(data, tokenizer):
    made = writer(data)
    for _ in range(20):
        probe = made.json_probe()
        assert judge_json(tokenizer, probe, probe.reply) == (True, True)
        other = dataclasses.replace(probe, expected={**probe.expected, "hour": 7})
        assert judge_json(tokenizer, other, probe.reply) == (False, True)
        string = dataclasses.replace(probe, schema={"type": "string"})
        assert judge_json(tokenizer, string, probe.reply) == (True, False)
        spelled = tokenizer.decode(probe.reply, skip_special_tokens=False)
        for wrong in (spelled.replace("content_text", "content_thinking"), spelled.replace("{", "So: {", 1)):
            token_ids = tokenizer.encode(wrong, allow_special=True)
            assert judge_json(tokenizer, probe, token_ids) == (False, False)


class Oracle:
    """Answers prompts it knows with the reply it was given, anything else with an endless line."""

    def __init__(self, tokenizer, replies):
        self.info = SimpleNamespace(max_length=8192)
        self._tokenizer, self._replies = tokenizer, {tuple(prompt): reply for prompt, reply in replies}
        self.params = set()

    def get_tokenizer(self):
        return self._tokenizer

    def generate(self, prompts, params):
        self.params.add((params.temperature, params.max_tokens, params.ignore_eos))
        found = []
        for prompt in prompts:
            reply = self._replies.get(tuple(prompt), [20] * params.max_tokens)
            reason = "stop" if reply[-1] == END else "length"
            output = CompletionOutput(
                index=0,
                text="",
                token_ids=reply,
                cumulative_logprob=None,
                logprobs=None,
                finish_reason=reason,
                stop_reason=None,
            )
            found.append(RequestOutput(request_id="0", prompt=None, prompt_token_ids=prompt, outputs=[output]))
        return found


def subject(oracle, data):
    return _Subject(oracle, data.tokenizer, data.held_out, data.sentences)


def test_each_cell_counts_its_own_answers(data, tokenizer):
    known = []
    for num_corrections in (0, 1, 3):
        made = writer(data, 250_000 + num_corrections)
        probes = [made.probe(250, num_corrections) for _ in range(4)]
        known += [(p.token_ids[: p.reply[0]], p.token_ids[p.reply[0] :]) for p in probes[num_corrections:]]
    oracle = Oracle(tokenizer, known)
    found = {(r.distance, r.num_corrections): r.answers for r in arms._recall(subject(oracle, data), 4)}
    assert [found[250, n] for n in (0, 1, 3)] == [answers(4, 4, 4, 4), answers(4, 3, 3, 3), answers(4, 1, 1, 1)]
    assert {answer for key, answer in found.items() if key[0] != 250} <= {answers(4, 0, 0, 0)}
    assert {(t, ignored) for t, _, ignored in oracle.params} == {(0.0, False)}


def test_calls_and_json_are_counted(data, tokenizer):
    calls, objects = writer(data, 1), writer(data, 2)
    tool_probes, json_probes = [calls.tool_probe() for _ in range(6)], [objects.json_probe() for _ in range(6)]
    known = [(p.prompt, p.reply) for p in (*tool_probes[:4], *json_probes[:3])]
    asked = subject(Oracle(tokenizer, known), data)
    assert arms._tools(asked, 6, "probe") == answers(6, 4, 4, 4)
    assert arms._tools(asked, 6, "train") == answers(6, 0, 0, 0)
    assert arms._json_answers(asked, 6) == answers(6, 3, 3, 3)


def test_completions_that_loop_and_that_stop_are_counted(packages, data, tokenizer):
    prefixes = code_prefixes(packages, data.tokenizer, 6)
    prompts = [[DOCUMENT_START, *tokenizer.encode(prefix, allow_special=False)] for prefix in prefixes]
    natural = tokenizer.encode(packages[0].texts[0], allow_special=False)[:256]
    known = [(prompts[0], natural), (prompts[1], [*natural[:40], END])]
    found = arms._completions(subject(Oracle(tokenizer, known), data), prefixes)
    assert found == Completions(6, 256, 4, 1)


def test_a_whole_assessment_is_a_function_of_model_corpus_and_probes(found, folder, corpus_folder):
    again = assess(str(folder), corpus_folder, probes=1, num_threads=1)
    assert msgspec.structs.replace(again, seconds=found.seconds) == found
    assert found.model == "toy"
    assert found.corpus == json.loads((corpus_folder / "manifest.json").read_text())["digest"]
    assert (found.tools.count, found.json.count, found.completions.count) == (4, 4, 4)
    assert (250, 0) in {(r.distance, r.num_corrections) for r in found.recall}
    assert all(r.answers.count == 1 for r in found.recall)
    # What has learnt nothing knows nothing.
    assert not any(r.answers.exact for r in found.recall)


def test_what_is_too_long_for_the_model_is_left_out(found):
    assert {loss.context for loss in found.held_out} == {512}
    assert 0 < len(found.recall) < len(arms.DISTANCES) * len(arms.CORRECTIONS)
    assert max(r.distance for r in found.recall) < 1000


def test_an_assessment_is_read_as_it_was_written(tmp_path, found):
    for assessment in (found, made_up()):
        assessment.write(tmp_path / "a.json")
        assert read_assessment(tmp_path / "a.json") == assessment


@pytest.mark.parametrize("text", ["", "[]", '{"model": "toy"}'])
def test_anything_else_is_no_assessment(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="is not an assessment"):
        read_assessment(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="is not an assessment"):
        read_assessment(tmp_path / "none.json")


def test_the_markdown_shows_all_figures():
    text = markdown(made_up())
    for line in (
        "| 250 | 3 | 4 | 0.0 % | 25.0 % | 50.0 % |",
        "Facts stated once: **75.0 %** of 4 exact. Facts updated since: **25.0 %** of 8 exact.",
        "| tool calls, of unseen tools in unseen sentences | 16 | 50.0 % | 75.0 % | 100.0 % |",
        "| tool calls, drawn anew as training's are | 16 | 93.8 % | 93.8 % | 100.0 % |",
        "| JSON | 16 | 25.0 % | 62.5 % | 93.8 % |",
        "| **all** | 1000 | 2.7726 | 2.0000 |",
        "| gamma | 500 | 1.3863 | 1.0000 |",
        "Of 16 completions of 256 tokens **37.5 %** end in a loop",
        "12.5 % stopped by themselves.",
        "`samebit train assess toy DATA --probes 4`",
    ):
        assert line in text, line


def test_a_card_with_an_assessment_replaces_that_without(folder, corpus_folder, tmp_path):
    before = (folder / "README.md").read_text()
    assert "is the likeliest after those before it" in before
    stage = {"stage": 1, "steps": 50, "tokens": 3_000_000, "seconds": 9.0}
    evaluation = {"loss": {"64": 1.5}, "bits_per_byte": 0.75, "recall": []}
    (tmp_path / "history.json").write_text(json.dumps([{**stage, "evaluation": evaluation}]))
    made_up().write(tmp_path / "a.json")
    write_card(folder, corpus_folder, tmp_path / "history.json", tmp_path / "a.json")
    text = (folder / "README.md").read_text()
    assert markdown(made_up()) in text
    assert "is the likeliest" not in text
    assert "| 1 | 50 | 3.0 M | 9 | 1.500 at 64 | 0.7500 |" in text
    assert "samebit train nano DATA RUN --stage 1" in text
    assert "- **MIT**: alpha 1.0, beta 1.0" in text
    assert "Held out: gamma." in text
    with pytest.raises(ConfigError, match="is not the history"):
        write_card(folder, corpus_folder, tmp_path / "none.json", None)


def test_training_and_its_card_load_no_engine():
    # A machine to train on has few packages; the engine needs more.
    check = "import sys, samebit.train.loop, samebit.train.export; sys.exit('samebit.engine.llm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_model_without_message_tokens_is_refused(tmp_path):
    Backend(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the message tokens"):
        arms._dialogue_tokenizer(str(tmp_path))


def test_the_command_prints_and_writes(folder, corpus_folder, tmp_path):
    command = [sys.executable, "-c", "from samebit.cli import app; app()", "train", "assess", folder, corpus_folder]

    def run(*flags):
        given_ = [*map(str, command), "--probes", "1", "--num-threads", "1", *map(str, flags)]
        return subprocess.run(given_, capture_output=True, text=True, check=False)

    done = run("--json", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout == markdown(read_assessment(tmp_path / "a.json")) + "\n"
    refused = run("--json", tmp_path / "nowhere" / "a.json")
    assert refused.returncode == 1
    assert refused.stderr.startswith("samebit: error: ")
