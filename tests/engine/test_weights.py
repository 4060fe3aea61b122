"""New weights in a running engine: the answers become those of an engine that was started with them."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebit.core.config import EngineConfig, SpeculativeConfig
from samebit.core.errors import CheckpointError, ConfigError, ModelError, ModelNotFoundError
from samebit.core.request import Request, SamplingParams
from samebit.engine.engine import Engine
from samebit.engine.launch import with_other_weights
from samebit.engine.model_source import bundled_drafter
from tests.random_checkpoint import write_checkpoint

PROMPT = list(range(1, 50))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    for seed, folder in enumerate(folders):
        write_checkpoint(folder, seed=seed)
    return [str(folder) for folder in folders]


def engine_of(model, **settings):
    fixed = {"num_threads": 1, "cache_bytes": 20_000_000, "checkpoint_interval": 16}
    return Engine(EngineConfig(model=model, **fixed, **settings))


def update(engine, model):
    return engine.use_weights(engine.load_weights(model))


def ask(engine, name):
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    engine.add(Request(request_id=name, prompt_token_ids=PROMPT, params=params, seed=1))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return [item for output in outputs for item in output.logprobs], outputs[-1].num_cached_tokens


def test_the_answers_are_those_of_an_engine_that_was_started_with_the_weights(models):
    old, new = models
    engine, fresh = engine_of(old), engine_of(new)
    before, _ = ask(engine, "a")
    assert ask(engine, "b")[1] > 0, "the old weights' state is cached"
    info = update(engine, new)
    assert info == engine.info
    assert (info.model, info.system_fingerprint) == (new, fresh.info.system_fingerprint)
    after, num_cached = ask(engine, "c")
    assert num_cached == 0, "what old weights computed is never hit"
    assert after == ask(fresh, "c")[0] != before
    again, num_cached = ask(engine, "d")
    assert num_cached > 0
    assert again == after
    assert engine.stats()["num_weight_updates"] == 1
    update(engine, old)
    assert ask(engine, "e") == (before, 0)


def test_weights_come_to_where_the_old_ones_are_and_recorded_steps_go_on_with_them(models):
    engine = engine_of(models[0], graph="trace")
    before, _ = ask(engine, "a")
    recorded, state = dict(engine._runner._programs), engine._loaded
    update(engine, models[1])
    assert ask(engine, "b")[0] == ask(engine_of(models[1]), "b")[0] != before
    assert engine._loaded is state
    assert recorded.items() <= engine._runner._programs.items(), "nothing was recorded again"
    update(engine, models[0])
    assert ask(engine, "c") == (before, 0)


def test_what_recorded_steps_have_frozen_is_recorded_again(models, tmp_path):
    """A factor of a layer is no tensor."""
    folder = write_checkpoint(tmp_path / "scaled", seed=1)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("global_scale")]:
        tensors[name] *= 0.5
    save_file(tensors, folder / "model.safetensors")
    engine = engine_of(models[1], graph="trace")
    before, _ = ask(engine, "a")
    recorded = [*engine._runner._programs.values()]
    update(engine, str(folder))
    assert ask(engine, "b")[0] == ask(engine_of(str(folder)), "b")[0] != before
    assert not {*recorded} & {*engine._runner._programs.values()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense_intermediate_size": 50}, r"model\.num_parameters is \d+; the model that is served has \d+"),
        ({"dtype": torch.bfloat16}, r"model\._parts\S+ is \(.* of torch.bfloat16; the model that is served has \("),
        ({"num_experts_per_tok": 1}, r"model\._parts\S+_top_k is 1; the model that is served has 2"),
    ],
)
def test_weights_that_have_no_place_are_refused_by_name(models, tmp_path, change, message):
    engine = engine_of(models[0])
    before, _ = ask(engine, "a")
    with pytest.raises(ModelError, match=f"other: {message}"):
        update(engine, str(write_checkpoint(tmp_path / "other", **change)))
    engine.flush_cache()
    assert ask(engine, "b") == (before, 0)


@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_drafters_weights_change_with_the_models(tmp_path, method):
    old, new = (str(write_checkpoint(tmp_path / str(seed), seed=seed, depths=2)) for seed in range(2))
    settings = {"graph": "trace", "speculative_config": SpeculativeConfig(method=method, token_cost=0.0)}
    engine, fresh = engine_of(old, **settings), engine_of(new, **settings)
    ask(engine, "a")
    update(engine, new)
    assert ask(engine, "b") == ask(fresh, "b")
    assert engine.scheduler.counters.num_accepted_tokens >= fresh.scheduler.counters.num_accepted_tokens


def test_a_checkpoint_of_another_shape_leaves_everything_as_it_was(models, tmp_path):
    engine = engine_of(models[0])
    before, _ = ask(engine, "a")
    info = engine.info
    wider = write_checkpoint(tmp_path / "wider", sliding_window_size=7)
    with pytest.raises(ModelError, match="state layout"):
        update(engine, str(wider))
    (tmp_path / "broken").mkdir()
    with pytest.raises(ModelError):
        update(engine, str(tmp_path / "broken"))
    with pytest.raises(ModelNotFoundError):
        update(engine, str(tmp_path / "nowhere"))
    assert engine.info == info
    again, num_cached = ask(engine, "b")
    assert num_cached > 0, "the cache is still there"
    assert again == before


def test_weights_that_are_loaded_beside_steps_change_no_answer(models):
    engine = engine_of(models[0])
    before, _ = ask(engine, "a")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(engine.load_weights, models[1])
        answers = [ask(engine, f"b{n}")[0] for n in range(5)]
        weights = loading.result()
    assert answers == [before] * 5
    engine.use_weights(weights)
    assert ask(engine, "c") == (ask(engine_of(models[1]), "c")[0], 0)


def test_weights_that_are_not_finite_or_too_many_are_not_loaded(models, tmp_path):
    engine = engine_of(models[0])
    spoilt = write_checkpoint(tmp_path / "spoilt")
    tensors = load_file(spoilt / "model.safetensors")
    tensors["model.llm.norm.weight"][3] = torch.nan
    save_file(tensors, spoilt / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.llm\.norm\.weight' has values that are not finite"):
        engine.load_weights(str(spoilt))
    with (spoilt / "model-2.safetensors").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(ConfigError, match="weights take 8796"):
        engine.load_weights(str(spoilt))


def test_weights_do_not_change_under_a_request(models):
    engine = engine_of(models[0])
    engine.add(Request(request_id="a", prompt_token_ids=PROMPT, params=SamplingParams(), seed=1))
    with pytest.raises(AssertionError, match="under a request"):
        update(engine, models[1])


def test_an_emptied_cache_is_missed_once(models):
    engine = engine_of(models[0])
    before, _ = ask(engine, "a")
    engine.flush_cache()
    assert ask(engine, "b") == (before, 0)
    assert ask(engine, "c")[1] > 0


def test_the_queue_time_of_each_request_is_told_once(models):
    engine = engine_of(models[0])
    ask(engine, "a")
    ask(engine, "b")
    admitted = engine.take_admitted()
    assert [item.request_id for item in admitted] == ["a", "b"]
    assert all(0 <= item.waited_s < 60 for item in admitted)
    assert admitted[0].began_s < admitted[1].began_s < time.monotonic()
    assert engine.take_admitted() == []


def test_progress_through_a_prompt_is_told_to_those_who_ask(models):
    engine = Engine(EngineConfig(model=models[0], num_threads=1, cache_bytes=20_000_000, max_num_batched_tokens=32))
    for name, wants in (("a", True), ("b", False)):
        params = SamplingParams(max_tokens=1)
        engine.add(
            Request(request_id=name, prompt_token_ids=[1] + PROMPT * 3, params=params, seed=1, wants_progress=wants)
        )
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        steps = [output.num_processed_tokens for output in outputs]
        assert steps[-1] == 148
        assert (len(steps) > 3) == wants
        assert steps == sorted(set(steps))
        assert [len(output.token_ids) for output in outputs] == [0] * (len(steps) - 1) + [1]


def test_a_bundled_drafter_stays_when_an_engine_is_started_again_with_other_weights():
    for method in ("dflash", "dspark"):
        config = EngineConfig(model="nano", speculative_config=SpeculativeConfig(method=method))
        other = with_other_weights(config, "/other")
        assert other.model == "/other"
        assert other.speculative_config == SpeculativeConfig(method=method, model=str(bundled_drafter("nano", method)))
    plain = EngineConfig(model="nano", speculative_config=SpeculativeConfig(method="ngram"))
    assert with_other_weights(plain, "/other") == EngineConfig(
        model="/other", speculative_config=plain.speculative_config
    )
