"""`samebit train drafter` at toy size: what it learns, what it writes, and that the engine serves just that."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from samebit import LLM, EngineConfig, SamplingParams
from samebit.core.config import SpeculativeConfig
from samebit.core.errors import ConfigError
from samebit.engine.engine import Engine
from samebit.speculative.block_config import block_tensors, parse_block_config
from samebit.train.drafters.assess import run as run_assessment
from samebit.train.drafters.block import BlockDrafter
from samebit.train.drafters.command import train_drafters
from samebit.train.drafters.loop import DrafterTrainer, rate_multiplier
from samebit.train.drafters.recipe import DRAFTER_RECIPES, LOSSES
from samebit.train.drafters.students import BlockStudent
from samebit.train.drafters.texts import Texts
from samebit.train.drafters.view import view_of
from samebit.train.feed import Feed
from samebit.train.layout import load_model
from samebit.train.loop import STATE_FILE
from samebit.train.writers import OwnWriter
from tests.driving import make_request, run
from tests.train.drafters.conftest import CPU, METHODS

RECIPE = DRAFTER_RECIPES["toy"]
BLOCK_METHODS = METHODS[:2]
SETTINGS = {"num_threads": 1, "max_num_seqs": 4, "num_pages": 64, "num_window_pages": 64}
# Sums of fp32 in another order.
TOLERANCE = 1e-4


def make_trainer(folder, target_folder, methods=METHODS):
    return DrafterTrainer(RECIPE, load_model(target_folder), folder, methods, CPU)


def held_out_view(trainer, data):
    ids = torch.from_numpy(data.held_out[: 8 * 64].astype("int64")).view(8, 64)
    return trainer.view(ids, torch.ones(8, 64), torch.Generator().manual_seed(0))


def test_all_losses_fall_on_held_out_code(trained, target_folder, data, tmp_path):
    fresh, done = (make_trainer(folder, target_folder) for folder in (tmp_path, trained.run))
    assert [learner.progress.steps for learner in done.learners] == [RECIPE.steps] * 3
    view = held_out_view(fresh, data)
    for before, after in zip(fresh.learners, done.learners, strict=True):
        first, last = (learner.student.losses(view) for learner in (before, after))
        assert last["loss"] < first["loss"] - {"dflash": 0.8, "dspark": 0.3, "mtp": 0.05}[after.method], after.method
    measured = json.loads((trained.run / "dspark" / "acceptance.json").read_text())
    drawn = [entry for entry in measured if entry["temperature"]]
    assert all(entry["length"] > 1.5 for entry in drawn)


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_the_export_has_the_published_tensors_of_what_was_trained(trained, method):
    folder = trained.models[method]
    config = parse_block_config(json.loads((folder / "config.json").read_text()))
    assert config.method == method
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == block_tensors(config)
    state = torch.load(trained.run / method / STATE_FILE, weights_only=True)["weights"]
    assert all(torch.equal(stored[name], state[name].to(torch.bfloat16)) for name in stored)
    assert "| held-out code | 1.0 |" in (folder / "README.md").read_text()


def test_a_confidence_is_calibrated(trained):
    found = json.loads((trained.models["dspark"] / "calibration.json").read_text())
    assert len(found["temperatures"]) == RECIPE.shape.num_drafts
    assert found["num_samples"] > 20
    assert sum(found["ece_after"]) <= sum(found["ece_before"])
    assert not (trained.models["dflash"] / "calibration.json").exists()


def test_depths_are_stored_in_the_model_whose_trunk_is_unchanged(trained, target_folder):
    before, after = (
        {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
        for folder in (target_folder, trained.models["mtp"])
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("model.mtp.") for name in changed)
    assert (trained.models["mtp"] / "tokenizer.json").is_file()


@torch.no_grad()
@pytest.mark.parametrize("method", BLOCK_METHODS)
@pytest.mark.parametrize("length", [1, 17, 40])
def test_the_engine_computes_what_was_trained(trained, target_folder, method, length):
    """Hidden rows and logits of every block of a request, the first behind a prompt of `length` tokens."""
    found, drafter = recorded_blocks(target_folder, trained.models[method], method, list(range(16, 16 + length)))
    student, target = load_student(trained.models[method], target_folder), load_model(target_folder)
    K = student.num_drafts
    assert len(found) > 3
    for tokens, guesses, confidence, hidden in found:
        ids = torch.tensor([[*tokens, *guesses]])
        view = view_of(target, ids, student.drafter.config.target_layer_ids, torch.tensor([[len(tokens) - 1]]))
        rows = student.hidden(view)[0, 0]
        torch.testing.assert_close(hidden[-K:], rows, atol=TOLERANCE, rtol=0)
        logits = drafter._target.logits(hidden[-K:].contiguous())
        torch.testing.assert_close(logits, target.logits(rows), atol=TOLERANCE, rtol=0)
        assert student.logits(view)[0, 0].argmax(-1).tolist() == guesses
        if method == "dspark":
            calibration = json.loads((trained.models[method] / "calibration.json").read_text())
            sure = student.drawn(view, torch.zeros(1, 1, K, 1))[1][0, 0] / torch.tensor(calibration["temperatures"])
            torch.testing.assert_close(confidence, sure.sigmoid(), atol=TOLERANCE, rtol=0)


def load_student(folder, target_folder):
    config = parse_block_config(json.loads((folder / "config.json").read_text()))
    drafter = BlockDrafter(config)
    drafter.load_state_dict({name: t.float() for name, t in load_file(folder / "model.safetensors").items()})
    return BlockStudent(load_model(target_folder), drafter, LOSSES[config.method])


def recorded_blocks(target_folder, folder, method, prompt):
    """(tokens, guesses, confidence, hidden rows) of each step that guessed for one greedy request; and the drafter."""
    speculation = SpeculativeConfig(method=method, model=str(folder))
    engine = Engine(EngineConfig(model=str(target_folder), speculative_config=speculation, **SETTINGS))
    drafter, blocks = engine._runner._place.speculation.drafter, []
    propose = drafter.propose

    def recorded(steps, state):
        found = propose(steps, state)
        if int(steps.lengths[0]):
            hidden = drafter.block_hidden(steps, state)[0]
            blocks.append((int(steps.lengths[0]), found.tokens[0].tolist(), found.confidence[0], hidden))
        return found

    drafter.propose = recorded
    request = make_request("r", prompt, max_tokens=16, temperature=0.0, ignore_eos=True)
    tokens = [*prompt, *run(engine, [request])["r"].token_ids]
    # Behind the last token nothing is known to compare with.
    return [(tokens[: n + 1], *found) for n, *found in blocks if n < len(tokens)], drafter


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_says_the_same_with_a_trained_drafter_in_fewer_steps(trained, target_folder, method):
    model = trained.models["mtp"] if method == "mtp" else target_folder
    wanted = {"method": method} | ({} if method == "mtp" else {"model": str(trained.models[method])})
    prompts = ["def add(a, b):\n", "import os\n", "class Reader:\n    "]
    for params in (SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=5, max_tokens=24)):
        plain = LLM(str(model), **SETTINGS).generate(prompts, params)
        guessed = LLM(str(model), speculative_config=wanted, **SETTINGS).generate(prompts, params)
        assert [a.outputs[0].token_ids for a in plain] == [b.outputs[0].token_ids for b in guessed]
        assert sum(output.metrics.speculation.num_accepted_tokens for output in guessed) > 0


def test_a_drafter_is_measured_with_the_engine(trained, target_folder, corpus_folder, tmp_path):
    arguments = (str(target_folder), str(trained.models["dspark"]), corpus_folder, "toy", tmp_path / "found.json")
    said = run_assessment(*arguments, num_threads=1)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(cell["name"], cell["temperature"]) for cell in found] == [
        (name, temperature) for name in ("held-out code", "dialogues") for temperature in (0.0, 1.0)
    ]
    for cell in found:
        assert cell["length"] == pytest.approx(1 + sum(cell["accepted"]))
        assert f"| {cell['num_drafts']} | {cell['length']:.2f} |" in said
    # The measure of the training code, with other noise.
    own = json.loads((trained.run / "dspark" / "acceptance.json").read_text())
    assert found[1]["length"] == pytest.approx(own[1]["length"], rel=0.3)
    with pytest.raises(ConfigError, match="is no folder, nor one of dflash, dspark, mtp, ngram"):
        run_assessment(str(target_folder), "eagle", corpus_folder, "toy", None)


def test_a_run_goes_on_from_its_folder(trained, target_folder, data, tmp_path):
    (tmp_path / "dflash").mkdir()
    (tmp_path / "dflash" / STATE_FILE).write_bytes((trained.run / "dflash" / STATE_FILE).read_bytes())
    trainer = make_trainer(tmp_path, target_folder, ["dflash"])
    (learner,) = trainer.learners
    state = torch.load(trained.run / "dflash" / STATE_FILE, weights_only=True)
    assert all(torch.equal(p, state["weights"][name]) for name, p in learner.student.parameters.items())
    assert learner.optimiser.state_dict()["adam"]["state"][0]["step"] == RECIPE.steps
    trainer._recipe = dataclasses.replace(RECIPE, steps=2)
    trainer.train(data)
    assert (learner.progress.steps, learner.progress.stages) == (RECIPE.steps + 2, 2)
    other = dataclasses.replace(RECIPE, shape=dataclasses.replace(RECIPE.shape, num_layers=1))
    with pytest.raises(ConfigError, match="another shape"):
        DrafterTrainer(other, load_model(target_folder), tmp_path, ["dflash"], CPU)


def test_a_run_starts_from_an_exported_drafter(trained, target_folder, tmp_path):
    exported = trained.models["dflash"]

    def start(methods, folder=exported):
        return DrafterTrainer(RECIPE, load_model(target_folder), tmp_path, methods, CPU, start=folder)

    (learner,) = start(["dflash"]).learners
    stored = load_file(exported / "model.safetensors")
    assert all(torch.equal(p, stored[name].float()) for name, p in learner.student.parameters.items())
    assert learner.progress.steps == 0
    # What has been trained in the folder since goes before.
    learner.progress.steps = 5
    with torch.no_grad():
        learner.student.parameters["norm.weight"].add_(1)
    learner.save()
    (again,) = start(["dflash"]).learners
    assert torch.equal(again.student.parameters["norm.weight"], stored["norm.weight"].float() + 1)
    assert again.progress.steps == 5
    for methods in (["dflash", "dspark"], ["mtp"]):
        with pytest.raises(
            ConfigError, match=rf"start=.*: is for one of dflash or dspark alone, not for {', '.join(methods)}"
        ):
            start(methods)
    with pytest.raises(ConfigError, match="another shape"):
        start(["dspark"])
    with pytest.raises(ConfigError, match="holds no drafter to start from"):
        start(["dspark"], tmp_path / "nowhere")


def test_drafters_that_learn_side_by_side_are_those_that_learn_alone(target_folder, data, tmp_path):
    recipe = dataclasses.replace(RECIPE, steps=3)
    weights = []
    for methods in (["dflash"], ["dflash", "dspark"]):
        trainer = DrafterTrainer(recipe, load_model(target_folder), tmp_path / str(len(methods)), methods, CPU)
        trainer.train(data)
        weights.append(trainer.learners[0].student.parameters)
    assert all(torch.equal(alone, weights[1][name]) for name, alone in weights[0].items())


def test_a_share_of_the_steps_is_text_of_the_targets_own(target_folder, data):
    target = load_model(target_folder).requires_grad_(False)
    source = OwnWriter(data, length=128, seed=1)
    feed = Feed(data, source, length=128, rows=4, dialogue_share=0.25, seed=1, device=CPU, ring_rows=16)
    own = Texts(RECIPE, target, feed, own_share=1.0, seed=0)
    ids, weights = (torch.cat(parts) for parts in zip(*(own.next() for _ in range(4)), strict=True))
    assert ids.shape == weights.shape == (32, 64)
    # A weight is that of the next token; of each row the first 16 to 32 are given, and the others written.
    given = (weights < 1).sum(1) + 1
    assert 16 <= int(given.min()) < int(given.max()) <= 32
    assert all(bool((row.diff() >= 0).all()) for row in weights)
    is_likeliest = ids[:, 1:] == target.logits(target(ids)[0]).argmax(-1)[:, :-1]
    is_written = torch.arange(1, 64) >= given[:, None]
    # Sixteen rows, of which four are drawn, each used twice.
    assert int((is_likeliest | ~is_written).all(1).sum()) == 24
    assert 2 * own.num_own_tokens == int(is_written.sum())
    none = Texts(RECIPE, target, feed, own_share=0.0, seed=0)
    assert {none.next()[0].shape for _ in range(20)} == {(8, 64), (4, 128)}
    assert none.num_own_tokens == 0


def test_the_rate_rises_and_falls_to_nothing():
    assert rate_multiplier(RECIPE, 0, 0.0) == pytest.approx(1 / RECIPE.warmup)
    assert rate_multiplier(RECIPE, 100, 0.5) == pytest.approx(0.5)
    assert rate_multiplier(RECIPE, 100, 1.0) == pytest.approx(0.0)


@pytest.mark.parametrize("change", ["other tokens", "more tokens"])
def test_a_corpus_in_the_tokens_of_another_model_is_refused(target_folder, corpus_folder, tmp_path, change):
    """As many, in another order; or those that the model's folder has, but more than the model."""
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in (target_folder, corpus_folder)]
    text = json.loads((corpus_folder / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    if change == "other tokens":
        (first, a), (second, b) = list(vocab.items())[-2:]
        vocab[first], vocab[second] = b, a
        folders = folders[1:]
    else:
        text["added_tokens"].append({**text["added_tokens"][0], "id": len(vocab), "content": "<|one_more|>"})
    for folder in folders:
        (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="its tokenizer is not that of"):
        train_drafters(
            str(tmp_path / target_folder.name), tmp_path / corpus_folder.name, tmp_path / "run", ["dflash"], "toy",
            seconds=None, own_share=None, start=None, workers=0, seed=0,
        )  # fmt: skip


def test_what_does_not_exist_is_refused(target_folder, tmp_path):
    with pytest.raises(ConfigError, match="method='eagle': is not one of dflash, dspark, mtp"):
        make_trainer(tmp_path, target_folder, ["eagle"])
