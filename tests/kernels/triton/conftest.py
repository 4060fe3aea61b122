"""Kernels for CUDA devices: compiled where there is one, else in Triton's interpreter on a CPU, in a process of their own.

Whether kernels are interpreted is decided when Triton is imported, so these tests need TRITON_INTERPRET=1 from the start
where there is no device (`make test` runs them so).
"""

import os

import pytest
import torch

HAS_DEVICE = torch.cuda.is_available()
if not HAS_DEVICE and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run."""
    return torch.device("cuda" if HAS_DEVICE else "cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def activation(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of activations and of what pools hold."""
    dtype: torch.dtype = request.param
    return dtype
