"""Speed of samebit on a CPU beside transformers' `generate`, on the same weights, threads and prompts, in one run.

    python benchmarks/cpu.py --model src/samebit/assets/nano --threads 2 --rounds 5 --output benchmarks/results/cpu.json

Both engines take turns, round by round, so that a drift of the machine meets both; ratios are of one round, and the median
and the range over rounds are reported. Greedy, fp32, no early stop. Also: the time to the first token of a 2,000-token
prompt, cold and on a prefix hit, and where a step's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.reference import load_reference
from samebit import LLM, SamplingParams
from samebit.bench.environment import environment

PROMPT_TOKENS = 128
NEW_TOKENS = 64
LONG_PROMPT = 2000
FIRST_TEXT_ID = 100


def main() -> None:
    """Read the arguments, measure, print a table and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("src/samebit/assets/nano"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm = LLM(args.model, num_threads=args.threads)
    peer = load_reference(args.model)
    rng = random.Random(0)
    record: dict[str, Any] = {"command": f"--threads {args.threads} --rounds {args.rounds}", **environment(llm.info)}
    for batch in (1, 16):
        record[f"decode_batch_{batch}"] = compare_decode(llm, peer, rng, batch, args.rounds)
    record["time_to_first_token"] = compare_first_token(llm, rng, args.rounds)
    record["step_profile"] = profile_decode(llm, rng)
    print(json.dumps(record, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def compare_decode(llm: LLM, peer: Any, rng: random.Random, batch: int, rounds: int) -> dict[str, Any]:
    """Decoded tokens per second of a batch of equal prompts' lengths, prefill taken out, in turns."""
    ours, theirs = [], []
    for number in range(rounds + 1):  # the first round warms both up
        prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(batch)]
        pair = (
            decode_rate(lambda tokens, p=prompts: run_samebit(llm, p, tokens), batch),
            decode_rate(lambda tokens, p=prompts: run_transformers(peer, p, tokens), batch),
        )
        if number:
            ours.append(pair[0])
            theirs.append(pair[1])
    return summary("samebit", ours, "transformers", theirs, "tokens/s")


def decode_rate(generate: Any, batch: int) -> float:
    """Tokens per second after the first: the difference of a long and a one-token run."""
    began = time.perf_counter()
    generate(1)
    first = time.perf_counter()
    generate(NEW_TOKENS + 1)
    spent = (time.perf_counter() - first) - (first - began)
    return batch * NEW_TOKENS / spent


def run_samebit(llm: LLM, prompts: list[list[int]], tokens: int) -> None:
    """Greedy, to the full length. Each run has its own salt, so that none finds another's prefix."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    llm.generate(prompts, params, cache_salt=str(time.perf_counter_ns()))


def run_transformers(peer: Any, prompts: list[list[int]], tokens: int) -> None:
    """The same through `generate`."""
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        peer.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )


def compare_first_token(llm: LLM, rng: random.Random, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of a long prompt: new, then again with another last token (a hit)."""
    cold, hit = [], []
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for number in range(rounds + 1):
        prompt = random_prompt(rng, LONG_PROMPT)
        times = []
        for _ in range(2):
            began = time.perf_counter()
            output = llm.generate([prompt], params)[0]
            times.append(time.perf_counter() - began)
            prompt = [*prompt[:-1], rng.randrange(FIRST_TEXT_ID, llm.info.vocab_size)]
        assert output.num_cached_tokens >= LONG_PROMPT - 32, "the second run hits"
        if number:
            cold.append(1 / times[0])
            hit.append(1 / times[1])
    return summary("hit", hit, "cold", cold, "prompts/s")


def summary(name: str, ours: list[float], other: str, theirs: list[float], unit: str) -> dict[str, Any]:
    """Medians and ranges of both, and of their ratio round by round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    columns = {f"{name}_{unit}": ours, f"{other}_{unit}": theirs, "ratio": ratios}
    return {
        key: {"median": round(statistics.median(v), 3), "min": round(min(v), 3), "max": round(max(v), 3)}
        for key, v in columns.items()
    }


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids of ordinary text, at random: speed does not depend on what they say."""
    return [rng.randrange(FIRST_TEXT_ID, 4000) for _ in range(length)]


def profile_decode(llm: LLM, rng: random.Random) -> list[str]:
    """The functions in which a one-request decode spends most of its time, with their share."""
    profiler = cProfile.Profile()
    profiler.enable()
    run_samebit(llm, [random_prompt(rng, PROMPT_TOKENS)], 200)
    profiler.disable()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # the stubs lack it
    total = sum(row[2] for row in stats.values())
    largest = sorted(stats.items(), key=lambda item: -item[1][2])[:12]
    return [f"{own / total:.1%} {Path(file).name}:{name}" for (file, _, name), (_, _, own, _, _) in largest]


if __name__ == "__main__":
    main()
