"""Settings that depend on the device: what a machine cannot do is named, and what is left open is chosen."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from samebit.core.config import EngineConfig, SpeculativeConfig
from samebit.core.errors import ConfigError, ModelError
from samebit.engine import device as device_module
from samebit.engine import loading
from samebit.engine.device import cache_budget, settled
from samebit.engine.model_source import resolve_model
from samebit.engine.sizing import DEFAULT_CACHE_BYTES, size_pools
from samebit.kernels.selection import torch_kernels
from tests.random_checkpoint import write_checkpoint

NANO = resolve_model("nano")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")


@no_gpu
def test_without_a_gpu_everything_left_open_is_for_a_cpu():
    found = settled(EngineConfig(), NANO)
    assert (found.device, found.dtype, found.graph) == ("cpu", "float32", "eager")


@no_gpu
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match="device='cuda': torch finds no CUDA device"):
        settled(EngineConfig(device="cuda"), NANO)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [({"graph": "cuda"}, "'eager', 'trace'"), ({"dtype": "bfloat16"}, "'float32'")],
)
def test_what_a_cpu_cannot_do_is_named_with_what_it_can(setting, allowed):
    with pytest.raises(
        ConfigError, match=rf"{next(iter(setting))}='\w+': must be 'auto' or one of {allowed}.* on a cpu"
    ):
        settled(EngineConfig(device="cpu", **setting), NANO)


def test_whoever_asks_for_a_cpus_kernels_gets_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settled(EngineConfig(kernels="torch"), NANO).device == "cpu"
    found = settled(EngineConfig(), NANO)
    assert (found.device, found.dtype, found.graph) == ("cuda", "bfloat16", "cuda")
    with pytest.raises(ConfigError, match="kernels='native': must be 'auto' or one of 'triton' on a cuda device"):
        settled(EngineConfig(device="cuda", kernels="native"), NANO)


def test_what_a_token_costs_is_the_devices_unless_it_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def found(device, **settings):
        wanted = SpeculativeConfig(method="ngram", **settings)
        return settled(EngineConfig(device=device, speculative_config=wanted), NANO).speculative_config.token_cost

    assert found("cpu") > found("cuda") > 0
    assert found("cpu", token_cost=0.0) == found("cuda", token_cost=0.0) == 0
    assert found("cuda", token_cost=0.4) == 0.4


@pytest.mark.parametrize(
    ("what", "limit", "message"),
    [
        ("page groups", 1, "2 page groups: the torch kernels have at most 1"),
        ("columns of a head", 7, "[0-9]+ columns of a head: the torch kernels have at most 7"),
        ("columns of a norm", 31, "[0-9]+ columns of a norm: the torch kernels have at most 31"),
        ("tokens of a vocabulary", 255, "272 tokens of a vocabulary: the torch kernels have at most 255"),
    ],
)
def test_a_model_that_is_too_large_for_the_kernels_is_refused_when_it_is_loaded(
    tmp_path, monkeypatch, what, limit, message
):
    folder, config = write_checkpoint(tmp_path / "small"), EngineConfig(dtype="float32", device="cpu")
    monkeypatch.setattr(loading, "select_kernels", lambda *_: replace(torch_kernels(1), limits={what: limit}))
    with pytest.raises(ModelError, match=rf"small: {message}"):
        loading.load(config, folder, torch.device("cpu"))
    monkeypatch.setattr(loading, "select_kernels", lambda *_: replace(torch_kernels(1), limits={what: 1 << 20}))
    loading.load(config, folder, torch.device("cpu"))


def test_the_budget_is_what_was_asked_for_or_a_gibibyte_on_a_cpu():
    cpu = torch.device("cpu")
    assert cache_budget(EngineConfig(cache_bytes=12345), None, 0, cpu) == 12345
    assert cache_budget(EngineConfig(), None, 0, cpu) == DEFAULT_CACHE_BYTES == 1 << 30


def test_the_pools_that_a_steps_memory_is_measured_with_are_let_go(tmp_path, monkeypatch):
    made, make = [], device_module.StatePools

    def noted(*args):
        pools = make(*args)
        made.append(weakref.ref(pools))
        return pools

    config, cpu = EngineConfig(dtype="float32", device="cpu", max_num_batched_tokens=64), torch.device("cpu")
    loaded = loading.load(config, write_checkpoint(tmp_path / "small"), cpu)
    geometry, _ = size_pools(config, loaded.layout()[0], loaded.model.max_length)
    monkeypatch.setattr(device_module, "StatePools", noted)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 1234)
    assert device_module.step_bytes(config, loaded, geometry, cpu) == 234
    assert [reference() for reference in made] == [None]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_a_share_of_memory_is_a_share(share):
    with pytest.raises(ConfigError, match=f"gpu_memory_utilization={share}: must be above 0 and at most 1"):
        EngineConfig(gpu_memory_utilization=share).validate()
