"""Settings for every test: hypothesis profiles, the --kernels option and the gpu marker.

Knows nothing of the engine, so that it can be loaded where torch is absent.
"""

import pytest
from hypothesis import HealthCheck, settings

# Slow machines are no failure, and a run must be the same run again.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, max_examples=50, **_COMMON)
# For a second run of the same tests with slow kernels.
settings.register_profile("brief", derandomize=True, max_examples=8, **_COMMON)
# New examples each time, some minutes of them; `make fuzz MINUTES=n` repeats it.
settings.register_profile("fuzz", max_examples=300, **_COMMON)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=("auto", "native", "torch", "triton"),
        default="auto",
        help="kernel set for tests that take the kernel_kind fixture",
    )
    parser.addoption(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="activations of engines on a GPU"
    )
    parser.addoption("--model", default="nano", help="the model that tests of speculation on a trained model take")


@pytest.fixture(scope="session")
def kernel_kind(request: pytest.FixtureRequest) -> str:
    """The kernel set to test with; requesting it gives the test the `fallback` marker."""
    return str(request.config.getoption("--kernels"))


@pytest.fixture(scope="session")
def activations(request: pytest.FixtureRequest) -> str:
    """The dtype of activations to test with."""
    return str(request.config.getoption("--dtype"))


# First, so that `-m` sees the markers that are added here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "kernel_kind" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.fallback)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    # Only runs that hold gpu tests pay for the import.
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
