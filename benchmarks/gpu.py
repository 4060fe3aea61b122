"""Speed on a GPU beside what the device can do and beside transformers, on the same weights, in one run.

    python -m benchmarks.models bench-8b /tmp/bench-8b
    python -m benchmarks.gpu /tmp/bench-8b --transformers --output benchmarks/results/gpu.json
    python -m benchmarks.gpu nano --batch 1 8 64

First answers are compared (alone, in a batch, from captured steps, from eager ones), and only then is anything timed. A large
copy and a large product tell what the device gives. A step's wall time is that of the engine; its device time is what passes
between events around its graph, in further steps; what is left is the host's. Where a device waits for its host, that holds the time of
the launch, too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from samebit import LLM, SamplingParams
from samebit.bench.environment import environment
from samebit.core.plan import BatchPlan
from samebit.core.request import Request
from samebit.engine.engine import Engine
from samebit.engine.model_source import resolve_model
from samebit.inputs import Bucket

CONTEXT = 512
BATCHES = (1, 8, 32, 128)
LEAST_SEQS = 8
PREFILL = (8, 2048)
STEPS = 64
WATCHED_STEPS = 32
FIRST_TEXT_ID = 100
MOST_TOKENS = 8192
PEER_WAYS = ("grouped_mm", "batched_mm", "eager")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def main() -> None:
    """Read the arguments, compare, measure, print and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or the name of a bundled model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="requests that decode at once")
    parser.add_argument("--transformers", action="store_true", help="time transformers on the same weights, too")
    parser.add_argument("--profile", action="store_true", help="tell how a step's time falls to kernels, too")
    parser.add_argument("--capture", choices=("start", "use"), default="start", help="when graphs are captured")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "device": "cuda",
        "max_num_seqs": max(LEAST_SEQS, *args.batch),
        "max_num_batched_tokens": MOST_TOKENS,
        "max_model_len": CONTEXT + PREFILL[1],
        "enable_prefix_caching": False,
        "capture": args.capture,
    }
    started = time.perf_counter()
    llm = LLM(args.model, **settings)
    record: dict[str, Any] = {
        "command": f"{Path(args.model).name} --rounds {args.rounds}",
        "start_s": time.perf_counter() - started,
        **environment(llm.info),
        "triton": llm.info.profile.get("triton"),
    }
    compare(llm, args.model, settings)
    print(f"the same bits alone, in a batch, captured and eager; started in {record['start_s']:.1f} s", flush=True)
    record["floors"] = {"copy_bytes_per_s": copy_rate(), "product_operations_per_s": product_rate()}
    print(json.dumps(record["floors"]), flush=True)
    rng = random.Random(0)
    for batch in args.batch:
        record[f"decode, batch {batch}"] = found = decode(llm, rng, batch, args.rounds, profile=args.profile)
        print(batch, json.dumps(found), flush=True)
        store(record, args.output)  # whatever ends the run
    record["prefill"] = found = prefill(llm, rng, args.rounds, profile=args.profile)
    print(json.dumps(found), flush=True)
    store(record, args.output)  # the peer may not run
    if args.transformers:
        del llm
        torch.cuda.empty_cache()
        record["transformers"] = transformers_rates(resolve_model(args.model), rng)
        store(record, args.output)
    print(json.dumps(record, indent=1))


def store(record: dict[str, Any], output: Path | None) -> None:
    """Write the record where it is wanted."""
    if output is not None:
        output.write_text(json.dumps(record, indent=1) + "\n")


