"""Answers of an engine in this process, and when each of their tokens came. Knows no workload; measures nothing by itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebit import LLM, SamplingParams
from samebit.core.request import EngineOutput, SpeculationCounts
from samebit.engine.engine import Engine


@dataclass(slots=True)
class Answer:
    """What one prompt gave: `token_s[i]` is when token i came, in seconds since all prompts were given."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)  # exact
    token_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    @property
    def bits(self) -> tuple[list[int], list[str]]:
        """Tokens, and logprobs where they were asked for."""
        return self.token_ids, self.logprobs

    def add(self, output: EngineOutput, now_s: float) -> None:
        """Take in what a step gave."""
        if output.error is not None:
            raise SystemExit(f"a request failed: {output.error}")
        self.token_ids += output.token_ids
        self.logprobs += [item.logprob.hex() for item in output.logprobs]
        self.token_s += [now_s] * len(output.token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        self.speculation += output.speculation


@dataclass(slots=True)
class Answers:
    """Those of prompts that were given at once: `step_s` is when each step ended."""

    answers: list[Answer]
    step_s: list[float] = field(default_factory=list)

    @property
    def bits(self) -> list[tuple[list[int], list[str]]]:
        """Of each answer."""
        return [answer.bits for answer in self.answers]

    def decoding(self) -> tuple[int, int, float]:
        """Tokens, steps and seconds since all answers had begun: what prefill takes is left out."""
        begun_s = max(answer.token_s[0] for answer in self.answers)
        ended_s = max(answer.token_s[-1] for answer in self.answers)
        tokens = sum(count_within(answer.token_s, begun_s, ended_s) for answer in self.answers)
        return tokens, count_within(self.step_s, begun_s, ended_s), ended_s - begun_s


def count_within(times: Iterable[float], begun_s: float, ended_s: float) -> int:
    """How many of `times` are behind `begun_s` and not behind `ended_s`."""
    return sum(begun_s < time_s <= ended_s for time_s in times)


def answer_all(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> Answers:
    """Give all prompts at once and go on until all is done. Raises SystemExit if one fails."""
    engine: Engine = llm._engine
    requests = [llm._requests(prompt, params, "")[0] for prompt in prompts]
    found = {request.request_id: Answer() for request in requests}
    result = Answers(list(found.values()))
    began_s = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outputs = engine.step()
        now_s = time.perf_counter() - began_s
        result.step_s.append(now_s)
        for output in outputs:
            found[output.request_id].add(output, now_s)
    return result


def add_flags(parser: argparse.ArgumentParser, *, rounds: int, cache_bytes: int | None, smoke: str) -> None:
    """The flags of all that compares engines side by side, with these defaults; `smoke`: what a run of seconds does."""
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--cache-bytes", type=int, default=cache_bytes, help="of each engine")
    parser.add_argument("--capture", default="start", choices=("start", "use"), help="when graphs are captured")
    parser.add_argument("--smoke", action="store_true", help=f"see that it runs: {smoke}")
    parser.add_argument("--output", type=Path)


def bounded(settings: dict[str, Any], device: str, cache_bytes: int | None, on_gpu: int) -> dict[str, Any]:
    """`settings` with so much memory for pools that several engines have room side by side: `on_gpu` bytes unless told otherwise."""
    return {**settings, "device": device, "cache_bytes": cache_bytes or (None if device == "cpu" else on_gpu)}
