"""Runs requests through an engine and records every value of their answers. Compares nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from samebit.audit.state import SeenMemory, StatePart, read_state
from samebit.core.request import EngineOutput, Request, SamplingParams, SpeculationCounts, TokenLogprobs
from samebit.engine.engine import Engine

ValueKind = Literal["tokens", "logprobs", "endings"]
WHOLE_ANSWER = -1


class AuditPrompt(NamedTuple):
    """A request to be audited: `params` ask for logprobs, `seed` is definite."""

    name: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    prompt_logprobs_start: int = 1

    def request(self, request_id: str, namespace: str) -> Request:
        """What the engine takes; `namespace` is the cache salt."""
        return Request(
            request_id=request_id,
            prompt_token_ids=self.token_ids,
            params=self.params,
            seed=self.seed,
            sample_index=self.sample_index,
            eos_token_ids=self.eos_token_ids,
            cache_salt=namespace,
            prompt_logprobs_start=self.prompt_logprobs_start,
        )


class Value(NamedTuple):
    """One value of an answer, spelled so that equal text means equal bits."""

    kind: ValueKind
    text: str


Place = tuple[int, str]  # token position (WHOLE_ANSWER: none), component


@dataclass(frozen=True, slots=True)
class Record:
    """All that a run of one request showed. `state` is what its path holds in the cache and was not read before."""

    values: dict[Place, Value]
    num_cached: int
    num_preemptions: int
    was_batched: bool
    state: list[StatePart]
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)


@dataclass(slots=True)
class _Open:
    request: Request
    text: str = ""
    tokens: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)
    last: EngineOutput | None = None
    was_batched: bool = False
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    def add(self, output: EngineOutput, *, has_company: bool) -> None:
        self.text += output.text
        self.tokens += output.logprobs
        self.prompt += output.prompt_logprobs
        self.speculation += output.speculation
        self.last = output
        self.was_batched = self.was_batched or has_company

    def record(self, engine: Engine, seen: SeenMemory) -> Record:
        assert self.last is not None, "a request that ran has an output"
        path = self.request.prompt_token_ids + [item.token_id for item in self.tokens]
        return Record(
            values=self._values(),
            num_cached=self.last.num_cached_tokens,
            num_preemptions=self.last.num_preemptions,
            was_batched=self.was_batched,
            speculation=self.speculation,
            state=read_state(engine, self.request.cache_salt, path, seen),
        )

    def _values(self) -> dict[Place, Value]:
        values: dict[Place, Value] = {}
        for position, item in enumerate(self.prompt, start=self.request.prompt_logprobs_start):
            _add_token(values, position, "prompt ", item)
        for position, item in enumerate(self.tokens, start=len(self.request.prompt_token_ids)):
            values[position, "token"] = Value("tokens", str(item.token_id))
            _add_token(values, position, "", item)
        assert self.last is not None, "a request that ran has an output"
        for name in ("finish_reason", "stop_reason", "error"):
            values[WHOLE_ANSWER, name] = Value("endings", repr(getattr(self.last, name)))
        values[WHOLE_ANSWER, "text"] = Value("endings", repr(self.text))
        return values


def record_runs(
    engine: Engine, requests: Sequence[Request], seen: SeenMemory, *, is_solo: bool
) -> tuple[list[Record], int]:
    """Run all requests to their ends, one after the other or submitted at once; (records in order, number of steps)."""
    groups = [[request] for request in requests] if is_solo else [list(requests)]
    records: list[Record] = []
    num_steps = 0
    for group in groups:
        entries = {request.request_id: _Open(request) for request in group}
        for request in group:
            engine.add(request)
        while engine.has_work:
            outputs = engine.step()
            num_steps += 1
            for output in outputs:
                entries[output.request_id].add(output, has_company=len(outputs) > 1)
        records += [entry.record(engine, seen) for entry in entries.values()]
    return records, num_steps


def _add_token(values: dict[Place, Value], position: int, prefix: str, item: TokenLogprobs) -> None:
    values[position, f"{prefix}logprob"] = Value("logprobs", spell(item.logprob))
    values[position, f"{prefix}rank"] = Value("tokens", str(item.rank))
    for n, (token_id, logprob) in enumerate(zip(item.top_ids, item.top_logprobs, strict=True), start=1):
        values[position, f"{prefix}top token {n}"] = Value("tokens", str(token_id))
        values[position, f"{prefix}top logprob {n}"] = Value("logprobs", spell(logprob))


def spell(number: float) -> str:
    """Every bit of a number, and what it is about: unlike ==, tells -0.0 from 0.0 and finds NaN equal to itself."""
    return str(number) if isinstance(number, int) else f"{number.hex()} ({number:.9g})"
