"""Engines over a small random model, and the solo cold answers that everything is compared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebit.core.config import EngineConfig
from samebit.core.request import Request
from samebit.engine.engine import Engine
from tests.driving import Result, run_alone
from tests.random_checkpoint import write_checkpoint
from tests.speculative.block_checkpoint import METHODS, write_drafter

# What the small model's residues are about: page 4, window 6, kernel 4, interval 8.
SETTINGS = {
    "num_threads": 1,
    "page_size": 4,
    "checkpoint_interval": 8,
    "max_num_seqs": 8,
    "num_pages": 200,
    "num_window_pages": 200,
    "num_checkpoints": 40,
    "poison": True,
    "graph": "eager",
    "capture": "use",
}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("small"), depths=3))


@pytest.fixture(scope="session")
def drafters(tmp_path_factory) -> dict[str, str]:
    """Random block drafters for the small model, by method."""
    base = tmp_path_factory.mktemp("drafters")
    return {method: str(write_drafter(base / method, raw)[0]) for method, raw in METHODS.items()}


@pytest.fixture(scope="session")
def make_engine(small_model, kernel_kind, activations) -> Callable[..., Engine]:
    def make(**settings) -> Engine:
        return Engine(
            EngineConfig(**{"model": small_model, "kernels": kernel_kind, "dtype": activations, **SETTINGS, **settings})
        )

    return make


@pytest.fixture(scope="session")
def cold(make_engine) -> Callable[[Request], Result]:
    """The answer to a request that has an engine to itself and no cache: its prompt in one chunk, then token by token."""
    engine = make_engine(enable_prefix_caching=False, max_num_batched_tokens=256)
    return lambda request: run_alone(engine, request)
