"""What a kernel takes on a device: launches are recorded as an engine makes them, captured, and launched again.

Results are written to memory that was filled with NaN, so that what is not written is seen. Before each timed run what the device's
cache holds is replaced, and runs go round over copies of the operands, so weights come from memory, as in a step of a whole model.
A run follows others of its kind closely.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernel_case import Case
from samebit.kernels.triton import attention, experts
from samebit.kernels.triton.launch import IS_INTERPRETED, launch

NEAR = 0.03
"""Largest difference, in parts of the largest value, of results in bf16 whose sums have another order."""
_MOST_RUNS = 20
_SECONDS_A_REPLAY = 2e-3
_MOST_BYTES = 4 << 30
_CACHE_BYTES = 256 << 20
_WARM_UPS = 500
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device gives: bytes a second of a large copy, operations a second of a large product."""

    copy: float
    product: float

    def least_seconds(self, work: tuple[float, float]) -> float:
        """No launch that moves so many bytes and makes so many operations is faster."""
        return max(work[0] / self.copy, work[1] / self.product)


def measured_rates(device: torch.device) -> Rates:
    """The rates of a GPU; of a CPU, which only tries benchmarks out, some."""
    if device.type == "cpu":
        return Rates(1e9, 1e9)
    from benchmarks.gpu import copy_rate, product_rate  # noqa: PLC0415 - brings an engine, which compilers need not

    rates = Rates(copy_rate(), product_rate())
    torch.cuda.empty_cache()
    return rates


def measured_on(device: torch.device, rates: Rates) -> dict[str, Any]:
    """What a record tells of the device."""
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "interpreted",
        "torch": torch.__version__,
        "copy_bytes_per_s": rates.copy,
        "product_operations_per_s": rates.product,
    }


def are_same(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether results have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def are_near(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether another order of sums explains how far results are from others; it explains no NaN."""
    return all(
        bool(((a.float() - b.float()).abs().max() <= NEAR * b.float().abs().max()).item())
        for a, b in zip(results, wanted, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """A result, and the launches that computed it with the names of their kernels."""

    result: Tensor
    launches: list[tuple[str, Work]]

    def of(self, kernels: Sequence[str]) -> list[Work]:
        """The launches of these kernels, or of all."""
        return [work for name, work in self.launches if not kernels or name in kernels]


def record_launches(case: Case, operands: Any, setting: Any) -> Recorded:
    """Run a case once and keep what it launches."""
    launches: list[tuple[str, Work]] = []
    empty = torch.empty

    def keep(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        launches.append((kernel.__name__, partial(launch, kernel, grid, *args, **meta)))
        launch(kernel, grid, *args, **meta)

    def poisoned(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with ExitStack() as patches:
        for module in case.modules:
            patches.enter_context(patch.object(module, "launch", keep))
        patches.enter_context(patch.object(torch, "empty", poisoned))
        return Recorded(case.run(operands, setting), launches)


def runs_and_copies(case: Case, rates: Rates) -> tuple[int, int]:
    """How many runs are timed together, and over how many copies of the operands they go round."""
    if IS_INTERPRETED:
        return 2, 2
    least = max(rates.least_seconds(case.work(part)) for part in case.parts)
    runs = max(3, min(_MOST_RUNS, round(_SECONDS_A_REPLAY / least)))
    return runs, min(runs, max(2, _MOST_BYTES // case.footprint()))


class Timer:
    """Times launches on a device: on a GPU as a CUDA graph, else one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._cached = torch.ones(_CACHE_BYTES // 4, device=device)

    def warm_up(self) -> None:
        """Keep the device busy until its clocks are those of work."""
        if self._device.type == "cuda":
            for _ in range(_WARM_UPS):
                self._cached.sum()
            torch.cuda.synchronize()

    def prepare(self, works: Sequence[Work], runs: int) -> Callable[[], float]:
        """What runs `works`, which have run before, and tells the seconds of one of so many runs that they are together."""
        if self._device.type != "cuda":
            return lambda: _wall_seconds(works) / runs
        kept = self._captured(works), works

        def seconds() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._cached.sum()
            begin.record()
            kept[0].replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3 / runs

        seconds()
        return seconds

    def _captured(self, works: Sequence[Work]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            works[0]()  # a library takes its scratch memory
        gc.disable()  # to free another graph meanwhile would end the capture
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin()
                try:
                    for work in works:
                        work()
                finally:
                    graph.capture_end()
        finally:
            gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph


def _wall_seconds(works: Sequence[Work]) -> float:
    before = time.perf_counter()
    for work in works:
        work()
    return time.perf_counter() - before


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


class Compilers:
    """Processes that compile settings for the disk cache that all share, in the order of `add`; none where kernels are interpreted."""

    def __init__(self, workers: int) -> None:
        self._pool = None
        if workers and not IS_INTERPRETED:
            self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_only_compile)
        self._found: dict[Hashable, Future[None]] = {}

    def add(self, case: Case, settings: Sequence[Any]) -> None:
        """Begin to compile, unless something alike has been added."""
        for setting in settings:
            variant = case.variant(setting)
            if self._pool is not None and variant not in self._found:
                self._found[variant] = self._pool.submit(_compile, case, setting)

    def wait(self, case: Case, setting: Any, deadline: float) -> str:
        """Wait for a setting; why it cannot be compiled, or nothing. Raises TimeoutError at the deadline."""
        left = deadline - time.perf_counter()
        if left < 0:
            raise TimeoutError
        future = self._found.get(case.variant(setting))
        error = future.exception(left) if future is not None else None
        if isinstance(error, BrokenExecutor):  # then it is compiled here
            return ""
        return "" if error is None else f"not compiled: {brief(error)}"

    def close(self) -> None:
        """Begin nothing more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _only_compile() -> None:
    """Make this process compile kernels instead of launching them."""
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 - not for interpreted kernels

    launched = JITFunction.run

    def compiled(self: Any, *args: Any, **options: Any) -> Any:
        return launched(self, *args, **(options | {"warmup": True}))

    JITFunction.run = compiled
    for module in (attention, experts):
        module.num_programs = lambda *_: 1
    torch.set_num_threads(1)


def _compile(case: Case, setting: Any) -> None:
    case.run(case.operands(torch.device("meta")), setting)


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