def compare(llm: LLM, model: str, settings: dict[str, Any]) -> None:
    """Raise SystemExit unless answers are the same alone, in a batch, from captured steps and from eager ones."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, llm, length) for length in (5, 64, 300, 700)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=24, ignore_eos=True, logprobs=0) for i in range(4)]
    eager = LLM(model, **{**settings, "graph": "eager", "max_num_seqs": 8, "cache_bytes": 1 << 30})
    together = bits(llm, prompts, params)
    alone = [bits(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    if not together == alone == bits(eager, prompts, params):
        raise SystemExit("answers differ: nothing is timed")


def bits(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], str]]:
    """Tokens and logprobs of answers."""
    outputs = llm.generate(prompts, params)
    return [(out.outputs[0].token_ids, repr(out.outputs[0].logprobs)) for out in outputs]


def random_prompt(rng: random.Random, llm: LLM, length: int) -> list[int]:
    """Token ids that stand for nothing."""
    return [rng.randrange(FIRST_TEXT_ID, llm.info.vocab_size) for _ in range(length)]


def copy_rate() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_seconds(lambda: target.copy_(source))


def product_rate() -> float:
    """Operations a second of a large bf16 product."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / device_seconds(lambda: torch.mm(a, b))


def device_seconds(work: Callable[[], object], rounds: int = 10) -> float:
    """Median seconds that the device takes for `work`."""
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


class Watched:
    """A runner that remembers how many tokens the last step had."""

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = engine._runner
        self.num_tokens = 0

    def launch(self, plan: BatchPlan) -> Any:
        """Begin the step."""
        self.num_tokens = Bucket.of(plan).tokens
        return self._runner.launch(plan)


def graph_seconds(work: Callable[[], object]) -> list[float]:
    """What the device takes for each graph that `work` launches. They go on from one another, so none is launched twice."""
    launched, events = torch.cuda.CUDAGraph.replay, []

    def between_events(graph: torch.cuda.CUDAGraph) -> None:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        launched(graph)
        pair[1].record()
        events.append(pair)

    with patch.object(torch.cuda.CUDAGraph, "replay", between_events):
        work()
    torch.cuda.synchronize()
    if not events:
        raise SystemExit("no step launched a graph, so there is nothing whose time could be taken")
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def decode(llm: LLM, rng: random.Random, batch: int, rounds: int, *, profile: bool) -> dict[str, Any]:
    """A step of `batch` requests of about CONTEXT tokens each, in milliseconds."""
    engine: Engine = llm._engine
    watched = Watched(engine)
    engine._runner = watched  # type: ignore[assignment]
    walls, devices, kernels = [], [], {}
    try:
        for number in range(rounds + 1):
            names = [f"{batch}-{number}-{i}" for i in range(batch)]
            params = SamplingParams(max_tokens=1024, **GREEDY)
            for i, name in enumerate(names):
                prompt = random_prompt(rng, llm, CONTEXT)
                engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, seed=i))
            while watched.num_tokens != batch:
                engine.step()
            times = []
            for _ in range(STEPS):
                before = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - before)
            if number:
                walls += times
                devices += graph_seconds(lambda: [engine.step() for _ in range(WATCHED_STEPS)])
                if profile:
                    kernels = {"kernels": times_by_kernel(engine.step)}
            for name in names:
                engine.abort(name)
            while engine.has_work:
                engine.step()
            watched.num_tokens = 0
    finally:
        engine._runner = watched._runner
    wall, device, tenths = statistics.median(walls), statistics.median(devices), statistics.quantiles(walls, n=10)
    found = {"step": wall, "p10": tenths[0], "p90": tenths[-1], "device": device, "host": wall - device}
    times = {f"{name}_ms": round(1e3 * value, 4) for name, value in found.items()}
    return times | {"steps_per_s": round(len(walls) / sum(walls), 1), "tokens_per_s": round(batch / wall)} | kernels


