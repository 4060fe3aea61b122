"""Speed with and without guesses, on the same prompts in one run, for one request and for many; and how the guesses fared.

    python -m benchmarks.speculation --threads 1 --rounds 5 --output benchmarks/results/speculation.json
    python -m benchmarks.speculation --device cuda --batch 1 8 64 --speculative-config '{"method": "dspark", "token_cost": 0.02}'

All engines answer each prompt in turn, so that a drift of the machine meets all of them; a ratio is that of a round's rates, and
medians and ranges over rounds are reported. First answers are compared, tokens and logprobs, and tokens in every round. Rates count
from when all answers of a batch have begun, so that prefill is left out; where `tokens_timed` is a small part of `tokens` (short answers in a large
batch) they say nothing. Prompts are beginnings of modules of Python's own library
(and later parts, where there are more prompts), and questions about facts at the end of long dialogues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.driving import add_flags, answer_all, bounded
from samebit import LLM, SamplingParams
from samebit.bench.environment import environment
from samebit.bench.recall import PAGE_SIZE
from samebit.core.request import SpeculationCounts
from samebit.dialogues import Spoken, facts, question, small_talk

MODULES = (
    "argparse ast calendar csv datetime fractions heapq inspect pickle shutil statistics tarfile textwrap uuid".split()
)
METHODS = ("ngram", "mtp", "dflash", "dspark")
CODE_TOKENS = 768
MAX_LENGTH = 4096
CACHE_BYTES = 1 << 29
NONE = "none"
Prompts = list[list[int]]


class Workload(NamedTuple):
    """What is asked: `make` gives so many prompts, of which `num_prompts` are answered in a round (a batch, if that is more)."""

    make: Callable[[LLM, int], Prompts]
    num_prompts: int
    max_tokens: int


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, compare, measure, print and store the record."""
    args = parsed(arguments)
    arms = start(args)
    plain = arms[NONE]
    record: dict[str, Any] = {
        "command": f"--device {args.device} --threads {args.threads} --rounds {args.rounds}",
        "speculative_config": args.speculative_config,
        **environment(plain.info),
    }
    for name in args.workloads:
        workload = WORKLOADS[name]
        if args.smoke:
            workload = workload._replace(num_prompts=2, max_tokens=8)
        prompts = workload.make(plain, max(workload.num_prompts, *args.batch))
        for batch in args.batch:
            count = max(1, workload.num_prompts // batch) * batch
            groups = [prompts[first : first + batch] for first in range(0, count, batch)]
            for temperature in args.temperature:
                params = params_for(temperature, workload.max_tokens)
                key = f"{name}, batch {batch}, temperature {temperature:g}"
                record[key] = compare(arms, groups, params, args.rounds)
                print(
                    key, *(f"  {arm}: {json.dumps(found)}" for arm, found in record[key].items()), sep="\n", flush=True
                )
                if args.output is not None:
                    args.output.write_text(json.dumps(record, indent=1) + "\n")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments; those of `--smoke` are of a run of seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 14], help="requests at once")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="0.8 is with a top-p of 0.95")
    parser.add_argument("--speculative-config", type=json.loads, nargs="+", help="the arms; all methods if not given")
    add_flags(parser, rounds=5, cache_bytes=CACHE_BYTES, smoke="few prompts and tokens")
    args = parser.parse_args(arguments)
    args.speculative_config = args.speculative_config or [{"method": method} for method in METHODS]
    if args.smoke:
        args.rounds, args.batch, args.workloads, args.temperature = 1, [1, 2], ["code"], [0.0]
    return args


def start(args: argparse.Namespace) -> dict[str, LLM]:
    """An engine for each arm, the one without guesses first. A batch's prefill takes few steps."""
    most = max(args.batch)
    settings = bounded(
        {
            "num_threads": args.threads,
            "capture": args.capture,
            "enable_prefix_caching": False,
            "max_model_len": MAX_LENGTH,
            "max_num_seqs": max(32, most),
            "max_num_batched_tokens": max(512, 64 * most),
        },
        args.device,
        args.cache_bytes,
        CACHE_BYTES,
    )
    arms: dict[str, LLM] = {}
    for config in (None, *args.speculative_config):
        name = NONE if config is None else arm_name(config)
        began = time.perf_counter()
        arms[name] = LLM(args.model, speculative_config=config, **settings)
        print(f"{name}: started in {time.perf_counter() - began:.1f} s", flush=True)
    return arms


def arm_name(config: dict[str, Any]) -> str:
    """The method, and what else the settings say."""
    return " ".join([config["method"], *(f"{key}={value}" for key, value in config.items() if key != "method")])


