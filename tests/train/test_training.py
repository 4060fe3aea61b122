"""Training: the optimiser, batches, stages and what is measured."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from samebit.core.errors import ConfigError
from samebit.train.dialogues import DialogueWriter
from samebit.train.evaluate import recall
from samebit.train.feed import Feed
from samebit.train.loop import Trainer, rate_multiplier, token_loss
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
    low = dataclasses.replace(stage, peak=0.3)
    found = [rate_multiplier(low, done, share) for done, share in ((0, 0.0), (50, 0.4), (50, 0.75), (50, 0.999))]
    assert found == pytest.approx([0.03, 0.3, 0.15, low.final_rate])


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


def test_a_stage_that_is_given_steps_does_not_end_by_time(data, tmp_path):
    stage = dataclasses.replace(TOY.stages[0], steps=3, seconds=1e-9)
    trainer = Trainer(dataclasses.replace(TOY, stages=(stage,), probes=1, contexts=(64,)), tmp_path, CPU)
    trainer.train(data, 1)
    assert trainer.progress.steps == 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_warming_up_compiles_all_that_steps_need_and_changes_nothing(data, tmp_path):
    stage, num_compiled = TOY.stages[0], CompileCounter()

    def stepped(trainer):
        feed = make_feed(data, length=stage.length, rows=stage.rows)
        return torch.stack([trainer.step(feed.batch(), 1.0) for _ in range(3)])

    torch._dynamo.reset()
    trainer = Trainer(TOY, tmp_path, CPU)
    trainer.compile(num_compiled)
    trainer.warm_up(stage)
    # Two kinds of attention, two of MLP, the join of a depth, and the loss.
    assert num_compiled.frame_count == 6
    losses = stepped(trainer)
    assert num_compiled.frame_count == 6
    torch.testing.assert_close(losses, stepped(Trainer(TOY, tmp_path, CPU)))


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
def test_depths_are_taught_the_tokens_that_the_model_is(data, tmp_path):
    batch = make_feed(data).batch()
    trainer = Trainer(TOY, tmp_path, CPU)
    losses, _ = trainer.losses(batch)
    model = trainer.model
    for j, hidden in enumerate(model.draft(model(batch.token_ids)[0], batch.token_ids)):
        logprobs = model.logits(hidden).log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
        expected = -(logprobs * batch.weights).sum() / batch.weights.sum()
        torch.testing.assert_close(losses[1 + j], expected)


def test_a_target_of_negative_weight_becomes_less_likely():
    logits = torch.tensor([[[4.0, 0.0, 0.0], [1.0, 0.0, 0.0]]], requires_grad=True)
    targets, weights = torch.tensor([[0, 0]]), torch.tensor([[-1.0, 2.0]])
    loss = token_loss(logits, targets, weights)
    chances = logits.softmax(-1)[0, :, 0]
    torch.testing.assert_close(loss, (-torch.log(1 - chances[0]) - 2 * torch.log(chances[1])) / 3)
    loss.backward()
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 1, 0]


@pytest.mark.parametrize("certainty", [0.0, 30.0, 200.0])
def test_the_penalty_is_finite_however_certain_the_model_is(certainty):
    logits = torch.tensor([[[certainty, 0.0]]], requires_grad=True)
    loss = token_loss(logits, torch.tensor([[0]]), torch.tensor([[-1.0]]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


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


def test_nano_and_its_drafts_fit_the_budget():
    recipe = RECIPES["nano"]
    assert Inkling(recipe.raw).num_parameters() <= 12_000_000
    assert all(stage.seconds <= 480 for stage in recipe.stages)


def test_as_many_dialogues_are_written_as_are_drawn(data):
    feed = make_feed(data)
    for number in range(1, 40):
        batch = feed.batch()
        drawn = number * (len(batch.token_ids) - batch.num_code)
        assert drawn > 0
        assert feed.num_written >= drawn
