"""Faults of recorded steps are found on a GPU, too, where steps are captured as CUDA graphs."""

from __future__ import annotations

import logging
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.mutants import worlds
from tests.mutants.battery import BATTERY, look
from tests.mutants.test_mutants import BROKEN, MUTANTS, NEEDS_A_COMPILER

pytestmark = pytest.mark.gpu
# A C kernel has no place in a step on a GPU.
GRAPH_FAULTS = [m.name for m in MUTANTS.values() if m.check == "graphs" and m.name not in NEEDS_A_COMPILER]
# A stale address may also be one that the device refuses.
REFUSED = "device-side assert"


def look_on_the_device(name: str | None) -> str | None:
    """What the battery says of a fault, or of a sound engine. In a process of its own: a fault may cost it the device."""
    worlds.PLACE = {"kernels": "triton", "device": "cuda", "dtype": "float32"}
    worlds.RECORDED = {"graph": "cuda"}
    worlds.COMPILED = {}
    logging.disable()
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTANTS[name].apply(patch)
        return look(BATTERY["graphs"])


def found(name: str | None) -> str | None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(look_on_the_device, name).result()


def test_a_sound_engine_passes():
    assert found(None) is None


@pytest.mark.parametrize("name", GRAPH_FAULTS)
def test_a_fault_of_recorded_steps_is_caught(name):
    said = found(name)
    assert said is not None, "survived"
    assert not BROKEN.search(said), said
    # Which of an answer's parts is the first to differ depends on the sizes of the steps, which are others here.
    assert MUTANTS[name].shows in said or REFUSED in said or "DifferenceError" in said, said
