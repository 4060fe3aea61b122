"""What it costs that somebody looks: tokens a second, and CPU time a token, with the page's questions and without.

    python -m benchmarks.page --streams 64 --rounds 20 --output benchmarks/results/page.json

One server, whose engine has one thread, streams the same load in both arms. In one of them a client asks for all that the page shows
(dashboard, cache, requests), each as often as the page does with that view open. The arms take turns, round by round, and
change places, so that a drift of the machine meets both; a ratio is of one round. CPU time, of both of the server's processes, depends less on what else
the machine does. `step_us`: what the engine spends at each step on remembering it for the page, looked at or not, for so many rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving import PROMPT_TOKENS, cpu_s, stream_all, wait_ready
from samebit import SamplingParams
from samebit.core.plan import PlanRow
from samebit.core.request import Request
from samebit.engine.timeline import Timeline

QUESTIONS = (("GET", "dashboard", 1.0), ("POST", "cache", 1.5), ("POST", "requests", 1.0))
TEXT_IDS = (100, 2000)


def main() -> None:
    """Read the arguments, measure, print a record and store it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    record = measure(args)
    print(json.dumps(record, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both arms in turn."""
    flags = ["--port=0", "--num-threads=1", f"--max-num-seqs={args.streams}"]
    command = [sys.executable, "-m", "samebit", "serve", "nano", *flags]
    load_before = psutil.getloadavg()[0]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:  # noqa: S603 - the command is ours
        try:
            rounds = asyncio.run(compare(args, wait_ready(server), psutil.Process(server.pid)))
        finally:
            server.terminate()
    return {
        "command": f"--streams {args.streams} --tokens {args.tokens} --rounds {args.rounds}",
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "load_before": load_before,
        "step_us": round(step_us(args.streams), 1),
        **{
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name in rounds[0]
            for values in [[one[name] for one in rounds]]
        },
    }


async def compare(args: argparse.Namespace, port: int, process: psutil.Process) -> list[dict[str, float]]:
    """The figures of each round; one before them warms the server up."""
    rng = random.Random(0)
    await load(args, rng, port)
    rounds = []
    for number in range(args.rounds):
        found = {}
        for is_watched in (True, False) if number % 2 else (False, True):
            before_s, start_s = both_cpu_s(process), time.perf_counter()
            watcher = asyncio.create_task(watch(port)) if is_watched else None
            num_tokens = await load(args, rng, port)
            took_s, cpu = time.perf_counter() - start_s, both_cpu_s(process) - before_s
            num_looks = 0
            if watcher is not None:
                watcher.cancel()
                num_looks = await watcher
            found[is_watched] = num_tokens / took_s, 1e6 * cpu / num_tokens, num_looks
        (speed, cost, _), (watched_speed, watched_cost, num_looks) = found[False], found[True]
        rounds.append(
            {
                "tokens_per_s": speed,
                "watched_tokens_per_s": watched_speed,
                "speed_ratio": watched_speed / speed,
                "cpu_us_per_token": cost,
                "watched_cpu_us_per_token": watched_cost,
                "cpu_ratio": watched_cost / cost,
                "num_looks": num_looks,
            }
        )
    return rounds


async def load(args: argparse.Namespace, rng: random.Random, port: int) -> int:
    """Stream to all at once; returns how many tokens."""
    prompts = [[rng.randrange(*TEXT_IDS) for _ in range(PROMPT_TOKENS)] for _ in range(args.streams)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    await stream_all(prompts, params, port)
    return args.streams * args.tokens


async def watch(port: int) -> int:
    """Ask what the page asks until cancelled; returns how many questions were answered."""
    num_looks = 0
    due_s = dict.fromkeys(QUESTIONS, time.monotonic())
    try:
        while True:
            question = min(due_s, key=lambda one: due_s[one])
            await asyncio.sleep(max(0.0, due_s[question] - time.monotonic()))
            await ask(port, *question[:2])
            due_s[question] = time.monotonic() + question[2]
            num_looks += 1
    except asyncio.CancelledError:
        return num_looks


async def ask(port: int, method: str, subject: str) -> None:
    """One question of the page."""
    body = b"{}" if method == "POST" else b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} /ui/api/{subject} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    data = await reader.read()
    writer.close()
    assert data.startswith(b"HTTP/1.1 200"), data[:500]


def both_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of the HTTP process and of the engine so far."""
    return cpu_s(process) + sum(cpu_s(child) for child in process.children())


def step_us(num_rows: int) -> float:
    """Microseconds to remember a step."""
    timeline = Timeline()
    names = [f"cmpl-{number:024x}-0" for number in range(num_rows)]
    for name in names:
        timeline.arrived(Request(request_id=name, prompt_token_ids=[1], params=SamplingParams(), seed=0), 0.0)
    steps = [[PlanRow(name, 1, 1, number, 1, []) for name in names] for number in range(500)]
    start_s = time.perf_counter()
    for rows in steps:
        timeline.step(rows, [0] * num_rows, 0.0, 1.0)
    return 1e6 * (time.perf_counter() - start_s) / len(steps)


if __name__ == "__main__":
    main()
