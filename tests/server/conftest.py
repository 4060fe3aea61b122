"""One server with the bundled model for all tests that need one, and as many with a fake engine as a test starts."""

import asyncio
import contextlib
import os

import openai
import pytest

from samebit.core.config import EngineConfig
from samebit.engine.launch import start_engine
from samebit.engine.metrics import ServerMetrics
from tests.server.driver import COMMAND, ROOT, fake_arguments, running


@pytest.fixture(scope="session")
def server(tmp_path_factory, request):
    kernels = request.config.getoption("--kernels")
    flags = ["--num-threads", "1", "--port", "0", "--cache-bytes", "200000000", "--kernels", kernels]
    log = tmp_path_factory.mktemp("server") / "log"
    with running([COMMAND, "serve", "nano", *flags], log) as server:
        yield server.wait_ready()
        assert server.process.poll() is None, "the server outlives all that the tests did to it"
        assert "Traceback" not in server.log, server.log


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key="x", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def start(tmp_path):
    """Start a server with the fake engine; all are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start(config=None, **options):
            arguments = fake_arguments(config, **options)
            return stack.enter_context(running(arguments, tmp_path / "log")).wait_ready()

        yield start


@pytest.fixture
def run(monkeypatch):
    """Run `story(client, metrics)` with a fresh engine process."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

    def run(story, *, config=None, **options):
        async def main():
            metrics = ServerMetrics("nano")
            config_or_default = config or EngineConfig(max_num_seqs=4)
            async with (
                asyncio.timeout(120),
                start_engine(
                    config_or_default,
                    metrics,
                    engine_class="tests.server.fakes:FakeEngine",
                    **{"max_open": 64, **options},
                ) as client,
            ):
                return await story(client, metrics)

        return asyncio.run(main())

    return run
