"""Starts the engine process, watches it and stops it.

Knows processes and folders; does not know messages or requests. The one place that reads the
environment, and then only to hand it on: no variable in it changes results.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from samebit.core.config import EngineConfig
from samebit.core.errors import EngineDeadError
from samebit.engine.client import AsyncEngineClient
from samebit.engine.metrics import ServerMetrics

ENGINE_CLASS = "samebit.engine.engine:Engine"

_STOP_WAIT_S = 5.0
_LAST_WORDS_S = 0.2


def num_serving_threads() -> int:
    """CPU threads for an engine beside a server: all cores but one.

    One busy neighbour on a core slows every thread of a kernel down, so the server gets its own.
    """
    return max(1, _num_cores() - 1)


@contextlib.asynccontextmanager
async def start_engine(
    config: EngineConfig,
    metrics: ServerMetrics,
    *,
    max_open: int,
    log_level: str = "warning",
    engine_class: str = ENGINE_CLASS,
) -> AsyncIterator[AsyncEngineClient]:
    """An engine process that is ready to serve, and its client; the process is gone afterwards.

    Raises what the engine gave as the reason if it cannot start (ConfigError, ModelError), or
    EngineDeadError if it died without a word.
    """
    with tempfile.TemporaryDirectory(prefix="samebit-") as folder:
        client = AsyncEngineClient(Path(folder), metrics, max_open=max_open)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "samebit.engine.process"),
            *(client.address, str(os.getpid()), log_level, engine_class),
            msgspec.json.encode(config).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            env=_child_environment(config.num_threads),
            # Ctrl-C is for this process, which then lets requests finish.
            start_new_session=True,
        )
        watcher = asyncio.create_task(_watch(process, client))
        try:
            await client.wait_ready()
            yield client
        finally:
            if not client.is_ready:
                process.terminate()  # it is still loading and does not listen
            await client.close()
            try:
                await asyncio.wait_for(process.wait(), _STOP_WAIT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher


async def _watch(process: asyncio.subprocess.Process, client: AsyncEngineClient) -> None:
    status = await process.wait()
    # A process that ends by itself says why; let that arrive first.
    await asyncio.sleep(_LAST_WORDS_S)
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    client.fail(EngineDeadError(f"the engine process {how}"))


def _child_environment(num_threads: int | None) -> dict[str, str]:
    """This process's environment, with libraries kept to the threads that the engine may use."""
    return {**os.environ, "OMP_NUM_THREADS": str(num_threads or _num_cores())}


def _num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
