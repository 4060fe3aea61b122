"""Speed with and without guesses, on the same prompts in one run, for one request and for many; and how the guesses fared.

    python -m benchmarks.speculation --threads 1 --rounds 5 --output benchmarks/results/speculation.json

Both engines answer each prompt in turn, so that a drift of the machine meets both; a ratio is that of a round's times, and
the median and the range over rounds are reported. Answers are compared, bit for bit. Prompts are beginnings of modules of
Python's own library, and questions about facts at the end of long dialogues; a crowd is the former all at once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from samebit import LLM, SamplingParams
from samebit.bench.environment import environment
from samebit.bench.recall import PAGE_SIZE
from samebit.core.request import RequestOutput, SpeculationCounts
from samebit.dialogues import Spoken, facts, question, small_talk

MODULES = (
    "argparse ast calendar csv datetime fractions heapq inspect pickle shutil statistics tarfile textwrap uuid".split()
)
CODE_TOKENS = 768
DIALOGUES = 10


def main() -> None:
    """Read the arguments, measure, print and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculative-config", type=json.loads, default={"method": "ngram"})
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    settings = {"num_threads": args.threads, "enable_prefix_caching": False}
    plain, guessing = (
        LLM(args.model, **settings),
        LLM(args.model, speculative_config=args.speculative_config, **settings),
    )
    modules, talks = code(plain), dialogues(plain)
    workloads = {
        "code": ([[prompt] for prompt in modules], 128),
        "dialogues": ([[prompt] for prompt in talks], 32),
        f"code, {len(modules)} at once": ([modules], 128),
    }
    record: dict[str, Any] = {
        "command": f"--threads {args.threads} --rounds {args.rounds}",
        "speculative_config": args.speculative_config,
        **environment(plain.info),
    }
    for name, (groups, most) in workloads.items():
        for kind, params in (
            ("greedy", SamplingParams(temperature=0.0, max_tokens=most)),
            ("sampled", SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=most)),
        ):
            record[f"{name}, {kind}"] = compare(plain, guessing, groups, params, args.rounds)
            print(f"{name}, {kind}:", json.dumps(record[f"{name}, {kind}"]))
    if args.output is not None:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def code(llm: LLM) -> list[list[int]]:
    """Beginnings of modules of the standard library."""
    folder = Path(json.__file__).parents[1]
    encode = llm.get_tokenizer().encode_prompt
    return [encode((folder / f"{name}.py").read_text())[:CODE_TOKENS] for name in MODULES]


def dialogues(llm: LLM) -> list[list[int]]:
    """Dialogues of 40 turns, ended by a question for one of six facts."""
    prompts = []
    for seed in range(DIALOGUES):
        rng = random.Random(seed)
        spoken, known = Spoken(llm.get_tokenizer(), PAGE_SIZE), facts(rng, 6)
        for fact in known:
            spoken.say(spoken.statement(rng, fact, behind_boundary=False))
            for _ in range(6):
                spoken.say(small_talk(rng))
        prompts.append(spoken.ask(question(rng, rng.choice(known))))
    return prompts


def compare(
    plain: LLM, guessing: LLM, groups: list[list[list[int]]], params: SamplingParams, rounds: int
) -> dict[str, float]:
    """Times of decoding groups of prompts, prefill taken out, and what the guesses did in one round."""
    ratios = []
    for number in range(rounds + 1):  # the first round warms both up
        seconds = [0.0, 0.0]
        tokens, counts = 0, SpeculationCounts()
        for group in groups:
            answers = []
            for place, llm in enumerate((plain, guessing)):
                spent, outputs = timed(llm, group, params)
                seconds[place] += spent
                answers.append([output.outputs[0].token_ids for output in outputs])
            assert answers[0] == answers[1], "guesses changed an answer"
            tokens += sum(map(len, answers[1]))
            counts = sum((output.metrics.speculation for output in outputs if output.metrics), counts)
        if number:
            ratios.append(seconds[0] / seconds[1])
    return {
        "speed_ratio": round(statistics.median(ratios), 3),
        "min": round(min(ratios), 3),
        "max": round(max(ratios), 3),
        "tokens": tokens,
        "tokens_per_draw": round(tokens / (tokens - counts.num_accepted_tokens), 3),
        "mean_acceptance_length": round(counts.mean_acceptance_length, 3),
        "acceptance_rate": round(counts.num_accepted_tokens / max(1, counts.num_draft_tokens), 3),
    }


def timed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[RequestOutput]]:
    """Seconds that answers take beyond those to their first tokens, and the answers."""
    one = SamplingParams(max_tokens=1, temperature=0.0)
    began = time.perf_counter()
    llm.generate(prompts, one)
    first = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return max(1e-9, (time.perf_counter() - first) - (first - began)), outputs


if __name__ == "__main__":
    main()
