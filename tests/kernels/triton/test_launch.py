"""Kernels can be compiled before anything runs."""

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
