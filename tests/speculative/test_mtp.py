"""A model's own draft heads: the function that was trained, on state that any history leaves as a cold run does."""

from __future__ import annotations

import json

import pytest
import torch

from samebit import LLM, EngineConfig, SamplingParams
from samebit.core.config import Schedule, SpeculativeConfig
from samebit.core.errors import CheckpointError, ConfigError
from samebit.engine.engine import Engine
from samebit.train.layout import load_model
from tests.driving import make_request, run, run_after_the_body, watch_steps
from tests.random_checkpoint import write_checkpoint

DEPTHS = 3
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("heads"), depths=DEPTHS)


def make_engine(folder, **settings) -> Engine:
    speculation = SpeculativeConfig(method="mtp")
    return Engine(EngineConfig(**{"model": str(folder), "speculative_config": speculation, **SETTINGS, **settings}))


def proposals(engine: Engine, prompt: list[int], **params) -> dict[int, list[int]]:
    """What is guessed behind so many tokens of one request, and the request's tokens as key 0."""
    found = {}

    def record(plan, output):
        for draft, guesses in zip(plan.drafts, output.drafts, strict=True):
            row = plan.rows[draft.row]
            found[row.start + row.num_tokens - row.num_drafts + output.accepted[draft.row] + 1] = guesses

    watch_steps(engine, record)
    request = make_request("r", prompt, **{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params})
    result = run(engine, [request])["r"]
    del engine._runner.launch
    found[0] = [*prompt, *result.token_ids]
    return found


@torch.no_grad()
def trained_guesses(model, token_ids: list[int]) -> list[int]:
    """The greedy guesses behind `token_ids` of the training code's function."""
    known = torch.tensor([token_ids])
    hidden = model(known)[0]
    guesses = []
    for depth in range(DEPTHS):
        ids = torch.cat([known, torch.tensor([guesses], dtype=torch.long)], dim=1)
        padded = torch.cat([hidden, torch.zeros(1, len(guesses), hidden.shape[-1])], dim=1)
        guesses.append(int(model.logits(model.draft(padded, ids)[depth][0, -1]).argmax()))
    return guesses


def test_a_step_may_be_taken_in_after_its_draws_as_well_as_before_them(folder, monkeypatch):
    """On a GPU it is taken in beside them."""
    with_work_first = proposals(make_engine(folder), TEXT[:21], max_tokens=20, temperature=0.8, seed=3)
    calls = run_after_the_body(monkeypatch)
    assert proposals(make_engine(folder), TEXT[:21], max_tokens=20, temperature=0.8, seed=3) == with_work_first
    assert calls


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 20, 33])
def test_what_serving_guesses_is_what_training_taught(folder, length):
    found = proposals(make_engine(folder, enable_prefix_caching=False), TEXT[:length])
    model, tokens = load_model(folder).eval(), found.pop(0)
    assert len(found) > 3
    for count, guesses in found.items():
        assert guesses == trained_guesses(model, tokens[:count]), count


@pytest.mark.parametrize("graph", ["eager", "trace"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_guesses_behind_a_hit_at_any_residue_are_those_of_a_cold_run(folder, graph, kernels):
    cold_engine = make_engine(folder, enable_prefix_caching=False, kernels=kernels)
    warm = make_engine(folder, kernels=kernels, graph=graph)
    for length in range(1, 30, 1 if kernels == "native" else 5):
        cold = proposals(cold_engine, TEXT[:length], max_tokens=6)
        assert proposals(warm, TEXT[:length], max_tokens=6) == cold
        assert proposals(warm, TEXT[:length], max_tokens=6) == cold
    assert warm.manager.tree.checkpoints
    assert warm.scheduler.counters.num_refused_checkpoints == 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7])
def test_the_cut_of_a_prompt_changes_no_guess(folder, chunk):
    schedule = Schedule(chunk_sizes=(chunk,), preempt_percent=20)
    cut = make_engine(folder, schedule=schedule, enable_prefix_caching=False)
    whole = make_engine(folder, enable_prefix_caching=False)
    found, wanted = (proposals(engine, TEXT[:23]) for engine in (cut, whole))
    assert found[0] == wanted[0]
    common = found.keys() & wanted.keys()
    assert len(common) > 1
    assert all(found[count] == wanted[count] for count in common)


def test_heads_learn_of_tokens_that_were_not_speculated_on(folder):
    cold = proposals(make_engine(folder, enable_prefix_caching=False), TEXT[:27], max_tokens=6)
    engine = make_engine(folder)
    silent = proposals(engine, TEXT[:24], max_tokens=4, speculation=False)
    assert silent.keys() == {0}
    warm = proposals(engine, TEXT[:27], max_tokens=6)
    assert engine.scheduler.counters.num_published
    assert warm == cold


def test_fewer_heads_than_there_are_can_be_asked_for(folder):
    one = make_engine(folder, speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=1))
    every = make_engine(folder)
    first = proposals(one, TEXT[:20], max_tokens=3)
    for count, guesses in proposals(every, TEXT[:20], max_tokens=3).items():
        if count and count in first:
            assert first[count] == guesses[:1]


def test_heads_that_do_not_exist_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="num_speculative_tokens=4: the model has 3 draft heads"):
        LLM(str(folder), speculative_config={"method": "mtp", "num_speculative_tokens": 4})
    plain = write_checkpoint(tmp_path / "plain")
    with pytest.raises(ConfigError, match="has no draft heads"):
        LLM(str(plain), speculative_config={"method": "mtp"})
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tensor 'model\.mtp\.layers\.0\..*' is missing"):
        LLM(str(plain), speculative_config={"method": "mtp"})


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ([], None),
        ([3], "mtp_config: Expected `object`"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": 3, "local_layer_ids": None}, "local_layer_ids"),
        ({"num_nextn_predict_layers": 3, "local_layer_ids": [0, 7]}, r"local_layer_ids=\[0, 7\]: there are 3 heads"),
        ({"num_nextn_predict_layers": 3, "local_extent": 0}, "local_extent"),
        ({"num_nextn_predict_layers": 3, "heads_first": True}, "heads_first"),
    ],
)
def test_heads_that_are_described_wrongly_are_named(folder, tmp_path, heads, text):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"mtp_config": heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError if text is None else CheckpointError, match=text or "has no draft heads"):
        LLM(str(tmp_path), speculative_config={"method": "mtp"})


def test_chained_norms_change_the_guesses_and_no_token(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["mtp_config"]["chain_hidden_post_norm"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.mtp.chain_norm.weight"] = torch.linspace(-1, 1, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    one, other = (proposals(make_engine(path), TEXT[:20]) for path in (folder, tmp_path))
    assert one[0] == other[0]
    assert any(one[count] != other[count] for count in one.keys() & other.keys())


def test_sampled_guesses_use_the_targets_noise(folder):
    """Where all guesses of a model are its own draws, every draft is accepted: heads of random weights come nowhere near."""
    llm = LLM(str(folder), speculative_config={"method": "mtp"}, **SETTINGS)
    plain = LLM(str(folder), **SETTINGS)
    params = [
        SamplingParams(temperature=t, top_p=p, seed=s, max_tokens=20, logprobs=1)
        for t, p, s in ((0.7, 0.9, 1), (1.5, 1.0, 2))
    ]
    for one, other in zip(*(engine.generate([TEXT[:9]] * 2, params) for engine in (llm, plain)), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
