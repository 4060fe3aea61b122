"""Drafters in training: what they see, what they guess, what they learn by, and text that the target writes."""

import copy
import dataclasses
import math

import pytest
import torch

from samebit.core.errors import ConfigError
from samebit.speculative.block_config import block_tensors, parse_block_config
from samebit.train.drafters.block import BlockDrafter, block_mask
from samebit.train.drafters.calibrate import calibrated
from samebit.train.drafters.decode import Decoder, continued, gumbel
from samebit.train.drafters.evaluate import Continuations, _walk, acceptance
from samebit.train.drafters.recipe import DRAFTER_RECIPES, LOSSES, block_config_json
from samebit.train.drafters.students import BlockStudent, DepthStudent, LossWeights, target_logits
from samebit.train.drafters.view import draw_anchors, view_of
from samebit.train.model import Inkling, short_conv
from samebit.train.recipe import RECIPES

SHAPE = DRAFTER_RECIPES["toy"].shape
BLOCK_METHODS = ("dflash", "dspark")
K = SHAPE.num_drafts


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def target():
    model = Inkling(RECIPES["toy"].raw).eval().requires_grad_(False)
    generator = seeded(1)
    for name, parameter in model.named_parameters():
        if name.endswith("_conv"):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def drafter(target, method, **changes):
    """One whose heads do something too."""
    config = parse_block_config(block_config_json(method, SHAPE, target.config))
    made = BlockDrafter(changed(config, **changes), seed=3)
    generator = seeded(2)
    for parameter in made.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return made


def changed(config, **changes):
    return type(config)(**{name: getattr(config, name) for name in config.__struct_fields__} | changes)


def draw_ids(rows, length, seed=0):
    return torch.randint(0, 640, (rows, length), generator=seeded(seed))


def make_view(target, anchors, length=60, seed=0):
    anchors = torch.tensor(anchors)
    return view_of(target, draw_ids(len(anchors), length, seed), SHAPE.taps, anchors)


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_tensors_have_the_published_names_and_shapes(target, method):
    made = drafter(target, method)
    assert {name: tuple(t.shape) for name, t in made.state_dict().items()} == block_tensors(made.config)
    assert made.config.num_drafts == K


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_drafters_of_nano_fit_the_budget(method):
    nano = Inkling(RECIPES["nano"].raw)
    config = parse_block_config(block_config_json(method, DRAFTER_RECIPES["nano"].shape, nano.config))
    assert config.num_drafts == 7
    assert 2 * sum(map(math.prod, block_tensors(config).values())) <= 6_000_000


def test_a_target_without_a_row_for_the_mask_is_refused(target):
    with pytest.raises(ConfigError, match="no padding row"):
        block_config_json("dflash", SHAPE, changed(target.config, vocab_size=640))
    with pytest.raises(ConfigError, match="has 2 layers"):
        block_config_json("dflash", SHAPE, changed(target.config, num_hidden_layers=2))


def test_a_tap_is_a_layers_output_without_its_last_convolution(target):
    ids = draw_ids(2, 40)
    hidden, taps = target.tapped(ids, (0, 2))
    assert torch.equal(hidden, target(ids)[0])
    x, tau = target.embedded(ids), target.get_buffer("_tau")[:40]
    for i, block in enumerate(target.blocks):
        attended = block.attend(x, tau)
        x = block.expand(attended)[0]
        if i in (0, 2):
            tap = taps[..., 32 * i : 32 * i + 64]
            mixed = tap - attended
            torch.testing.assert_close(attended + short_conv(mixed, block.weights["mlp_conv"]), x)
            assert not torch.allclose(tap, x, atol=1e-2)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_row_sees_the_context_before_its_anchor_and_its_own_block(window, is_causal):
    anchors, S, R = [[3, 9], [1, 2]], 12, 4
    mask = block_mask(torch.tensor(anchors), S, R, window=window, is_causal=is_causal)
    assert mask.shape == (2, 1, 2 * R, S + 2 * R)
    for b in range(2):
        for n, anchor in enumerate(anchors[b]):
            for o in range(R):
                expected = [c < anchor and (not window or c >= anchor + o - (window - 1)) for c in range(S)]
                expected += [m == n and (not is_causal or p <= o) for m in range(2) for p in range(R)]
                assert mask[b, 0, n * R + o].tolist() == expected


