"""Starts the engine process, watches it, starts it again after a crash, and stops it.

Knows processes and folders; does not know messages or requests. The one place that reads the
environment: to hand it on, and for keys. No variable in it changes results.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from samebit.core.config import EngineConfig
from samebit.core.errors import EngineDeadError, SamebitError
from samebit.engine.client import MAX_OPEN_TOKENS, AsyncEngineClient
from samebit.engine.metrics import ServerMetrics
from samebit.engine.model_source import bundled_drafter

ENGINE_CLASS = "samebit.engine.engine:Engine"
API_KEY_VARIABLE = "SAMEBIT_API_KEY"
ADMIN_KEY_VARIABLE = "SAMEBIT_ADMIN_API_KEY"

_STOP_WAIT_S = 5.0
_LAST_WORDS_S = 0.2
_RESTART_WINDOW_S = 600.0


def num_serving_threads() -> int:
    """CPU threads for an engine beside a server: all cores but one.

    One busy neighbour on a core slows every thread of a kernel down, so the server gets its own.
    """
    return max(1, _num_cores() - 1)


def keys_in_environment() -> tuple[list[str], str | None]:
    """API keys, separated by blanks, and the admin key, of the variables named above."""
    return os.environ.get(API_KEY_VARIABLE, "").split(), os.environ.get(ADMIN_KEY_VARIABLE) or None


def with_other_weights(config: EngineConfig, model: str) -> EngineConfig:
    """`config` for `model`, which has taken the place of its own; a drafter that is bundled with that one stays."""
    wanted = config.speculative_config
    bundled = None if wanted is None or wanted.model else bundled_drafter(config.model, wanted.method)
    if wanted is not None and bundled is not None:
        wanted = msgspec.structs.replace(wanted, model=str(bundled))
    return msgspec.structs.replace(config, model=model, speculative_config=wanted)


@contextlib.asynccontextmanager
async def start_engine(
    config: EngineConfig,
    metrics: ServerMetrics,
    *,
    max_open: int,
    max_open_tokens: int = MAX_OPEN_TOKENS,
    max_restarts: int = 0,
    log_level: str = "warning",
    engine_class: str = ENGINE_CLASS,
    say: Callable[[str], None] | None = None,
) -> AsyncIterator[AsyncEngineClient]:
    """An engine process that is ready to serve, and its client; the process is gone afterwards.

    A process that dies is replaced, `max_restarts` times within ten minutes, and `say` is told, if given. Raises what the engine gave
    as the reason if it cannot start (ConfigError, ModelError), or EngineDeadError if it died without a word.
    """
    client = AsyncEngineClient(metrics, max_open=max_open, max_open_tokens=max_open_tokens)
    keeper = _Keeper(config, client, max_restarts, log_level, engine_class, say)
    keeping = asyncio.create_task(keeper.keep())
    try:
        await client.wait_ready()
        yield client
    finally:
        await keeper.stop(keeping)


class _Keeper:
    """Owner of the engine process, of which there is one at a time."""

    def __init__(
        self,
        config: EngineConfig,
        client: AsyncEngineClient,
        max_restarts: int,
        log_level: str,
        engine_class: str,
        say: Callable[[str], None] | None,
    ) -> None:
        self._config = config
        self._client = client
        self._max_restarts = max_restarts
        self._arguments = (log_level, engine_class)
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._restarts: deque[float] = deque()
        self._stopping = asyncio.Event()

    async def keep(self) -> None:
        """Start the process, and again whenever it has died, until it must not be."""
        try:
            while not self._stopping.is_set():
                self._process = await self._start()
                if self._stopping.is_set():
                    self._process.kill()
                reason = self._client.lose(await _end_of(self._process))
                if not self._may_restart():
                    if len(self._restarts) > self._max_restarts > 0:
                        reason = EngineDeadError(
                            f"{reason}; it was started again {self._max_restarts} times in ten minutes, which is the limit"
                        )
                    self._client.fail(reason)
                    return
                if self._say is not None:
                    self._say(f"{reason}; starting it again")
        except OSError as error:
            self._client.fail(EngineDeadError(f"the engine process cannot be started: {error}"))

    async def stop(self, keeping: asyncio.Task[None]) -> None:
        """End the process, at first by asking."""
        self._stopping.set()
        if self._client.is_loading:
            self._signal(is_kill=False)  # it does not listen
        await self._client.close()
        done, _ = await asyncio.wait([keeping], timeout=_STOP_WAIT_S)
        if not done:
            self._signal(is_kill=True)
        await keeping

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > _RESTART_WINDOW_S:
            self._restarts.popleft()
        self._restarts.append(now)
        return self._client.is_ready and not self._stopping.is_set() and len(self._restarts) <= self._max_restarts

    async def _start(self) -> asyncio.subprocess.Process:
        folder = Path(tempfile.mkdtemp(prefix="samebit-"))
        address = self._client.connect(folder)
        config = self._config
        if self._client.is_ready:
            # Other weights may have been loaded since the first start.
            config = with_other_weights(config, self._client.info.model)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "samebit.engine.process"),
            *(address, str(os.getpid()), *self._arguments),
            msgspec.json.encode(config).decode(),
            stdin=asyncio.subprocess.DEVNULL,
            env=_child_environment(config.num_threads),
            # Ctrl-C is for this process, which then lets requests finish.
            start_new_session=True,
        )

    def _signal(self, *, is_kill: bool) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill() if is_kill else self._process.terminate()


async def _end_of(process: asyncio.subprocess.Process) -> SamebitError:
    """Wait until `process` has ended; how it did."""
    status = await process.wait()
    # A process that ends by itself says why; let that arrive first.
    await asyncio.sleep(_LAST_WORDS_S)
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return EngineDeadError(f"the engine process {how}")


def _child_environment(num_threads: int | None) -> dict[str, str]:
    """This process's environment without keys, and with libraries kept to the threads that the engine may use."""
    kept = {name: value for name, value in os.environ.items() if name not in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE)}
    return {**kept, "OMP_NUM_THREADS": str(num_threads or _num_cores())}


def _num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
