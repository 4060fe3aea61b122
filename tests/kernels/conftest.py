"""Every kernel set of this host as a fixture, and NaN in fresh memory so that unwritten outputs are seen."""

import pytest
import torch

from samebit.kernels.native.build import host_isas
from samebit.kernels.selection import native_kernels, torch_kernels

NATIVE = [f"native-{isa}" for isa in host_isas()]


@pytest.fixture(autouse=True)
def poisoned_memory():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session", params=["torch", *NATIVE])
def kernels(request):
    """Each set in turn, on two threads."""
    if request.param == "torch":
        return torch_kernels(2)
    return native_kernels(request.param.removeprefix("native-"), 2)


@pytest.fixture(scope="session", params=NATIVE)
def native(request):
    return native_kernels(request.param.removeprefix("native-"), 2)


@pytest.fixture(scope="session")
def twin():
    return torch_kernels(1)