@pytest.mark.parametrize("layers", [((0, 0), (False, False)), ((7, 0), (True, False)), ((7, 7), (False, False))])
def test_blocks_are_computed_as_if_each_were_alone(target, layers):
    made = drafter(target, "dflash", windows=layers[0], is_causal=layers[1])
    student = BlockStudent(target, made, LOSSES["dflash"])
    anchors = [[1, 20, 21, 50], [4, 5, 30, 55]]
    together = student.logits(make_view(target, anchors))
    for n in range(4):
        alone = student.logits(make_view(target, [[row[n]] for row in anchors]))
        torch.testing.assert_close(together[:, n : n + 1], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_a_guess_depends_on_taps_before_the_anchor_only(target, method):
    student = BlockStudent(target, drafter(target, method), LOSSES[method])
    view = make_view(target, [[20]])
    before = student.hidden(view)
    later, earlier = view.taps.clone(), view.taps.clone()
    later[:, 20:] += 1
    earlier[:, 19] += 1
    assert torch.equal(student.hidden(dataclasses.replace(view, taps=later)), before)
    assert not torch.allclose(student.hidden(dataclasses.replace(view, taps=earlier)), before)


@torch.no_grad()
@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_the_loss_is_that_of_its_formula(target, method):
    """Token by token, in plain arithmetic."""
    made, given = drafter(target, method), LossWeights(labels=0.3, distance=0.9, confidence=0.7, decay=3.0)
    given = given if method == "dspark" else LOSSES["dflash"]
    student = BlockStudent(target, made, given)
    view = make_view(target, [[4, 33], [10, 11]])
    found = student.losses(view)
    logits = student.logits(view)
    final, _ = target(view.token_ids)
    totals, weight = {"labels": 0.0, "distance": 0.0, "confidence": 0.0}, 0.0
    for b in range(2):
        for n in range(2):
            for k in range(K):
                t = int(view.anchors[b, n])
                w = math.exp(-k / given.decay)
                weight += w
                q = logits[b, n, k].softmax(-1)
                p = target.logits(final[b, t + k]).softmax(-1)
                totals["labels"] -= w * float(q[view.token_ids[b, t + k + 1]].log())
                l1 = float((q - p).abs().sum())
                totals["distance"] += w * l1
                if given.confidence:
                    row = student.hidden(view)[b, n, k]
                    z = torch.cat([row, made.markov_head.markov_w1.weight[view.token_ids[b, t + k]]])
                    c = torch.sigmoid(made.confidence_head.proj(z))
                    totals["confidence"] -= w * float((1 - l1 / 2) * c.log() + l1 / 2 * (1 - c).log())
    expected = sum(getattr(given, name) * total / weight for name, total in totals.items())
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-4)


def test_confidence_moves_no_guess_towards_what_it_says(target):
    made = drafter(target, "dspark")
    losses = BlockStudent(target, made, LossWeights(labels=0.0, confidence=1.0)).losses(make_view(target, [[7, 30]]))
    losses["loss"].backward()
    assert not made.markov_head.markov_w2.weight.grad.any()
    assert made.markov_head.markov_w1.weight.grad.any()


