"""Block drafters: the published function, on keys that do not depend on how a sequence was cut."""

from __future__ import annotations

import json
from dataclasses import fields

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from samebit import EngineConfig
from samebit.core.config import Schedule, SpeculativeConfig
from samebit.engine.engine import Engine
from samebit.kernels.composed import turned
from samebit.kernels.values import SampleColumns
from tests.driving import make_request, run
from tests.random_checkpoint import SMALL, VOCAB, write_checkpoint
from tests.speculative.block_checkpoint import DEEPSPEC, DFLASH, DSPARK, changed, write_drafter
from tests.speculative.block_reference import Reference, Target
from tests.speculative.recording import Keys, recorded

SETTINGS = {
    "num_threads": 1,
    "page_size": 4,
    "checkpoint_interval": 8,
    "max_num_seqs": 4,
    "num_pages": 200,
    "num_window_pages": 200,
    "num_checkpoints": 40,
    "poison": True,
}
TEXT = [(7 * i * i + 3 * i) % 251 for i in range(60)]
VARIANTS = {
    "dflash": DFLASH,
    "dflash_next_position": changed(DFLASH, sample_from_anchor=True),
    "dflash_sees_all": changed(DFLASH, is_causal=False),
    "dflash_causal": changed(DFLASH, is_causal=True),
    "dflash_scaled_embedding": changed(DFLASH, input_embedding_scale=0.3),
    "dflash_only_windows": changed(DFLASH, layer_types=["sliding_attention"] * 3),
    "dflash_the_targets_window": changed(DFLASH, sliding_window=SMALL["sliding_window_size"]),
    "dspark": DSPARK,
    "dspark_gated": changed(DSPARK, markov_head_type="gated"),
    "dspark_rnn": changed(DSPARK, markov_head_type="rnn"),
    "dspark_unsure_alone": changed(DSPARK, confidence_head_with_markov=False),
    "dspark_never_unsure": changed(DSPARK, enable_confidence_head=False),
    "dspark_without_markov": changed(DSPARK, markov_rank=0, confidence_head_with_markov=False),
    "dspark_same_position": changed(DSPARK, sample_from_anchor=False),
    "deepspec": DEEPSPEC,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("target"))


def make_engine(target, drafter, raw, *, count=None, **settings) -> Engine:
    method = "dspark" if "DSpark" in raw["architectures"][0] else "dflash"
    wanted = SpeculativeConfig(method=method, model=str(drafter), num_speculative_tokens=count, token_cost=0)
    return Engine(EngineConfig(**{"model": str(target), "speculative_config": wanted, **SETTINGS, **settings}))


def borrowed(target) -> Target:
    tensors = load_file(target / "model.safetensors")
    head = tensors["model.llm.unembed.weight"][:VOCAB]
    return Target(tensors["model.llm.embed.weight"], head, SMALL["logits_mup_width_multiplier"])


class Taps:
    """Keeps what the drafter is handed of a request that runs alone, by position."""

    def __init__(self, drafter) -> None:
        self.by_position: dict[int, torch.Tensor] = {}
        advance = drafter.advance

        def watched(index, hidden, state):
            rows = torch.cat([x + y for x, y in hidden.taps], dim=1)
            for position, row in zip(index.positions.tolist()[: int(index.num_tokens)], rows, strict=False):
                self.by_position[position] = row.clone()
            advance(index, hidden, state)

        drafter.advance = watched

    def before(self, position: int) -> torch.Tensor:
        return torch.stack([self.by_position[p] for p in range(position)])


