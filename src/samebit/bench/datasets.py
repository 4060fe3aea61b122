"""What is asked in a benchmark: seeded conversations of one or many turns. The same seed asks the same, byte for byte.

Names are those of vLLM's data sets where it has one. Knows no servers, engines or times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from samebit.bench.texts import Cost, code, take, words
from samebit.core.errors import ConfigError

DatasetName = Literal["random", "prefix_repetition", "multi_turn", "code"]
DATASETS: tuple[str, ...] = get_args(DatasetName)


class Turn(msgspec.Struct, frozen=True):
    """What a user says, about `num_tokens` tokens, and the most tokens of its answer."""

    text: str
    num_tokens: int
    max_tokens: int


class Conversation(msgspec.Struct, frozen=True):
    """Turns that are asked one after another, each behind all that was said before; `system` (may be empty) goes first."""

    turns: tuple[Turn, ...]
    system: str = ""
    num_system_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest prompt: the last turn's, with all answers at full length."""
        before = sum(turn.num_tokens + turn.max_tokens for turn in self.turns[:-1])
        return self.num_system_tokens + before + self.turns[-1].num_tokens


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Which data set, how much of it, and the lengths; the fields are the command line's flags.

    `num_prompts` counts conversations in `multi_turn`. `code` has the lengths of `random`. A ratio r spreads lengths evenly
    over [length · (1 − r), length · (1 + r)].
    """

    dataset_name: str = "random"
    num_prompts: int = 100
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    multi_turn_system_len: int = 1024
    multi_turn_num_turns: int = 8
    multi_turn_input_len: int = 64
    multi_turn_output_len: int = 64

    def validate(self) -> None:
        """Raise ConfigError if a field is out of its range."""
        if self.dataset_name not in DATASETS:
            raise ConfigError(f"dataset_name={self.dataset_name!r}: must be one of {', '.join(DATASETS)}")
        if not 0.0 <= self.random_range_ratio < 1.0:
            raise ConfigError(f"random_range_ratio={self.random_range_ratio!r}: must be at least 0 and less than 1")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name in ("seed", "random_prefix_len", "multi_turn_system_len") else 1
            if type(value) is int and value < least:
                raise ConfigError(f"{name}={value!r}: must be at least {least}")


def conversations(workload: Workload, cost: Cost, run: int = 0) -> list[Conversation]:
    """All of them, in order. Each `run` of a sweep says something else, so that no run finds another's prefixes cached."""
    makers = {
        "random": _random,
        "prefix_repetition": _prefix_repetition,
        "multi_turn": _multi_turn,
        "code": _code,
    }
    make = makers[workload.dataset_name]
    return [make(workload, cost, run, number) for number in range(workload.num_prompts)]


def rng_for(workload: Workload, run: int, what: object) -> random.Random:
    """Random numbers of their own for each part: the n-th conversation is the same, however many there are."""
    return random.Random(f"{workload.seed}/{run}/{what}")


def _random(workload: Workload, cost: Cost, run: int, number: int) -> Conversation:
    rng = rng_for(workload, run, number)
    prefix = ""
    if workload.random_prefix_len:
        prefix = take(words(rng_for(workload, run, "prefix")), workload.random_prefix_len, cost) + "\n"
    return _one_turn(workload, cost, rng, words(rng), prefix, workload.random_prefix_len)


def _code(workload: Workload, cost: Cost, run: int, number: int) -> Conversation:
    rng = rng_for(workload, run, number)
    return _one_turn(workload, cost, rng, code(rng))


def _one_turn(
    workload: Workload, cost: Cost, rng: random.Random, pieces: Iterator[str], prefix: str = "", num_prefix: int = 0
) -> Conversation:
    num_tokens = _spread(rng, workload.random_input_len, workload.random_range_ratio)
    max_tokens = _spread(rng, workload.random_output_len, workload.random_range_ratio)
    return Conversation((Turn(prefix + take(pieces, num_tokens, cost), num_prefix + num_tokens, max_tokens),))


def _prefix_repetition(workload: Workload, cost: Cost, run: int, number: int) -> Conversation:
    group = number % workload.prefix_repetition_num_prefixes
    num_prefix, num_suffix = workload.prefix_repetition_prefix_len, workload.prefix_repetition_suffix_len
    prefix = take(words(rng_for(workload, run, f"prefix {group}")), num_prefix, cost)
    suffix = take(words(rng_for(workload, run, number)), num_suffix, cost)
    turn = Turn(f"{prefix}\n{suffix}", num_prefix + num_suffix, workload.prefix_repetition_output_len)
    return Conversation((turn,))


def _multi_turn(workload: Workload, cost: Cost, run: int, number: int) -> Conversation:
    num_system, num_tokens = workload.multi_turn_system_len, workload.multi_turn_input_len
    system = take(words(rng_for(workload, run, "system")), num_system, cost) if num_system else ""
    pieces = words(rng_for(workload, run, number))
    turns = (
        Turn(take(pieces, num_tokens, cost), num_tokens, workload.multi_turn_output_len)
        for _ in range(workload.multi_turn_num_turns)
    )
    return Conversation(tuple(turns), system, num_system)


def _spread(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))
