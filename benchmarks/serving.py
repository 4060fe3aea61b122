"""What HTTP costs: tokens a second through `samebit serve` beside the offline engine, and the server's CPU time a token.

    python -m benchmarks.serving --streams 64 --rounds 5 --output benchmarks/results/serving.json

The engine has one thread in both arms. They take turns, round by round, so that a drift of the machine meets both; a ratio is of one
round. Every stream is a connection of its own, read by one cheap client on the same machine, whose work is part of the cost.
Greedy, without an early stop. The CPU time is that of the HTTP process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from samebit import LLM, SamplingParams

PROMPT_TOKENS = 32
FIRST_TEXT_ID = 100


def main() -> None:
    """Read the arguments, measure, print a record and store it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    record = measure(args)
    print(json.dumps(record, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both arms in turn."""
    size = {"max_num_seqs": args.streams, "num_threads": 1}
    llm = LLM(args.model, **size)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in size.items()]
    command = [sys.executable, "-m", "samebit", "serve", args.model, "--port", "0", *flags]
    rng = random.Random(0)
    rounds = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:  # noqa: S603 - the command is ours
        try:
            port = wait_ready(server)
            process = psutil.Process(server.pid)
            for number in range(args.rounds + 1):
                prompts = [
                    [rng.randrange(FIRST_TEXT_ID, llm.info.vocab_size // 2) for _ in range(PROMPT_TOKENS)]
                    for _ in range(args.streams)
                ]
                one = compare(llm, prompts, params, port, process)
                rounds += [one] if number else []  # the first warms both up
        finally:
            server.terminate()
    return {
        "command": f"--streams {args.streams} --tokens {args.tokens} --rounds {args.rounds}",
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "load_before": psutil.getloadavg()[0],
        **{
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name in rounds[0]
            for values in [[one[name] for one in rounds]]
        },
    }


def compare(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, port: int, process: psutil.Process
) -> dict[str, float]:
    """One round: tokens a second of each arm, their ratio, and microseconds of the HTTP process a token."""
    num_tokens = len(prompts) * (params.max_tokens or 0)
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    offline_s = time.perf_counter() - start_s
    cpu_before = cpu_s(process)
    start_s = time.perf_counter()
    texts = asyncio.run(stream_all(prompts, params, port))
    served_s = time.perf_counter() - start_s
    cpu = cpu_s(process) - cpu_before
    same = [text == output.outputs[0].text for text, output in zip(texts, outputs, strict=True)]
    assert all(same), f"{same.count(False)} answers differ"
    return {
        "offline_tokens_per_s": num_tokens / offline_s,
        "served_tokens_per_s": num_tokens / served_s,
        "ratio": offline_s / served_s,
        "server_cpu_us_per_token": 1e6 * cpu / num_tokens,
    }


async def stream_all(prompts: list[list[int]], params: SamplingParams, port: int) -> list[str]:
    """The texts of all prompts, each streamed on a connection of its own."""
    return await asyncio.gather(*(stream(prompt, params, port) for prompt in prompts))


async def stream(prompt: list[int], params: SamplingParams, port: int) -> str:
    """The text of one answer."""
    fields = {"prompt": prompt, "max_tokens": params.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
    writer.write(f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    data = await reader.read()
    writer.close()
    assert b"[DONE]" in data, data[:500]
    events = re.findall(rb"^data: (\{.*\})\r?$", data, re.MULTILINE)
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def wait_ready(server: subprocess.Popen[str]) -> int:
    """The port that the server listens on."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"serving .* on http://\S+:(\d+)", line):
            return int(found[1])
    raise RuntimeError("the server did not start")


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
