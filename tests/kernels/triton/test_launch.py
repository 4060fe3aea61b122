"""Kernels can be compiled before anything runs, without a device too."""

import pytest
import torch

from samebit.kernels.triton.attention import TILINGS
from samebit.kernels.triton.launch import HOPPER_SHARED
from tests.kernels.triton.compiling import told


def test_kernels_are_compiled_for_what_is_to_run_and_none_runs(tmp_path):
    # There is no device: a launch would fail.
    found = told("compiled_ahead", tmp_path)
    assert found["shapes"] == [[3, 256]] * 3
    assert found["launches"] == 3
    assert found["values"] == [0.0] * 3
    # One for each number of columns: whole, not standing in for what is still to come, and ready to be launched.
    assert found["compiled"] == ["CompiledKernel"] * 2
    assert found["loaded"] == [True] * 2


# All kernels of the steps take half a minute; without, only what is not a kernel is at work.
@pytest.mark.parametrize("what", ["none", pytest.param("all", marks=pytest.mark.slow)])
def test_all_steps_of_an_engine_can_be_compiled_whatever_memory_holds_and_change_nothing(tmp_path, what):
    found = told("compiled_steps", tmp_path, what)
    for engine in found["engines"]:
        assert engine["buckets"] > 5
        assert engine["tensors"] > 10
        assert engine["changed"] == 0
    # From the first launch of a step to its last.
    wanted = {
        "find_addresses_kernel",
        "attend_kernel",
        "convolve_kernel",
        "convolve_heads_kernel",
        "down_kernel",
        "down_of_tokens_kernel",
        "sample_kernel",
    }
    assert {*wanted, "joined_bytes_kernel"} < set(found["kernels"])
    assert len(list(tmp_path.rglob("*.cubin"))) > 40 * (what == "all") - 1


def test_long_tiles_of_attention_have_room_on_a_multiprocessor_whatever_heads_are_like(tmp_path):
    found = told("shared_memory", tmp_path)
    assert len(found) == 3
    for said, taken in found:
        assert taken <= said <= HOPPER_SHARED
    tiling = TILINGS[torch.bfloat16]
    assert tiling.long_tile(128, 16, 8, 2, HOPPER_SHARED) == (128, 3)
    # What attends with the models at hand on a device with less, and with the widest features.
    assert tiling.long_tile(128, 16, 8, 2, 163 << 10)[1] > 1
    assert tiling.long_tile(256, 128, 8, 2, HOPPER_SHARED)[0] < 128


def test_a_kernel_that_cannot_be_compiled_is_told_and_others_are_compiled_later(tmp_path):
    found = told("compiling_fails", tmp_path)
    assert found == {"told": "no room on the disk", "later": ["CompiledKernel"]}