def times_by_kernel(work: Callable[[], object], rounds: int = 8) -> dict[str, list[float]]:
    """Launches of each kernel in `work`, and the microseconds that all of them take, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            work()
        torch.cuda.synchronize()
    found = [(e.key, e.count / rounds, e.device_time_total / rounds) for e in profiler.key_averages()]
    found.sort(key=lambda entry: -entry[2])
    return {name[:100]: [round(count, 2), round(time_us, 1)] for name, count, time_us in found if time_us}


def prefill(llm: LLM, rng: random.Random, rounds: int, *, profile: bool) -> dict[str, Any]:
    """Prompt tokens a second, for PREFILL prompts of so many tokens at once."""
    count, length = PREFILL
    rates = []
    for number in range(rounds + 1):
        prompts = [random_prompt(rng, llm, length) for _ in range(count)]
        before = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=1, **GREEDY), use_tqdm=False)
        if number:
            rates.append(count * length / (time.perf_counter() - before))
    found: dict[str, Any] = {"tokens_per_s": round(statistics.median(rates)), "min": round(min(rates))}
    if profile:
        prompts = [random_prompt(rng, llm, length) for _ in range(count)]
        work = partial(llm.generate, prompts, SamplingParams(max_tokens=1, **GREEDY))
        found["kernels"] = times_by_kernel(work, rounds=1)
    return found | {"max": round(max(rates))}


def transformers_rates(model: Path, rng: random.Random, device: str = "cuda") -> dict[str, Any]:
    """Milliseconds of a decode step and prefill tokens a second of `generate`, in bf16: the best of the ways in which it can multiply experts."""
    from transformers import InklingConfig, InklingForConditionalGeneration  # noqa: PLC0415 - a peer, not needed else

    raw = json.loads((model / "config.json").read_text())
    raw.setdefault("vision_config", {"num_hidden_layers": 3, "patch_size": 2, "temporal_patch_size": 2})
    raw.setdefault("audio_config", {"n_mel_bins": 1, "mel_vocab_size": 1})
    # Transformers 5.17 takes the experts' width from this; later ones take it from either.
    raw["text_config"]["moe_intermediate_size"] = raw["text_config"]["intermediate_size"]
    peer: Any = InklingForConditionalGeneration.from_pretrained(
        model, config=InklingConfig(**raw), dtype=torch.bfloat16
    )
    peer = peer.eval().to(device)
    # Left alone, it decodes in another way than it was told.
    peer._optimize_model_for_decode = nullcontext
    vocab = raw["text_config"]["unpadded_vocab_size"]

    def seconds(batch: int, length: int, new: int) -> float:
        ids = torch.tensor([[rng.randrange(FIRST_TEXT_ID, vocab) for _ in range(length)] for _ in range(batch)])
        ids, mask = ids.to(device), torch.ones_like(ids, device=device)
        before = time.perf_counter()
        with torch.inference_mode():
            out = peer.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        assert out[0, -1].item() >= 0  # waits for the device
        return time.perf_counter() - before

    def step_ms(batch: int) -> float:
        seconds(batch, CONTEXT, 2)
        return 1e3 * (seconds(batch, CONTEXT, 17) - seconds(batch, CONTEXT, 1)) / 16

    def prefill_rate() -> float:
        seconds(*PREFILL, 1)
        return PREFILL[0] * PREFILL[1] / seconds(*PREFILL, 1)

    measures = {
        "decode_1_ms": partial(step_ms, 1),
        "decode_32_ms": partial(step_ms, 32),
        "prefill_tokens_per_s": prefill_rate,
    }
    by_way: dict[str, dict[str, float]] = {name: {} for name in measures}
    for way in PEER_WAYS:
        try:
            peer.set_experts_implementation(way)
        except (ValueError, ImportError):  # some versions know fewer
            continue
        for name, measure in measures.items():
            with suppress(
                torch.OutOfMemoryError
            ):  # one of them copies the weights of each pair of a token and an expert
                by_way[name][way] = measure()
        print(f"transformers, {way}: {json.dumps({name: ways.get(way) for name, ways in by_way.items()})}", flush=True)
    best = {name: (max if "per_s" in name else min)(ways.values()) for name, ways in by_way.items() if ways}
    return best | {"by_way": by_way}


if __name__ == "__main__":
    main()