class WatchedKernels:
    """Keeps the logits that the drafter draws from, and the columns that it draws with."""

    def __init__(self, kernels) -> None:
        self._kernels = kernels
        self.calls: list[tuple[torch.Tensor, SampleColumns]] = []

    def __getattr__(self, name):
        return getattr(self._kernels, name)

    def draw(self, logits, columns):
        copies = {field.name: getattr(columns, field.name).clone() for field in fields(columns)}
        self.calls.append((logits.clone(), SampleColumns(**copies)))
        return self._kernels.draw(logits, columns)

    def last_block(self, num_drafts) -> tuple[torch.Tensor, list[SampleColumns]]:
        """Logits [D, V] of the block drawn last, which one call or D calls drew."""
        calls = self.calls[-1:] if len(self.calls[-1][0]) == num_drafts else self.calls[-num_drafts:]
        return torch.cat([logits for logits, _ in calls]), [columns for _, columns in calls]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_confidence_are_those_of_the_published_formulas(target, tmp_path, variant, dtype):
    raw = VARIANTS[variant]
    folder, config, tensors = write_drafter(tmp_path, raw, dtype=dtype)
    temperatures = [1.0] * config.num_drafts
    if config.enable_confidence_head:
        temperatures = [0.5 + 0.7 * k for k in range(config.num_drafts)]
        (folder / "calibration.json").write_text(json.dumps({"temperatures": temperatures, "num_samples": 3}))
    engine = make_engine(target, folder, raw)
    drafter = engine._runner._place.speculation.drafter
    taps, kernels = Taps(drafter), WatchedKernels(drafter._kernels)
    drafter._kernels = kernels
    reference = Reference(raw, tensors, borrowed(target))
    blocks = []
    with recorded(
        engine, lambda plan, _: plan.drafts and blocks.append(kernels.last_block(config.num_drafts))
    ) as found:
        result = run(engine, [make_request("r", TEXT[:11], seed=7, temperature=0.9, max_tokens=10, ignore_eos=True)])[
            "r"
        ]
    tokens = [*TEXT[:11], *result.token_ids]
    assert len(found.of["r"]) == len(blocks) > 4
    for (count, (guesses, confidence)), (logits, _) in zip(found.of["r"].items(), blocks, strict=True):
        last = tokens[count - 1]
        hidden = reference.hidden(taps.before(count - 1), last, config.num_drafts)
        wanted = reference.logits(hidden, last, guesses)
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-4, atol=1e-4)
        sure = reference.confidence(hidden, last, guesses, temperatures)
        torch.testing.assert_close(torch.tensor(confidence).double(), sure, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("raw", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_guesses_are_drawn_as_the_target_is_going_to_draw(target, tmp_path, raw):
    folder, config, _ = write_drafter(tmp_path, raw)
    engine = make_engine(target, folder, raw)
    drafter = engine._runner._place.speculation.drafter
    drafter._kernels = kernels = WatchedKernels(drafter._kernels)
    blocks = []
    with recorded(
        engine, lambda plan, _: plan.drafts and blocks.append(kernels.last_block(config.num_drafts))
    ) as found:
        params = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_tokens": 6}
        run(engine, [make_request("r", TEXT[:9], seed=77, **params)])
    assert blocks
    for count, (_, columns) in zip(found.of["r"], blocks, strict=True):
        merged = {f.name: torch.cat([getattr(c, f.name) for c in columns]) for f in fields(SampleColumns)}
        assert merged["position"].tolist() == list(range(count, count + config.num_drafts))
        assert set(merged["seed"].tolist()) == {77}
        assert set(merged["target"].tolist()) == {-1}
        for name in ("temperature", "top_k", "top_p", "min_p"):
            assert merged[name].unique().tolist() == pytest.approx([params[name]])


@pytest.mark.parametrize("raw", [DFLASH, DSPARK], ids=["dflash", "dspark"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7])
def test_keys_of_any_cut_are_the_bits_of_one_projection(target, tmp_path, raw, chunk):
    folder, _, _ = write_drafter(tmp_path, raw)
    engine = make_engine(target, folder, raw, schedule=Schedule(chunk_sizes=(chunk,)), enable_prefix_caching=False)
    drafter = engine._runner._place.speculation.drafter
    taps, keys = Taps(drafter), Keys(engine)
    with recorded(engine, keys):
        run(engine, [make_request("r", TEXT[:29], temperature=0.0, max_tokens=9, ignore_eos=True)])
    assert keys.length > 32
    parts, context = drafter._parts, taps.before(keys.length)
    projected = parts.hidden_norm(parts.fc(context))
    turn, per_layer = drafter._rotary.at(torch.arange(keys.length)), parts.kv(projected).chunk(len(parts.layers), dim=1)
    by_place = sorted(range(len(parts.layers)), key=lambda i: drafter._places[i])
    for found, i in zip(keys.of, by_place, strict=True):
        kept, (k, v) = found.shape[1], per_layer[i].chunk(2, dim=1)
        assert kept == (min(parts.layers[i].window - 1, keys.length) if parts.layers[i].window else keys.length)
        turned_k = turned(parts.layers[i].k_norm(k), turn.positions, turn.cos, turn.sin)
        for rows, wanted in zip(found, (turned_k, v), strict=True):
            assert torch.equal(rows.flatten(1), wanted[-kept:])


@pytest.mark.parametrize("raw", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_fewer_guesses_than_a_whole_block_can_be_asked_for(target, tmp_path, raw):
    folder, config, tensors = write_drafter(tmp_path, raw)
    engine = make_engine(target, folder, raw, count=2)
    drafter = engine._runner._place.speculation.drafter
    taps, reference = Taps(drafter), Reference(raw, tensors, borrowed(target))
    with recorded(engine) as found:
        result = run(engine, [make_request("r", TEXT[:11], temperature=0.0, max_tokens=6, ignore_eos=True)])["r"]
    tokens = [*TEXT[:11], *result.token_ids]
    assert len(found.of["r"]) > 2
    for count, (guesses, confidence) in found.of["r"].items():
        hidden = reference.hidden(taps.before(count - 1), tokens[count - 1], 2)
        assert reference.logits(hidden, tokens[count - 1], guesses).argmax(1).tolist() == guesses
        assert len(guesses) == len(confidence) == 2 < config.num_drafts


@pytest.mark.parametrize("raw", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_a_guess_is_a_token_that_exists(tmp_path, raw):
    """Padding rows of the head, and of what Markov heads add, win wherever they take part."""
    target = write_checkpoint(tmp_path / "target")
    folder, _, _ = write_drafter(tmp_path / "drafter", raw)
    for path, name in ((target, "model.llm.unembed.weight"), (folder, "markov_head.markov_w2.weight")):
        held = load_file(path / "model.safetensors")
        if name in held:
            held[name][VOCAB:] *= 1000
            save_file(held, path / "model.safetensors")
    engine = make_engine(target, folder, raw)
    with recorded(engine) as found:
        run(engine, [make_request(str(i), TEXT[i : i + 9], temperature=3.0, max_tokens=12) for i in range(4)])
    guesses = [token for request in found.of.values() for tokens, _ in request.values() for token in tokens]
    assert len(guesses) > 40
    assert max(guesses) < VOCAB


def test_the_settings_of_speculation_travel_as_json():
    wanted = SpeculativeConfig(method="dflash", model="some/folder", num_speculative_tokens=3)
    assert msgspec.json.decode(msgspec.json.encode(wanted), type=SpeculativeConfig) == wanted
