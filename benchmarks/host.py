"""CPU time that the host takes for a step, with a device that answers at once, and where it goes.

    python -m benchmarks.host --rows 32 --steps 400 --profile

Requests decode with all their settings neutral (or with --penalties, --logprobs). Addresses, forward pass, sampler and tags are left out:
what is measured is planning, the choice of a bucket, filling its inputs, reading results back, committing them and making text. A captured
step runs none of what is left out on the host. With --ahead a step is planned while the one before it is under way, as on a GPU. With --cached
so many other requests of 1,500 tokens have been answered before: with enough of them something must leave the cache for each new page, as in
a server that has run for a while.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from itertools import cycle
from typing import Any

import torch

from samebit.core.config import EngineConfig, SpeculativeConfig
from samebit.core.request import Request, SamplingParams
from samebit.engine.device import buckets_of
from samebit.engine.engine import Engine
from samebit.inputs import Bucket
from samebit.runner import runner as runner_module
from samebit.runner.ladder import Ladder
from samebit.runner.readback import Results
from samebit.runner.step import StepTensors

PROMPT = 200
CACHED_PROMPT = 1500
# Steps until the same tokens come again.
NUM_ANSWERS = 16


def main() -> None:
    """Read the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--penalties", action="store_true", help="requests have a frequency penalty")
    parser.add_argument("--logprobs", type=int, default=0)
    parser.add_argument("--ahead", action="store_true", help="plan ahead, as on a GPU")
    parser.add_argument("--cached", type=int, default=0, help="requests whose prompts the cache has held before")
    parser.add_argument("--cache-bytes", type=int, default=1 << 28)
    parser.add_argument("--speculative-config", type=json.loads, help="who guesses; no guess is ever right")
    parser.add_argument("--profile", action="store_true", help="print the ten functions that take most")
    args = parser.parse_args()
    engine = engine_without_device(
        args.model, args.rows, args.speculative_config, is_ahead=args.ahead, cache_bytes=args.cache_bytes
    )
    fill_cache(engine, args.cached)
    # Text of varied tokens that end nothing.
    params = SamplingParams(
        max_tokens=args.steps + 50,
        ignore_eos=True,
        logprobs=args.logprobs or None,
        frequency_penalty=0.5 if args.penalties else 0.0,
    )
    for number in range(args.rows):
        prompt = [1 + (number * 977 + place * 31) % 4000 for place in range(PROMPT)]
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, seed=number))
    for _ in range(30):
        engine.step()
    totals = []
    for _ in range(args.steps // 2):
        before = time.process_time_ns()
        engine.step()
        totals.append(time.process_time_ns() - before)
    if count := engine.scheduler.counters.num_preemptions:
        raise SystemExit(
            f"{count} preemptions: the steps were not of all rows; --cache-bytes={args.cache_bytes} is too little"
        )
    print(
        f"{args.rows} rows: {statistics.median(totals) / 1e6:.3f} ms CPU a step (fastest tenth {tenth(totals):.3f}, slowest {max(totals) / 1e6:.3f})"
    )
    if args.profile:
        profile = cProfile.Profile()
        for _ in range(args.steps // 2):
            profile.runcall(engine.step)
        pstats.Stats(profile).sort_stats("tottime").print_stats(10)
        return
    parts = timed_parts(engine)
    for _ in range(args.steps // 2):
        engine.step()
    for name, times in parts.items():
        print(f"  {name}: {statistics.median(times) / 1e6:.3f} ms (fastest tenth {tenth(times):.3f})")


def fill_cache(engine: Engine, count: int) -> None:
    """Have the engine answer so many requests whose prompts have nothing in common."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    began = time.process_time()
    for number in range(count):
        prompt = [rng.randrange(1, 4000) for _ in range(CACHED_PROMPT)]
        engine.add(Request(request_id=f"cached {number}", prompt_token_ids=prompt, params=params, seed=number))
    while engine.has_work:
        engine.step()
    if count:
        print(f"{count} requests before: {(time.process_time() - began) / count * 1e3:.3f} ms CPU each", flush=True)


def tenth(times: list[int]) -> float:
    """The first decile in milliseconds: that of a core which nobody else uses."""
    return sorted(times)[len(times) // 10] / 1e6


def engine_without_device(
    model: str,
    rows: int,
    speculation: dict[str, Any] | None = None,
    *,
    is_ahead: bool = False,
    cache_bytes: int = 1 << 28,
) -> Engine:
    """An engine whose steps fill the bucket that a GPU would take, and find every token drawn and everything written."""
    config = EngineConfig(
        model=model,
        device="cpu",
        max_num_seqs=rows,
        num_threads=1,
        cache_bytes=cache_bytes,
        async_scheduling=is_ahead,
        speculative_config=None if speculation is None else SpeculativeConfig(**speculation),
    )
    engine = Engine(config)
    drafter = engine._loaded.drafter
    num_drafts = 0 if drafter is None else drafter.max_drafts
    runner = engine._runner
    buckets = buckets_of(engine._config, engine._loaded, runner._pools.geometry)
    with torch.inference_mode():
        programs = {bucket: runner_module._Program(runner._place, bucket) for bucket in buckets}
        for bucket, program in programs.items():
            packed = [program.results.pack(answers(bucket, num_drafts, number)) for number in range(NUM_ANSWERS)]
            program.run = cycle(packed).__next__  # type: ignore[method-assign]  # of this program alone
    runner._captured = programs
    runner._ladder = Ladder(buckets)
    return engine


def answers(bucket: Bucket, num_drafts: int, number: int) -> StepTensors:
    """Everything as it should be, no guess right, and other tokens for each number."""
    words, real = torch.zeros(bucket.samples, dtype=torch.int32), torch.zeros(bucket.samples)
    yes = torch.ones(max(bucket.samples, bucket.rows, bucket.entries), dtype=torch.bool)
    return StepTensors(
        tokens=(torch.arange(bucket.samples) * 37 + number * 101).int() % 3000 + 300,
        logprobs=real,
        ranks=words + 1,
        finite=yes[: bucket.samples],
        top_ids=torch.zeros(bucket.samples, bucket.top, dtype=torch.int32),
        top_logprobs=torch.zeros(bucket.samples, bucket.top),
        accepted=torch.zeros(bucket.rows, dtype=torch.int32),
        rows_intact=yes[: bucket.rows],
        pages_intact=yes[: bucket.entries],
        rows_written=yes[: bucket.entries],
        drafts=torch.ones(bucket.drafts, num_drafts, dtype=torch.int32),
        confidence=torch.full((bucket.drafts, num_drafts), 0.5),
    )


def timed_parts(engine: Engine) -> dict[str, list[int]]:
    """Times of each part of a step from now on, in nanoseconds; a clock of CPU time would take longer to read than some of them."""
    times: dict[str, list[int]] = defaultdict(list)

    def timed(owner: Any, name: str, called: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            before = time.perf_counter_ns()
            try:
                return function(*args, **options)
            finally:
                times[called].append(time.perf_counter_ns() - before)

        setattr(owner, name, wrapper)

    timed(engine.scheduler, "plan_ahead" if engine._config.async_scheduling else "plan", "plan")
    timed(engine._runner, "launch", "launch")
    timed(Bucket, "of", "  choose a bucket")
    for program in engine._runner._captured.values():
        timed(program.buffers, "fill", "  fill")
    timed(Results, "copy", "  copy back")
    timed(runner_module, "_read_back", "  take apart")
    timed(engine.scheduler, "commit", "commit")
    timed(engine.timeline, "step", "timeline")
    timed(engine._outputs, "process", "text of a row")
    return times


if __name__ == "__main__":
    main()