def test_the_markov_head_adds_what_the_token_before_says(target):
    made = drafter(target, "dspark")
    student = BlockStudent(target, made, LOSSES["dspark"])
    view = make_view(target, [[7, 30]])
    plain = target.logits(student.hidden(view))
    heads = made.markov_head
    for n, t in enumerate((7, 30)):
        for k in range(K):
            token = view.token_ids[0, t + k]
            added = heads.markov_w2.weight[:640] @ heads.markov_w1.weight[token]
            torch.testing.assert_close(student.logits(view)[0, n, k], plain[0, n, k] + added, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_the_block_is_made_of_raw_rows_of_its_first_token_and_of_the_mask(target, method):
    target = copy.deepcopy(target)
    student = BlockStudent(target, drafter(target, method), LOSSES[method])
    view = make_view(target, [[7]])
    before = student.hidden(view)
    embed, first = target.weights["embed"], int(view.token_ids[0, 7])
    target.weights["embed_norm"].mul_(2)
    embed[[i for i in range(len(embed)) if i not in (first, 640)]] += 1
    assert torch.equal(student.hidden(view), before)
    for row in (first, 640):
        embed[row] += 1
        assert not torch.allclose(student.hidden(view), before)
        embed[row] -= 1


def test_anchors_are_different_places_with_room_and_those_that_matter():
    weights = torch.zeros(3, 50)
    weights[0, 10:30] = 1.0
    weights[1:] = 1.0
    drawn = draw_anchors(weights, 20, 4, seeded(0))
    assert drawn[0].tolist() == list(range(10, 30))
    everywhere = torch.cat([draw_anchors(weights, 30, 4, seeded(s))[1:].flatten() for s in range(20)])
    assert (everywhere.min(), everywhere.max()) == (1, 45)
    assert (drawn.diff(dim=1) > 0).all()


def test_text_is_written_by_the_models_own_function(target):
    """Past the window, the floor of the scaling and, in the full layers, the bias's extent."""
    ids = draw_ids(3, 100)
    decoder = Decoder(target, 3, 100)
    found = torch.stack([decoder.step(ids[:, t]) for t in range(100)], dim=1)
    torch.testing.assert_close(found, target(ids)[0], atol=1e-4, rtol=0)


def test_a_text_begins_with_its_prompt_and_goes_on_with_what_is_drawn(target):
    prompts, lengths = draw_ids(2, 9), torch.tensor([5, 9])
    ids = continued(target, prompts, lengths, 20, lambda logits, _: logits.argmax(-1))
    for row, length in enumerate((5, 9)):
        assert torch.equal(ids[row, :length], prompts[row, :length])
        likeliest = target.logits(target(ids[row : row + 1])[0])[0].argmax(-1)
        assert torch.equal(ids[row, length:], likeliest[length - 1 : -1])


class Mirror:
    """Guesses what the target says itself, but for a place `wrong` in each block."""

    num_drafts = K

    def __init__(self, target, wrong=None):
        self._target, self._wrong = target, wrong

    def logits(self, view):
        return target_logits(self._target, view, K)

    def drawn(self, view, noise):
        tokens = (self.logits(view) + noise).argmax(-1)
        if self._wrong is not None:
            tokens[..., self._wrong] = -1
        return tokens, torch.zeros(tokens.shape)


def continue_with(target, temperature, new=20):
    lengths = torch.tensor([6, 11])
    noise = gumbel((2, new, 640), seeded(5)) if temperature else None

    def draw(logits, place):
        if noise is None:
            return logits.argmax(-1)
        return (logits + noise[torch.arange(2), (place - lengths).clamp(0, new - 1)]).argmax(-1)

    ids = continued(target, draw_ids(2, 11), lengths, 11 + new, draw)
    return Continuations("text", temperature, ids, lengths, lengths + new - 1, noise, new)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_the_same_noise_the_target_accepts_all_that_it_guesses_itself(target, temperature):
    texts = continue_with(target, temperature)
    found, samples = acceptance(target, Mirror(target), SHAPE.taps, texts)
    assert found.overlap == pytest.approx([1.0] * K, abs=1e-5)
    # Two rows of 19 tokens behind their first: blocks of 5, the last of which the end cuts.
    assert samples.accepted.tolist() == [4, 4, 4, 4] * 2
    found, samples = acceptance(target, Mirror(target, wrong=2), SHAPE.taps, texts)
    assert set(samples.accepted.tolist()) <= {1, 2}
    assert found.accepted[:2] == [1.0, found.accepted[1]]
    assert found.accepted[2:] == [0.0, 0.0]


def test_decoding_goes_on_behind_the_token_after_the_accepted_ones():
    accepted = torch.tensor([[2, 9, 9, 0, 3, 9, 9, 9]])
    assert list(_walk(accepted, torch.tensor([6]))) == [(0, 0, 2), (0, 3, 0), (0, 4, 2)]
    assert list(_walk(accepted, torch.tensor([0]))) == []


def test_depths_guess_what_the_models_own_training_taught_them(target):
    student = DepthStudent(target)
    view = make_view(target, [[7, 30]])
    drafted = target.draft(target(view.token_ids)[0], view.token_ids)
    for n, t in enumerate((7, 30)):
        for k, hidden in enumerate(drafted):
            torch.testing.assert_close(student.logits(view)[0, n, k], target.logits(hidden[0, t + k]))


def test_temperatures_undo_a_confidence_that_is_too_sure():
    generator = seeded(0)
    chances = 0.05 + 0.9 * torch.rand(20_000, 3, generator=generator)
    is_accepted = (torch.rand(20_000, 3, generator=generator) < chances).long()
    accepted = is_accepted.cumprod(-1).sum(-1)
    scale = torch.tensor([3.0, 1.0, 0.5])
    found = calibrated(chances.logit() * scale, accepted, "made up")
    assert found.temperatures == pytest.approx([3.0, 1.0, 0.5], rel=0.15)
    assert found.num_samples == 20_000
    assert max(found.ece_after) < 0.01
    assert found.ece_before[0] > 0.05
