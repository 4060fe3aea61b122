"""The matrix of circumstances in which one request must give one answer. Plain values; runs nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

import msgspec

from samebit.audit.drafts import DEFAULT, SPOIL_PERCENT
from samebit.core.config import EngineConfig, Schedule, SpeculativeConfig

Graph = Literal["eager", "trace", "cuda"]

CACHES = ("off", "cold", "hit")
COMPANIES = ("solo", "batch", "preempted")
CHUNKS: dict[str, tuple[int, ...]] = {"whole": (), "7": (7,), "mixed": (1, 33, 5, 16)}
# The ways of executing a step on a device, as EngineConfig.graph names them.
EXECUTIONS: Mapping[str, tuple[Graph, ...]] = {"cpu": ("eager", "trace"), "cuda": ("eager", "cuda")}

# "own": by the drafter of the settings. "told": the reference's answer is guessed, and some of it spoiled.
DRAFTS = ("none", "own", "told")

_PREEMPT_PERCENT = 20


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Circumstances of a run.

    `cache`: "off"; "cold" (on, but every request has a namespace of its own); "hit" (after siblings, then once more).
    `company`: "solo", "batch" (all at once), or "preempted" (a batch whose rows are also shuffled, padded and preempted;
    a request that is alone cannot be preempted). `chunks` names an entry of CHUNKS; `execution` is one of EXECUTIONS, `drafts` of
    DRAFTS.
    """

    cache: str
    company: str
    chunks: str
    execution: Graph
    drafts: str = "none"

    @property
    def name(self) -> str:
        """The axes in a row."""
        name = f"{self.cache}/{self.company}/{self.chunks}/{self.execution}"
        return name if self.drafts == "none" else f"{name}/{self.drafts}"

    @property
    def axes(self) -> dict[str, str]:
        """The axes by name."""
        return {name: str(value) for name, value in msgspec.structs.asdict(self).items()}

    def config(self, base: EngineConfig, seed: int) -> EngineConfig:
        """`base` under these circumstances. Scenarios with equal configs can share an engine."""
        chunk_sizes = CHUNKS[self.chunks]
        schedule = Schedule(seed=seed, chunk_sizes=chunk_sizes)
        if self.company == "preempted":
            schedule = Schedule(
                seed=seed,
                chunk_sizes=chunk_sizes,
                preempt_percent=_PREEMPT_PERCENT,
                pad_tokens=5,
                pad_rows=2,
                shuffle_rows=True,
            )
        speculation = base.speculative_config or DEFAULT
        if self.drafts == "told":
            # The guesses come from the host, whoever makes them otherwise.
            most = speculation.num_speculative_tokens
            speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=most, token_cost=0.0)
            schedule = msgspec.structs.replace(schedule, spoil_percent=SPOIL_PERCENT)
        return msgspec.structs.replace(
            base,
            enable_prefix_caching=self.cache != "off",
            schedule=schedule,
            speculative_config=None if self.drafts == "none" else speculation,
            graph=self.execution,
        )


def all_scenarios(
    device: str = "cpu", chunks: Mapping[str, tuple[int, ...]] = CHUNKS, *, own_first: bool = False
) -> list[Scenario]:
    """Every combination without guesses on a device, then some with them, those of the settings' own drafter before all if
    `own_first`; equal configs are together.
    """
    executions = EXECUTIONS[device]
    axes = itertools.product(executions, chunks, COMPANIES, CACHES)
    found = [Scenario(cache=cache, company=who, chunks=cut, execution=how) for how, cut, who, cache in axes]
    ranks = {name: rank for rank, name in enumerate(chunks)}
    found.sort(key=lambda s: (s.execution, ranks[s.chunks], s.company == "preempted", s.cache == "off"))
    # A lone request as it is, and crowded ones with all that can disturb them.
    guessing = itertools.product(
        sorted(executions), DRAFTS[1:], (("solo", "whole"), ("preempted", "mixed")), ("cold", "hit")
    )
    found += [
        Scenario(cache=cache, company=who, chunks=cut, execution=how, drafts=drafts)
        for how, drafts, (who, cut), cache in guessing
    ]
    return sorted(found, key=lambda one: one.drafts != "own") if own_first else found
