"""`samebit train nano --smoke`: the whole path from installed packages to a served model, as a person would call it."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from samebit import LLM, SamplingParams
from samebit.core.errors import ConfigError
from samebit.engine.tokenizer import Tokenizer
from samebit.train.card import card
from samebit.train.export import SHARD_BYTES, export
from samebit.train.layout import load_model
from samebit.train.loop import HISTORY_FILE, STATE_FILE, Trainer
from samebit.train.recipe import RECIPES
from samebit.train.tokens import load_data

CALL = [sys.executable, "-c", "from samebit.cli import app; app()", "train", "nano"]
TOY = RECIPES["toy"]
CPU = torch.device("cpu")
# Sums of fp32 in another order.
TOLERANCE = 2e-4


def run(*arguments, **settings):
    return subprocess.run([*CALL, *map(str, arguments)], capture_output=True, text=True, check=False, **settings)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """One run that is kept: what it said, and its folders."""
    folder = tmp_path_factory.mktemp("smoke")
    data, state = folder / "data", folder / "run"
    done = run(data, state, "--smoke")
    assert done.returncode == 0, done.stderr
    history = json.loads((state / HISTORY_FILE).read_text())
    return SimpleNamespace(said=done.stderr, data=data, run=state, model=state / "model", history=history)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_loss_falls_in_every_stage_and_is_told(smoke):
    line = re.search(r"held-out nats/token, fresh and after each stage: (.*)", smoke.said)[1]
    fresh, *losses = map(float, line.split(", "))
    assert losses == [pytest.approx(entry["evaluation"]["loss"]["256"], abs=1e-3) for entry in smoke.history]
    assert losses[1] < losses[0] < fresh - 1
    assert [entry["stage"] for entry in smoke.history] == [1, 2]
    recalled = [(cell["distance"], cell["num_corrections"]) for cell in smoke.history[1]["evaluation"]["recall"]]
    assert recalled == [(250, 0), (250, 1), (250, 3)]


def test_the_history_tells_where_time_went(smoke):
    for entry in smoke.history:
        assert list(entry["phases"]) == ["data", "model", "first dialogues", "steps", "saving", "evaluation"]
        assert all(seconds >= 0 for seconds in entry["phases"].values())


def test_a_card_says_how_to_come_to_a_stage_that_began_with_a_checkpoint(smoke, tmp_path):
    assert [entry["from_checkpoint"] for entry in smoke.history] == [False, False]
    trainer = Trainer(TOY, tmp_path, CPU, start=smoke.model)
    trainer.train(load_data(smoke.data), 2)
    (entry,) = json.loads((tmp_path / HISTORY_FILE).read_text())
    text = card(
        trainer.model, json.loads((smoke.data / "manifest.json").read_text()), [smoke.history[0], entry], "nano"
    )
    commands = re.findall(r"^samebit train (?:nano|export).*$", text, re.MULTILINE)
    assert commands == [
        "samebit train nano DATA RUN --stage 1",
        "samebit train export DATA RUN BEFORE",
        "samebit train nano DATA RUN --stage 2 --start BEFORE",
        "samebit train export DATA RUN nano",
    ]


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_was_resumed_equals_one_that_was_not(smoke, tmp_path):
    data = load_data(smoke.data)
    trainer = Trainer(TOY, tmp_path, CPU)
    fresh = trainer.model.weights["embed"].detach().clone()
    for number in (1, 2):
        trainer.train(data, number)
    resumed = torch.load(smoke.run / STATE_FILE, weights_only=True)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, resumed["model"][name]), name
    assert resumed["progress"]["steps"] == trainer.progress.steps == 50
    assert not torch.equal(trainer.model.weights["embed"], fresh)
    biases = [tensor for name, tensor in resumed["model"].items() if name.endswith("router_bias")]
    assert biases
    assert all(bias.any() for bias in biases)


def test_the_engine_says_what_the_exported_model_says(smoke):
    llm = LLM(str(smoke.model), num_threads=1, max_model_len=512, num_pages=64, num_window_pages=64)
    question = [{"role": "user", "content": "What is the price of the old table?"}]
    assert llm.chat(question, SamplingParams(max_tokens=8))[0].outputs[0].token_ids
    token_ids = Tokenizer(smoke.model).encode("def merge_index(index, other=None):\n", allow_special=False)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scored = llm.generate([token_ids], params)[0].prompt_logprobs
    with torch.no_grad():
        stored = load_model(smoke.model)
        logprobs = stored.logits(stored(torch.tensor([token_ids]))[0])[0].log_softmax(-1)
    for i in range(1, len(token_ids)):
        assert scored[i][token_ids[i]].logprob == pytest.approx(float(logprobs[i - 1, token_ids[i]]), abs=1e-4)


def test_transformers_says_what_the_exported_model_says(smoke):
    from transformers import InklingForConditionalGeneration, logging

    logging.set_verbosity_error()
    reference, report = InklingForConditionalGeneration.from_pretrained(
        smoke.model, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # The tower is as small as can be and no part of the text model: transformers draws its weights.
    assert all(key.startswith("model.vision_tower.") for key in report["missing_keys"])
    token_ids = torch.arange(16, 316)[None]
    stored = load_model(smoke.model)
    with torch.no_grad():
        theirs = reference(token_ids).logits
        torch.testing.assert_close(stored.logits(stored(token_ids)[0]), theirs, atol=TOLERANCE, rtol=0)


def test_the_exported_folder_is_whole_and_not_written_over(smoke):
    stored = load_model(smoke.model)
    assert stored.num_parameters() == Trainer(TOY, smoke.run, CPU).model.num_parameters()
    assert max(p.stat().st_size for p in smoke.model.glob("*.safetensors")) < SHARD_BYTES + 100_000
    card = (smoke.model / "README.md").read_text()
    assert "| 2 | 50 |" in card
    held_out = [p["name"] for p in json.loads((smoke.data / "manifest.json").read_text())["held_out"]]
    assert f"Held out: {', '.join(held_out)}." in card
    with pytest.raises(ConfigError, match="not empty"):
        export(stored, smoke.data, smoke.model, [])


def test_a_stage_takes_dialogues_from_other_processes(smoke, tmp_path):
    # One thread: the writer needs a core too.
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run(smoke.data, tmp_path, "--recipe", "toy", "--stage", 1, "--workers", 1, env=one)
    assert done.returncode == 0, done.stderr
    assert "bits/byte" in done.stderr
    assert (tmp_path / STATE_FILE).is_file()


def test_a_folder_that_holds_something_is_not_for_a_smoke_run(tmp_path):
    (tmp_path / "note").write_text("mine")
    done = run(tmp_path, "--smoke")
    assert done.returncode == 1
    assert "is not empty" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("data",), ("data", "run"), ("--stage", 1)])
def test_a_stage_needs_its_folders_and_number(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "give DATA, RUN and --stage, or --smoke" in done.stderr
