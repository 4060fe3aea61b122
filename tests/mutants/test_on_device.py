"""Faults of recorded steps are found on a GPU, too, where steps are captured as CUDA graphs."""

from __future__ import annotations

import logging

import pytest

from tests.mutants import worlds
from tests.mutants.battery import BATTERY, look
from tests.mutants.test_mutants import BROKEN, MUTANTS, NEEDS_A_COMPILER

pytestmark = pytest.mark.gpu
# A C kernel has no place in a step on a GPU.
GRAPH_FAULTS = [m.name for m in MUTANTS.values() if m.check == "graphs" and m.name not in NEEDS_A_COMPILER]


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    monkeypatch.setattr(worlds, "PLACE", {"kernels": "triton", "device": "cuda", "dtype": "float32"})
    monkeypatch.setattr(worlds, "RECORDED", {"graph": "cuda"})
    monkeypatch.setattr(worlds, "COMPILED", {})


def test_a_sound_engine_passes():
    assert look(BATTERY["graphs"]) is None


@pytest.mark.parametrize("name", GRAPH_FAULTS)
def test_a_fault_of_recorded_steps_is_caught(name, monkeypatch):
    monkeypatch.setattr(logging.getLogger("samebit"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("samebit.engine.engine"), "disabled", True)
    MUTANTS[name].apply(monkeypatch)
    found = look(BATTERY["graphs"])
    assert found is not None, "survived"
    assert not BROKEN.search(found), found