def params_for(temperature: float, max_tokens: int) -> SamplingParams:
    """Greedy, or drawn from most of the mass."""
    if temperature == 0:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return SamplingParams(temperature=temperature, top_p=0.95, seed=1, max_tokens=max_tokens)


def code(llm: LLM, count: int) -> Prompts:
    """Beginnings of modules of the standard library, then what comes behind them in those that are long enough."""
    folder = Path(json.__file__).parents[1]
    encode = llm.get_tokenizer().encode_prompt
    ids = [encode((folder / f"{name}.py").read_text()) for name in MODULES]
    starts = range(0, max(map(len, ids)) - CODE_TOKENS, CODE_TOKENS)
    pieces = (module[at : at + CODE_TOKENS] for at in starts for module in ids if len(module) >= at + CODE_TOKENS)
    found = list(itertools.islice(pieces, count))
    if len(found) < count:
        raise SystemExit(f"{count} prompts of code are wanted, there are {len(found)}")
    return found


def dialogues(llm: LLM, count: int) -> Prompts:
    """Dialogues of 40 turns, ended by a question for one of six facts."""
    prompts = []
    for seed in range(count):
        rng = random.Random(seed)
        spoken, known = Spoken(llm.get_tokenizer(), PAGE_SIZE), facts(rng, 6)
        for fact in known:
            spoken.say(spoken.statement(rng, fact, behind_boundary=False))
            for _ in range(6):
                spoken.say(small_talk(rng))
        prompts.append(spoken.ask(question(rng, rng.choice(known))))
    return prompts


WORKLOADS = {"code": Workload(code, len(MODULES), 128), "dialogues": Workload(dialogues, 10, 32)}


class Measured:
    """What an arm did in one round."""

    def __init__(self) -> None:
        self.tokens, self.steps, self.seconds = 0, 0, 0.0
        self.num_answered, self.speculation = 0, SpeculationCounts()


def compare(
    arms: dict[str, LLM], groups: list[Prompts], params: SamplingParams, rounds: int
) -> dict[str, dict[str, Any]]:
    """Each arm's rates of decoding groups of prompts, and what its guesses did. Raises SystemExit where answers differ."""
    answer_round(arms, groups, msgspec.structs.replace(params, logprobs=0))  # compares every bit, and warms up
    measured = [answer_round(arms, groups, params) for _ in range(rounds)]
    return {name: summary(measured, name) for name in arms}


def answer_round(arms: dict[str, LLM], groups: list[Prompts], params: SamplingParams) -> dict[str, Measured]:
    """All groups, answered by every arm in turn; another one begins each time."""
    found: dict[str, Measured] = defaultdict(Measured)
    names = list(arms)
    for number, group in enumerate(groups):
        bits = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            result, this = answer_all(arms[name], group, params), found[name]
            bits[name] = result.bits
            for kind, value in zip(("tokens", "steps", "seconds"), result.decoding(), strict=True):
                setattr(this, kind, getattr(this, kind) + value)
            this.num_answered += sum(len(answer.token_ids) for answer in result.answers)
            this.speculation = sum((answer.speculation for answer in result.answers), this.speculation)
        for name in names:
            if bits[name] != bits[NONE]:
                raise SystemExit(f"{name}: guesses changed an answer")
    return found


def summary(rounds: list[dict[str, Measured]], name: str) -> dict[str, Any]:
    """Medians and ranges over rounds, and the guesses of the last."""

    def rate(this: Measured) -> float:
        return this.tokens / max(1e-9, this.seconds)

    rates = [rate(one[name]) for one in rounds]
    ratios = [rate(one[name]) / max(1e-9, rate(one[NONE])) for one in rounds]
    last = rounds[-1][name]
    counts, tokens = last.speculation, last.num_answered
    found = {
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_range": [round(min(rates), 1), round(max(rates), 1)],
        "step_ms": round(1e3 * statistics.median(one[name].seconds / max(1, one[name].steps) for one in rounds), 4),
        "tokens": tokens,
        "tokens_timed": last.tokens,
    }
    if name == NONE:
        return found
    return found | {
        "speed_ratio": round(statistics.median(ratios), 3),
        "speed_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "tokens_per_draw": round(tokens / (tokens - counts.num_accepted_tokens), 3),
        "mean_acceptance_length": round(counts.mean_acceptance_length, 3),
        "acceptance_rate": round(counts.num_accepted_tokens / max(1, counts.num_draft_tokens), 3),
    }


if __name__ == "__main__":
    main()
