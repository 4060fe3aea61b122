"""Every small fault of the lists is found by the check that must find it, and a sound engine passes all checks."""

from __future__ import annotations

import logging
import re

import pytest

from samebit.kernels.native.build import NativeUnavailableError, host_isas, load_library
from tests.mutants.battery import BATTERY, look
from tests.mutants.edits import edit
from tests.mutants.pages import GROUPS

MUTANTS = {mutant.name: mutant for group in GROUPS.values() for mutant in group}
NEEDS_A_COMPILER = {"a kernel runs outside the dispatcher"}
# A fault that does not even run proves nothing.
BROKEN = re.compile(r"(Syntax|Name|UnboundLocal|Attribute|Type)Error")


@pytest.mark.parametrize("check", BATTERY)
def test_a_sound_engine_passes_the_battery(check):
    assert look(BATTERY[check]) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, monkeypatch):
    mutant = MUTANTS[name]
    if name in NEEDS_A_COMPILER and not has_native_kernels():
        pytest.skip("the torch set has nothing below the dispatcher")  # so no launch of it can be hidden
    # A failed step is logged with its trace; here that is what is wanted.
    monkeypatch.setattr(logging.getLogger("samebit"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("samebit.engine.engine"), "disabled", True)
    mutant.apply(monkeypatch)
    found = look(BATTERY[mutant.check])
    assert found is not None, "survived"
    assert not BROKEN.search(found), found
    assert mutant.shows in found, found


def has_native_kernels() -> bool:
    try:
        load_library(host_isas()[0])
    except NativeUnavailableError:
        return False
    return True


def test_there_are_many_and_each_is_there_once():
    assert len(MUTANTS) == sum(map(len, GROUPS.values())) > 100
    assert {mutant.check for mutant in MUTANTS.values()} == set(BATTERY)


def test_a_fault_that_no_longer_fits_the_code_is_told(monkeypatch):
    with pytest.raises(AssertionError, match="does not fit the code"):
        edit("state.allocator:IdPool.take", "what is not there", "")(monkeypatch)


def test_a_fault_is_gone_after_its_test():
    with pytest.MonkeyPatch.context() as patch:
        MUTANTS["quarantine is skipped"].apply(patch)
        assert look(BATTERY["ids"]) is not None
    assert look(BATTERY["ids"]) is None
