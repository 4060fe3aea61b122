"""Time from the start of a process to the first token of a model, with kernels compiled before and with none, and its phases.

    python -m benchmarks.startup nano --device cuda --output benchmarks/results/startup.json

First come runs with a new and empty folder for compiled kernels each, then runs with the last of these folders. All must give
the same tokens and logprobs. A phase that is part of another is named behind it ("engine: load: certify"); seconds of the compiler
fall into all phases. The files of Python and torch are in memory but for the first run on a machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

PROMPT = "def add(a, b):"
TIMEOUT_S = 300
# Functions that take most of a start: where they are looked up, and the phase that each is.
PHASES = (
    ("samebit.engine.engine", "load", "engine: load"),
    ("samebit.engine.loading", "certify", "engine: load: certify"),
    ("samebit.kernels.triton.linear", "certified_row_counts", "engine: load: try the library's products"),
    ("samebit.engine.engine", "cache_budget", "engine: measure a step's memory"),
    ("samebit.engine.engine", "capture_graphs", "engine: capture graphs"),
)


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, measure in processes of their own, print and store the record."""
    args = parsed(arguments)
    if args.child is not None:
        print(json.dumps(child(args.model, json.loads(args.settings), args.child)))
        return
    settings = {"device": args.device, **json.loads(args.settings)}
    record: dict[str, Any] = {"command": f"{Path(args.model).name} --device {args.device}", "settings": settings}
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    answer = None
    with tempfile.TemporaryDirectory() as folder:
        for kind, number in [*(("cold", i) for i in range(args.cold)), *(("warm", i) for i in range(args.warm))]:
            # Without a cold run, what other runs have compiled is used.
            compiled = Path(folder) / str(number if kind == "cold" else args.cold - 1) if args.cold else None
            told = run(args.model, settings, compiled)
            record |= told.pop("environment")
            if answer not in (None, told["answer"]):
                raise SystemExit(f"{kind} run {number} answers differently")
            answer = told.pop("answer")
            runs[kind].append(told)
            print(f"{kind}: {json.dumps(told)}", flush=True)
            record |= {name: summary(found) for name, found in runs.items()}
            if args.output is not None:
                args.output.write_text(json.dumps(record, indent=1) + "\n")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--settings", default="{}", help="further settings of the engine, as JSON")
    parser.add_argument("--cold", type=int, default=1, help="runs with nothing compiled")
    parser.add_argument("--warm", type=int, default=3, help="runs with everything compiled")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(model: str, settings: dict[str, Any], compiled: Path | None) -> dict[str, Any]:
    """What a new process tells, whose kernels are compiled into the folder `compiled`, or where they always are."""
    folders = [] if compiled is None else [f"TRITON_CACHE_DIR={compiled}", f"XDG_CACHE_HOME={compiled}"]
    flags = ["--settings", json.dumps(settings), "--child", repr(time.monotonic())]
    command = ["/usr/bin/env", *folders, sys.executable, "-m", "benchmarks.startup", model, *flags]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=TIMEOUT_S)  # noqa: S603 - ours
    found: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over runs of the whole and of each phase, and all of the wholes."""
    phases = {phase: statistics.median(run["phases"].get(phase, 0.0) for run in runs) for phase in runs[0]["phases"]}
    wholes = [run["first_token_s"] for run in runs]
    return {
        "first_token_s": statistics.median(wholes),
        "runs": wholes,
        "phases": {phase: round(seconds, 3) for phase, seconds in phases.items()},
        "kernels_compiled": runs[0]["kernels_compiled"],
        "kernels_found": runs[0]["kernels_found"],
        "compiler_s": statistics.median(run["compiler_s"] for run in runs),
    }


class Phases:
    """Seconds of each phase of this process, which began at `began` of the monotonic clock."""

    def __init__(self, began: float) -> None:
        self.began = self._last = began
        self.seconds: dict[str, float] = defaultdict(float)

    def end(self, phase: str) -> None:
        """All since the last end was `phase`."""
        now = time.monotonic()
        self.seconds[phase] += now - self._last
        self._last = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count the calls of a function of a module as `phase`."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            before = time.monotonic()
            try:
                return function(*args, **options)
            finally:
                self.seconds[phase] += time.monotonic() - before

        setattr(owner, name, wrapper)


class Compiler:
    """What Triton's compiler did in this process."""

    def __init__(self) -> None:
        self.compiled, self.found, self.seconds = 0, 0, 0.0

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Called by Triton for each kernel that it is asked for."""
        self.compiled += not cache_hit
        self.found += cache_hit
        self.seconds += times.total / 1e6 if not cache_hit else 0.0


def child(model: str, settings: dict[str, Any], began: float) -> dict[str, Any]:
    """Start an engine in this process, draw a token, and tell how long what took since `began`; then answer, to be compared."""
    phases, compiler = Phases(began), Compiler()
    phases.end("start Python")
    import torch  # noqa: PLC0415 - is to be timed

    from samebit import LLM, SamplingParams  # noqa: PLC0415 - is to be timed
    from samebit.engine import engine  # noqa: F401, PLC0415 - as above

    phases.end("import")
    if settings["device"] == "cuda":
        torch.zeros(1, device="cuda")
        phases.end("initialise the device")
        watch_compiler(compiler)
    for module, name, phase in PHASES:
        if settings["device"] == "cuda" or "triton" not in module:
            phases.watch(__import__(module, fromlist=[name]), name, phase)
    phases.end("import kernels")
    llm = LLM(model, **settings)
    phases.end("engine")
    llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))
    phases.end("first token")
    whole = time.monotonic() - began
    output = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0))[0]
    from samebit.bench.environment import environment  # noqa: PLC0415 - not a part of the start

    return {
        "first_token_s": round(whole, 3),
        "phases": {phase: round(seconds, 3) for phase, seconds in phases.seconds.items()},
        "kernels_compiled": compiler.compiled,
        "kernels_found": compiler.found,
        "compiler_s": round(compiler.seconds, 3),
        "answer": [output.outputs[0].token_ids, repr(output.outputs[0].logprobs)],
        "environment": environment(llm.info),
    }


def watch_compiler(compiler: Compiler) -> None:
    """Have Triton tell what it compiles, if this version of it can."""
    import triton  # noqa: PLC0415 - is to be timed

    if hasattr(triton.knobs.compilation, "listener"):
        triton.knobs.compilation.listener = compiler


if __name__ == "__main__":
    main()
