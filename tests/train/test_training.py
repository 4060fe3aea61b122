"""Training: the optimiser, batches, resuming, and the whole path from a corpus to a served model."""

import dataclasses
import json

import pytest
import torch

from samebit import LLM, SamplingParams
from samebit.core.errors import ConfigError
from samebit.engine.tokenizer import Tokenizer
from samebit.train.dialogues import DialogueWriter
from samebit.train.evaluate import evaluate, recall
from samebit.train.export import SHARD_BYTES, export
from samebit.train.feed import Feed
from samebit.train.layout import load_model
from samebit.train.loop import HISTORY_FILE, Trainer, rate_multiplier
from samebit.train.model import Inkling
from samebit.train.optim import is_matrix, orthogonalised
from samebit.train.recipe import RECIPES, Stage
from samebit.train.writers import OwnWriter, WriterProcesses
from tests.train.conftest import VOCAB

TOY = RECIPES["toy"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_feed(data, source=None, **changes):
    given = {"length": 64, "rows": 8, "dialogue_share": 0.25, "seed": 1, "device": CPU, "ring_rows": 16} | changes
    return Feed(data, source or OwnWriter(data, length=given["length"], seed=1), **given)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 16, 48), (2, 48, 16)])
def test_orthogonalised_matrices_keep_singular_vectors_and_lose_lengths(shape):
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalised(given)
    lengths = torch.linalg.svdvals(found)
    # A nearly singular direction needs more than five iterations.
    assert lengths.max() < 1.3
    assert lengths.median() > 0.6
    u, _, v = torch.linalg.svd(given, full_matrices=False)
    inside = u.mT @ found @ v.mT
    assert (inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-2


def test_every_map_is_muons_and_nothing_else():
    model = Inkling(TOY.raw)
    for name, parameter in model.named_parameters():
        key = name.rpartition(".")[2]
        is_map = (
            parameter.ndim >= 2 and not key.endswith("_conv") and key not in ("embed", "unembed", "router", "rel_proj")
        )
        assert is_matrix(key) == is_map, name


def test_the_rate_rises_stays_and_falls():
    stage = Stage(length=1, rows=1, dialogue_share=0, seconds=1, decay_share=0.5, warmup=10)
    assert rate_multiplier(stage, 0, 0.0) == pytest.approx(0.1)
    assert rate_multiplier(stage, 50, 0.4) == 1.0
    assert rate_multiplier(stage, 50, 0.75) == pytest.approx(0.5)
    assert rate_multiplier(stage, 50, 0.999) == stage.final_rate
    assert rate_multiplier(dataclasses.replace(stage, decay_share=0.0), 50, 0.999) == 1.0


def test_targets_are_the_next_tokens_and_values_weigh_by_class(data):
    batch = make_feed(data, repeat_every=None).batch()
    assert torch.equal(batch.token_ids[:, 1:], batch.targets[:, :-1])
    assert batch.num_code == 6
    assert (batch.weights[:6] == 1).all()
    again = make_feed(data, repeat_every=None).batch()
    assert torch.equal(again.token_ids, batch.token_ids)
    weights = make_feed(data, dialogue_share=1.0, length=512).batch().weights.unique()
    torch.testing.assert_close(weights, torch.tensor([0.1, 1.0, 2.0, 4.0]))


def test_dialogues_come_from_other_processes_too(data, corpus_folder):
    with WriterProcesses(corpus_folder, length=512, seed=1, count=1) as source:
        feed = make_feed(data, source, length=512, ring_rows=80)
        feed.refill(at_least=65)
        assert feed.num_written >= 65
        assert feed.batch().token_ids.shape == (8, 512)
        (process,) = source._processes
        process.kill()
        process.join()
        with pytest.raises(ConfigError, match="have died"):
            feed.refill(at_least=10**6)


def short(steps):
    first = dataclasses.replace(TOY.stages[0], steps=steps, seconds=1e-3)
    return dataclasses.replace(
        TOY, stages=(first, dataclasses.replace(first, decay_share=0.5)), probes=1, contexts=(64,)
    )


def test_a_run_that_was_interrupted_between_stages_ends_with_the_same_weights(data, tmp_path):
    recipe = short(3)
    whole = Trainer(recipe, tmp_path / "whole", CPU)
    for number in (1, 2):
        whole.train(data, number)
    Trainer(recipe, tmp_path / "parts", CPU).train(data, 1)
    resumed = Trainer(recipe, tmp_path / "parts", CPU)
    assert resumed.progress.steps == 3
    resumed.train(data, 2)
    fresh = Trainer(recipe, tmp_path / "fresh", CPU).model.state_dict()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert not torch.equal(whole.model.weights["embed"], fresh["weights.embed"])
    history = json.loads((tmp_path / "parts" / HISTORY_FILE).read_text())
    assert [entry["stage"] for entry in history] == [1, 2]
    for entry in history:
        assert list(entry["phases"]) == ["first dialogues", "steps", "saving", "evaluation"]
        assert all(seconds >= 0 for seconds in entry["phases"].values())


def test_drafts_have_no_say_in_the_trunk(data, tmp_path):
    batch = make_feed(data).batch()
    trainer = Trainer(TOY, tmp_path, CPU)
    losses, _ = trainer.losses(batch)
    assert losses.shape == (3,)
    losses[1:].sum().backward()
    touched = {name for name, p in trainer.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched
    assert all(name.startswith("depths.") for name in touched)


@torch.no_grad()
def test_depth_j_is_taught_the_token_j_plus_2_ahead(data, tmp_path):
    batch = make_feed(data).batch()
    trainer = Trainer(TOY, tmp_path, CPU)
    losses, _ = trainer.losses(batch)
    model = trainer.model
    whole = torch.cat([batch.token_ids[:, :1], batch.targets], dim=1)
    drafted = model.draft(model(batch.token_ids)[0], batch.token_ids)
    for j, hidden in enumerate(drafted):
        logprobs = model.logits(hidden)[:, : -1 - j].log_softmax(-1)
        ahead = whole[:, 2 + j :]
        weights = batch.weights[:, 1 + j :]
        expected = -(logprobs.gather(-1, ahead[..., None])[..., 0] * weights).sum() / weights.sum()
        torch.testing.assert_close(losses[1 + j], expected)


class Oracle(torch.nn.Module):
    """Foresees every next token but those at `mistakes`, which it takes for token 0."""

    def __init__(self, mistakes):
        super().__init__()
        self.weights = {"embed": torch.zeros(1)}
        self._mistakes = mistakes

    def forward(self, token_ids):
        ahead = torch.nn.functional.pad(token_ids[:, 1:], (0, 1))
        ahead[:, [place - 1 for place in self._mistakes]] = 0
        return ahead, []

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden, VOCAB).float()


def test_recall_counts_what_greedy_decoding_would_say(data):
    probe = DialogueWriter(data.tokenizer, data.held_out, data.sentences, 0, "probe").probe(250, 1)

    def counted(*mistakes):
        found = recall(Oracle(mistakes), [probe], 250, 1)
        return found.replies, found.values

    begin, end = probe.reply
    assert counted() == (1, 1)
    assert counted(begin - 1, end) == (1, 1)
    assert counted(begin) == (0, 1)
    assert counted(probe.value[0]) == counted(end - 1) == (0, 0)


def test_a_stage_that_the_recipe_lacks_is_refused(data, tmp_path):
    with pytest.raises(ConfigError, match="stage=3"):
        Trainer(TOY, tmp_path, CPU).train(data, 3)


@pytest.fixture(scope="module")
def trained(data, corpus_folder, tmp_path_factory):
    """A toy model after both stages, and the folder that it was exported to."""
    folder = tmp_path_factory.mktemp("toy")
    trainer = Trainer(TOY, folder / "run", CPU)
    found = [trainer.train(data, number) for number in (1, 2)]
    history = json.loads((folder / "run" / HISTORY_FILE).read_text())
    export(trainer.model, corpus_folder, folder / "model", history, name="toy")
    return trainer.model, found, folder / "model"


def test_training_learns(data, trained):
    model, found, _ = trained
    fresh = evaluate(Inkling(TOY.raw), data, contexts=[64], distances=[], probes=1)
    assert found[1].loss[64] < found[0].loss[64] < fresh.loss[64] - 2
    assert [(r.distance, r.num_corrections) for r in found[1].recall] == [(250, 0), (250, 1), (250, 3)]
    biases = [b for name, b in model.named_buffers() if name.endswith("router_bias")]
    assert biases
    assert all(b.any() for b in biases)


def test_the_exported_folder_is_served_and_says_what_the_model_says(trained):
    model, _, folder = trained
    llm = LLM(str(folder), num_threads=1, max_model_len=512, num_pages=64, num_window_pages=64)
    answer = llm.chat(
        [{"role": "user", "content": "What is the price of the old table?"}], SamplingParams(max_tokens=8)
    )
    assert answer[0].outputs[0].token_ids
    token_ids = Tokenizer(folder).encode("def merge_index(index, other=None):\n", allow_special=False)
    scored = llm.generate([token_ids], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[
        0
    ].prompt_logprobs
    with torch.no_grad():
        stored = load_model(folder)
        logprobs = stored.logits(stored(torch.tensor([token_ids]))[0])[0].log_softmax(-1)
    for i in range(1, len(token_ids)):
        assert scored[i][token_ids[i]].logprob == pytest.approx(float(logprobs[i - 1, token_ids[i]]), abs=1e-4)
    assert stored.num_parameters() == model.num_parameters()
    assert max(p.stat().st_size for p in folder.glob("*.safetensors")) < SHARD_BYTES + 100_000


def test_transformers_loads_the_exported_folder(trained):
    from transformers import InklingForConditionalGeneration, logging

    logging.set_verbosity_error()
    _, _, folder = trained
    reference, report = InklingForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # The tower is as small as can be and no part of the text model: transformers draws its weights.
    assert all(key.startswith("model.vision_tower.") for key in report["missing_keys"])
    token_ids = torch.arange(16, 316)[None]
    stored = load_model(folder)
    with torch.no_grad():
        theirs = reference(token_ids).logits
        torch.testing.assert_close(stored.logits(stored(token_ids)[0]), theirs, atol=2e-4, rtol=0)


def test_a_folder_that_holds_something_is_not_written_over(trained, corpus_folder):
    model, _, folder = trained
    with pytest.raises(ConfigError, match="not empty"):
        export(model, corpus_folder, folder, [])


def test_nano_and_its_drafts_fit_the_budget():
    recipe = RECIPES["nano"]
    assert Inkling(recipe.raw).num_parameters() <= 12_000_000
    assert all(stage.seconds <= 480 for stage in recipe.stages)
