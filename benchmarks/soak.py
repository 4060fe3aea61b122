"""Many clients at once, good and bad, against `samebit serve`; then every answer of a sample is compared with its solo run.

    python -m benchmarks.soak --connections 1000 --seconds 600 --output benchmarks/results/soak.json

Each connection goes on asking: streams and whole answers, readers that are slow, clients that leave in the middle, aborts, bodies that
are no JSON or ask for nonsense, and probes. What must come of it: no answer that is not what it should be, nothing held at the end,
memory that does not grow, and answers that are those of the same request alone, cold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving import wait_ready

TEXT_IDS = range(100, 2000)
# On a crowded machine a thousand requests take minutes; what takes longer hangs.
PATIENCE_S = 1200
BAD_BODIES = (
    b"{",
    b"\xff\xfe",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": "a", "nonesuch": 1}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "a", "n": 1000000}',
    b'{"prompt": "' + b"a" * 100_000 + b'"}',
)


@dataclass
class Soak:
    """Owner of what has happened so far."""

    port: int
    end_s: float
    prefixes: list[list[int]]
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[dict[str, Any], list[Any]]] = field(default_factory=list)

    def expect(self, is_so: bool, what: str) -> None:
        """Note `what` as an error unless `is_so`."""
        if not is_so:
            self.errors[what[:200]] += 1


def main() -> None:
    """Read the arguments, run, print a record and store it. Exits with 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--audited", type=int, default=500)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    record = run(args.model, args.connections, args.seconds, args.audited)
    print(json.dumps(record, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(bool(record["errors"] or record["num_different"] or record["held_at_the_end"]))


def run(model: str, connections: int, seconds: float, audited: int) -> dict[str, Any]:
    """Start a server, load it, audit it, stop it."""
    flags = ["--port", "0", "--num-threads", "1", "--max-num-seqs", "64", "--max-queued-requests", str(3 * connections)]
    command = [sys.executable, "-m", "samebit", "serve", model, *flags, "--cache-bytes", "200000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:  # noqa: S603 - the command is ours
        try:
            record = asyncio.run(soak(wait_ready(server), psutil.Process(server.pid), connections, seconds, audited))
        finally:
            server.terminate()
        return {**record, "exit_status": server.wait()}


async def soak(port: int, process: psutil.Process, connections: int, seconds: float, audited: int) -> dict[str, Any]:
    """Load the server for a while, then look at what is left, and audit a sample."""
    rng = random.Random(0)
    prefixes = [rng.choices(TEXT_IDS, k=rng.choice((20, 60, 150, 300))) for _ in range(20)]
    state = Soak(port, time.monotonic() + seconds, prefixes)
    # Memory is compared after it has grown to what this many connections take.
    workers = [asyncio.create_task(client(state, random.Random(seed))) for seed in range(connections)]
    await asyncio.sleep(seconds * 0.2)
    rss_start = rss(process)
    await asyncio.gather(*workers)
    rss_end = rss(process)
    await asyncio.sleep(1.5)
    await call(port, "POST", "/flush_cache", b"")
    await asyncio.sleep(1.5)
    info = json.loads((await call(port, "GET", "/server_info", b""))[1])
    stats = info["stats"]
    held = {name: value for name, value in stats.items() if value and re.match("num_(running|waiting)|usage_", name)}
    sample = rng.sample(state.answers, min(audited, len(state.answers)))
    num_different = 0
    for number, (body, expected) in enumerate(sample):
        solo = {**body, "cache_salt": f"solo-{number}", "priority": 0, "stream": False}
        status, data = await call(port, "POST", "/v1/completions", json.dumps(solo).encode())
        found = [choice["token_ids"] for choice in json.loads(data)["choices"]] if status == 200 else [status]
        num_different += found != expected
    return {
        "command": f"--connections {connections} --seconds {seconds:g} --audited {audited}",
        "counts": dict(state.counts),
        "errors": dict(state.errors),
        "rss_mb_start": rss_start,
        "rss_mb_end": rss_end,
        "held_at_the_end": held,
        "num_audited": len(sample),
        "num_different": num_different,
        "watched": {name: stats[name] for name in ("num_refused_checkpoints", "num_damaged_resumes", "failed_steps")},
        "cached_tokens_of_answers": state.counts["cached tokens"],
    }


def rss(process: psutil.Process) -> dict[str, float]:
    """MB of the HTTP process and of the engine's."""
    (engine,) = process.children()
    return {"http": process.memory_info().rss / 1e6, "engine": engine.memory_info().rss / 1e6}


async def client(state: Soak, rng: random.Random) -> None:
    """Go on asking until the time is up."""
    kinds = {good: 70, slow: 6, leave: 10, abort: 6, bad: 6, probe: 2}
    while time.monotonic() < state.end_s:
        (kind,) = rng.choices(list(kinds), weights=list(kinds.values()))
        state.counts[kind.__name__] += 1
        try:
            await asyncio.wait_for(kind(state, rng), PATIENCE_S)
        except (OSError, TimeoutError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            state.errors[f"{kind.__name__}: {type(error).__name__}: {error}"[:200]] += 1


def question(state: Soak, rng: random.Random, **fields: Any) -> dict[str, Any]:
    """A body that must be answered."""
    return {
        "prompt": rng.choice(state.prefixes) + rng.choices(TEXT_IDS, k=rng.randint(0, 20)),
        "max_tokens": rng.choice((1, 4, 16, 48)),
        "temperature": rng.choice((0, 0.7, 1.0)),
        "seed": rng.randrange(2**31),
        "n": rng.choice((1, 1, 1, 2)),
        "priority": rng.randint(-2, 2),
        "cache_salt": rng.choice(("", "a", "b")),
        "return_token_ids": True,
        "ignore_eos": True,
        "stream": rng.random() < 0.8,
        **fields,
    }


async def good(state: Soak, rng: random.Random) -> None:
    """Ask and read; the answer is kept for the audit."""
    body = question(state, rng)
    status, data = await call(state.port, "POST", "/v1/completions", json.dumps(body).encode())
    keep(state, body, status, data)


async def slow(state: Soak, rng: random.Random) -> None:
    """The same, a few bytes at a time."""
    body = question(state, rng, stream=True, max_tokens=16)
    async with connected(state.port, "POST", "/v1/completions", json.dumps(body).encode()) as reader:
        data = b""
        while piece := await reader.read(rng.choice((64, 512, 4096))):
            data += piece
            await asyncio.sleep(rng.random() * 0.05)
    keep(state, body, *split(data))


async def leave(state: Soak, rng: random.Random) -> None:
    """Hang up somewhere."""
    body = question(state, rng, max_tokens=200)
    async with connected(state.port, "POST", "/v1/completions", json.dumps(body).encode()) as reader:
        if rng.random() < 0.7:
            await reader.read(rng.choice((1, 200, 2000)))
        else:
            await asyncio.sleep(rng.random())


async def abort(state: Soak, rng: random.Random) -> None:
    """Abort an answer after its first event."""
    body = question(state, rng, stream=True, max_tokens=400, n=1)
    async with connected(state.port, "POST", "/v1/completions", json.dumps(body).encode()) as reader:
        data = b""
        while b'"id":"' not in data and (piece := await reader.read(4096)):
            data += piece
        found = re.search(rb'"id":"(cmpl-\w+)"', data)
        state.expect(found is not None, f"abort: no id in {data[:100]!r}")
        if found is None:
            return
        status, _ = await call(state.port, "POST", "/abort_request", json.dumps({"rid": found[1].decode()}).encode())
        state.expect(status == 200, f"abort: {status}")
        rest = data + await reader.read()
        state.expect(b"[DONE]" in rest, "abort: the stream has no end")
        state.expect(b'"finish_reason":"abort"' in rest or b'"finish_reason":"length"' in rest, "abort: no reason")


async def bad(state: Soak, rng: random.Random) -> None:
    """Send nonsense, or more than the queue ever holds."""
    status, data = await call(state.port, "POST", "/v1/completions", rng.choice(BAD_BODIES))
    is_refused = status == 400 or (status == 503 and b"send fewer" in data)
    state.expect(is_refused and b'"error"' in data, f"bad: {status} {data[:100]!r}")


async def probe(state: Soak, rng: random.Random) -> None:
    """Look at the server."""
    path = rng.choice(("/health", "/ready", "/metrics", "/v1/models", "/v1/loads", "/health_generate"))
    status, _ = await call(state.port, "GET", path, b"")
    state.expect(status == 200, f"probe: {path} {status}")


def keep(state: Soak, body: dict[str, Any], status: int, data: bytes) -> None:
    """Check an answer and keep its token ids."""
    state.expect(status == 200, f"good: {status} {data[:200]!r}")
    if status != 200:
        return
    ids: list[list[int]] = [[] for _ in range(body["n"])]
    if body["stream"]:
        state.expect(b"data: [DONE]" in data, "good: the stream has no end")
        events = [json.loads(event) for event in re.findall(rb"^data: (\{.*\})$", data, re.MULTILINE)]
    else:
        events = [json.loads(data)]
        state.counts["cached tokens"] += events[0]["usage"]["prompt_tokens_details"]["cached_tokens"]
    for event in events:
        state.expect("error" not in event, f"good: {event.get('error')}")
        for choice in event.get("choices", ()):
            ids[choice["index"]] += choice.get("token_ids", [])
    state.expect({len(each) for each in ids} == {body["max_tokens"]}, "good: tokens are missing")
    state.counts["tokens"] += sum(map(len, ids))
    state.answers.append((body, ids))


@contextlib.asynccontextmanager
async def connected(port: int, method: str, path: str, body: bytes) -> Any:
    """A connection on which a request was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        yield reader
    finally:
        writer.transport.abort()


async def call(port: int, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body."""
    async with connected(port, method, path, body) as reader:
        return split(await reader.read())


def split(data: bytes) -> tuple[int, bytes]:
    """Status and body of a whole answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


if __name__ == "__main__":
    main()
