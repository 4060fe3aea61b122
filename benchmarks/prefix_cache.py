"""Time to the first token of each turn of a conversation, with the prefix cache and without it; the answers are compared.

    python -m benchmarks.prefix_cache nano --output benchmarks/results/prefix-cache.json
    python -m benchmarks.models bench-8b /tmp/bench-8b && python -m benchmarks.prefix_cache /tmp/bench-8b --device cuda

A conversation begins with a long system prompt; each turn is asked behind all turns and answers before, first of one engine and then
of the other, in changing order. Tokens and logprobs of both must be the same, in a conversation that is not timed and then in every
turn. Each round is another conversation, so its first turn finds nothing in the cache, and all others are to find what was said before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.driving import add_flags, answer_all, bounded
from samebit import LLM, SamplingParams
from samebit.bench.datasets import Conversation, Workload, conversations
from samebit.bench.environment import environment
from samebit.bench.texts import counted

CACHE_BYTES = 8 << 30
ARMS = ("on", "off")


class Turn(NamedTuple):
    """One turn in both arms: seconds to the first token, and tokens that came from the cache where it was on."""

    number: int
    prompt_tokens: int
    cached_tokens: int
    on_s: float
    off_s: float


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments, compare, measure, print and store the record."""
    args = parsed(arguments)
    lengths = Workload(
        dataset_name="multi_turn",
        num_prompts=1,
        multi_turn_system_len=args.system,
        multi_turn_num_turns=args.turns,
        multi_turn_input_len=args.user,
        multi_turn_output_len=args.answer,
    )
    arms = start(args)
    plain = arms["off"]
    record: dict[str, Any] = {
        "command": f"{Path(args.model).name} --device {args.device} --threads {args.threads} --rounds {args.rounds} "
        f"--max-num-batched-tokens {args.max_num_batched_tokens}",
        "system_tokens": args.system,
        "user_tokens": args.user,
        "answer_tokens": args.answer,
        **environment(plain.info),
    }
    rounds: list[list[Turn]] = []
    for number in range(args.rounds + 1):
        (conversation,) = conversations(lengths, counted(plain.get_tokenizer()), number)
        turns = talk(arms, conversation)
        if number == 0:
            print("a conversation has the same bits in both arms", flush=True)
            continue
        rounds.append(turns)
        found = summary(rounds)
        print(f"round {number}:", json.dumps({key: found[key] for key in found if key != "turns"}), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(record | found, indent=1) + "\n")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments; those of `--smoke` are of a run of seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--system", type=int, default=4096, help="tokens of the system prompt")
    parser.add_argument("--user", type=int, default=100, help="tokens of what is asked in a turn")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    add_flags(parser, rounds=3, cache_bytes=None, smoke="a short conversation")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.rounds, args.turns, args.system, args.user, args.answer = 1, 3, 256, 20, 8
    return args


def start(args: argparse.Namespace) -> dict[str, LLM]:
    """Both engines, of the same settings otherwise."""
    settings = bounded(
        {
            "num_threads": args.threads,
            "capture": args.capture,
            "max_model_len": args.system + args.turns * (args.user + args.answer),
            "max_num_seqs": 4,
            "max_num_batched_tokens": args.max_num_batched_tokens,
        },
        args.device,
        args.cache_bytes,
        CACHE_BYTES,
    )
    arms = {}
    for name in ARMS:
        began = time.perf_counter()
        arms[name] = LLM(args.model, enable_prefix_caching=name == "on", **settings)
        print(f"cache {name}: started in {time.perf_counter() - began:.1f} s", flush=True)
    return arms


def talk(arms: dict[str, LLM], conversation: Conversation) -> list[Turn]:
    """Ask every turn of both arms. Raises SystemExit where they differ, or where something is cached that nobody has said."""
    tokenizer = arms["off"].get_tokenizer()
    said = tokenizer.encode(conversation.system, allow_special=False)[: conversation.num_system_tokens]
    turns = []
    for number, asked in enumerate(conversation.turns):
        said = said + tokenizer.encode(asked.text, allow_special=False)[: asked.num_tokens]
        params = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True, logprobs=0)
        order = ARMS if number % 2 else tuple(reversed(ARMS))
        found = {name: answer_all(arms[name], [said], params).answers[0] for name in order}
        if found["on"].bits != found["off"].bits:
            raise SystemExit(f"turn {number} of {len(said)} tokens has other bits with the cache")
        cached = found["on"].num_cached_tokens
        if found["off"].num_cached_tokens or (cached and not number):
            raise SystemExit(f"turn {number} of {len(said)} tokens took {cached} of them from the cache")
        turns.append(Turn(number, len(said), cached, found["on"].token_s[0], found["off"].token_s[0]))
        said = said + found["on"].token_ids
    return turns


def summary(rounds: list[list[Turn]]) -> dict[str, Any]:
    """Medians over all turns that found something in the cache, how they compare in each round, and each turn by itself."""
    hits = [[turn for turn in turns if turn.cached_tokens] for turns in rounds]
    if not all(hits):
        raise SystemExit("a whole conversation found nothing in the cache")
    ratios = [median(turn.off_s for turn in turns) / median(turn.on_s for turn in turns) for turns in hits]
    every = [turn for turns in hits for turn in turns]
    return {
        "hits": len(every),
        "ttft_on_ms": ms(turn.on_s for turn in every),
        "ttft_off_ms": ms(turn.off_s for turn in every),
        "ratio": round(median(turn.off_s for turn in every) / median(turn.on_s for turn in every), 2),
        "ratio_by_round": [round(ratio, 2) for ratio in ratios],
        "first_turn_on_ms": ms(turns[0].on_s for turns in rounds),
        "first_turn_off_ms": ms(turns[0].off_s for turns in rounds),
        "turns": [
            {
                "prompt_tokens": same[0].prompt_tokens,
                "cached_tokens": same[0].cached_tokens,
                "on_ms": ms(turn.on_s for turn in same),
                "off_ms": ms(turn.off_s for turn in same),
            }
            for same in zip(*rounds, strict=True)
        ],
    }


def median(seconds: Iterable[float]) -> float:
    """The median of an iterable."""
    return statistics.median(seconds)


def ms(seconds: Iterable[float]) -> float:
    """The median in milliseconds."""
    return round(1e3 * median(seconds), 3)


if __name__ == "__main__":
    main()
