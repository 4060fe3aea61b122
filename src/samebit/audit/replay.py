"""A run of an engine as a script: settings and operations as plain values, and a player that watches what comes back.

A script is a JSON file: `model` (a name or folder as in EngineConfig, or the configuration of a hash model), `engine` (the
settings that differ from EngineConfig's defaults) and `operations`. Whatever a script does, each answer must have the
bits of the oracle's, and every id must be accounted for after each step. Knows no HTTP and no test framework.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from samebit.core.config import EngineConfig, Schedule
from samebit.core.errors import ConfigError, SamebitError
from samebit.core.request import EngineOutput, FinishReason, Request, SamplingParams, TokenLogprobs
from samebit.engine.engine import Engine
from samebit.models.hash import HashConfig, save_hash


class _Operation(msgspec.Struct, frozen=True, tag_field="do", omit_defaults=True, forbid_unknown_fields=True):
    """One operation; in JSON, `do` names it."""


class Add(_Operation, frozen=True, tag="add", kw_only=True):
    """Queue a request; `params` are the SamplingParams fields that differ from the defaults."""

    request_id: str
    prompt: list[int]
    seed: int = 0
    sample_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    salt: str = ""
    prompt_logprobs_start: int = 1
    params: dict[str, Any] = {}  # Any: a number, a text or a list, checked by `request`

    def request(self) -> Request:
        """The request as an engine takes it."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            params=msgspec.convert(self.params, SamplingParams, str_keys=True),
            seed=self.seed,
            sample_index=self.sample_index,
            eos_token_ids=self.eos_token_ids,
            cache_salt=self.salt,
            prompt_logprobs_start=self.prompt_logprobs_start,
        )


class Step(_Operation, frozen=True, tag="step"):
    """Run up to `times` steps, while there is work."""

    times: int = 1


class Abort(_Operation, frozen=True, tag="abort"):
    """End a request from outside, if it has not ended."""

    request_id: str


class Evict(_Operation, frozen=True, tag="evict"):
    """Empty the prefix cache."""


class Damage(_Operation, frozen=True, tag="damage"):
    """Lose conv row `row` of `stream` in a checkpoint (numbers wrap around); does nothing where there is none."""

    checkpoint: int
    stream: int
    row: int


class Drain(_Operation, frozen=True, tag="drain"):
    """Step until nothing is left to do."""


Operation = Add | Step | Abort | Evict | Damage | Drain


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings and operations of a run."""

    model: str | HashConfig = "nano"
    engine: dict[str, Any] = {}  # Any: settings, checked by `config`
    operations: list[Operation] = []

    def config(self, folder: Path) -> EngineConfig:
        """The engine's settings; a hash model is written to `folder`."""
        model = self.model if isinstance(self.model, str) else str(save_hash(folder, self.model))
        return msgspec.convert({**self.engine, "model": model}, EngineConfig)

    def to_json(self) -> str:
        """The text of a script file, an operation a line."""

        def text(value: object) -> str:
            return msgspec.json.encode(value).decode()

        lines = ",\n".join(f"    {text(operation)}" for operation in self.operations)
        return f'{{\n  "model": {text(self.model)},\n  "engine": {text(self.engine)},\n  "operations": [\n{lines}\n  ]\n}}\n'


class Answer(msgspec.Struct, kw_only=True):
    """All that a request gets, or has got so far. `text` None: not to be compared."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    text: str | None = ""
    finish_reason: FinishReason | None = None

    def extend(self, output: EngineOutput) -> None:
        """Take in one step's output."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.text = (self.text or "") + output.text
        self.finish_reason = output.finish_reason

    def difference(self, wanted: Answer) -> str | None:
        """The first place where this, as far as it goes, is not the beginning of `wanted`; all of it once finished."""
        ended = self.finish_reason is not None
        for name in ("prompt_logprobs", "token_ids", "logprobs"):
            mine, other = getattr(self, name), getattr(wanted, name)
            for place, (got, want) in enumerate(zip(mine, other, strict=False)):
                if _bits(got) != _bits(want):
                    return f"{name}[{place}]: got {got}, wanted {want}"
            if len(mine) > len(other) or (ended and len(mine) < len(other)):
                return f"{name}: got {len(mine)}, wanted {len(other)}"
        if ended and self.finish_reason != wanted.finish_reason:
            return f"finish_reason: got {self.finish_reason}, wanted {wanted.finish_reason}"
        if ended and wanted.text is not None and self.text != wanted.text:
            return f"text: got {self.text!r}, wanted {wanted.text!r}"
        return None


class DifferenceError(SamebitError):
    """An engine broke its promise; the message says where."""


class Player:
    """Applies operations to an engine and compares every answer with `oracle`'s as it comes.

    `after_step` is called with the engine between steps. `answers` are what each request has got, `num_cached` what each
    that has ended took from the cache. Raises DifferenceError, or AssertionError where an id is not
    accounted for.
    """

    def __init__(
        self, engine: Engine, oracle: Callable[[Request], Answer], after_step: Callable[[Engine], None] | None = None
    ) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self.num_cached: dict[str, int] = {}
        self.num_steps = self.num_damages = 0
        self._oracle, self._after_step = oracle, after_step
        self._wanted: dict[str, Answer] = {}

    @property
    def num_hits(self) -> int:
        """Requests that ended and began with a prefix from the cache."""
        return sum(num_tokens > 0 for num_tokens in self.num_cached.values())

    @property
    def live(self) -> list[str]:
        """Ids of the requests that have not ended, oldest first."""
        return list(self._wanted)

    def wanted(self, request_id: str) -> Answer:
        """The oracle's answer to a request that has not ended."""
        return self._wanted[request_id]

    def apply(self, operation: Operation) -> None:
        """Do it, and compare."""
        match operation:
            case Add():
                self._add(operation.request())
            case Step(times):
                for _ in range(times):
                    self._step()
            case Abort(request_id):
                known = self._wanted.pop(request_id, None) is not None
                if self.engine.abort(request_id) != known:
                    raise DifferenceError(f"{request_id}: open requests differ from those that have not ended")
            case Evict():
                self.engine.manager.drop_all_checkpoints()
            case Damage():
                self._damage(operation)
            case Drain():
                self._drain()
        self.engine.scheduler.check()

    def _add(self, request: Request) -> None:
        self.engine.add(request)
        self.answers[request.request_id] = Answer()
        self._wanted[request.request_id] = self._oracle(request)

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        self.num_steps += 1
        for output in self.engine.step():
            self._take(output)
        self.engine.scheduler.check()
        if self._after_step is not None:
            self._after_step(self.engine)

    def _take(self, output: EngineOutput) -> None:
        name = output.request_id
        if name not in self._wanted:
            raise DifferenceError(f"{name}: reports after its end")
        if output.error is not None:
            raise DifferenceError(f"{name}: {output.error}")
        self.answers[name].extend(output)
        difference = self.answers[name].difference(self._wanted[name])
        if difference is not None:
            raise DifferenceError(f"{name}, step {self.num_steps}: {difference}")
        if output.finish_reason is not None:
            del self._wanted[name]
            self.num_cached[name] = output.num_cached_tokens

    def _damage(self, operation: Damage) -> None:
        checkpoints, pools = self.engine.manager.tree.checkpoints, self.engine.pools
        history = pools.geometry.layout.history
        if not (checkpoints and pools.conv and history):
            return
        snapshot = checkpoints[operation.checkpoint % len(checkpoints)].snapshot
        row = pools.geometry.snapshot_base(snapshot) + operation.row % history
        pool = pools.conv[operation.stream % len(pools.conv)]
        pool.rows[row] += 1
        pool.row_tags[row] += 1
        self.num_damages += 1

    def _drain(self) -> None:
        tokens = sum(len(wanted.token_ids) for wanted in self._wanted.values())
        # A request of n tokens takes n steps when it runs alone a token at a time; preemption repeats that for others.
        bound = self.num_steps + 100 + 100 * tokens
        while self.engine.has_work:
            self._step()
            if self.num_steps > bound:
                raise DifferenceError(f"{self.live[0]}: has not ended after {self.num_steps} steps")
        if self._wanted:
            raise DifferenceError(f"{self.live[0]}: never ends")
        manager = self.engine.manager
        if manager.slots.num_used or manager.snapshots.num_used != len(manager.tree.checkpoints):
            raise DifferenceError("an idle engine holds slots or snapshots")


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay did. `difference` None: every answer had the bits of a cold solo run."""

    num_operations: int
    num_steps: int
    num_answers: int
    num_hits: int
    num_preemptions: int
    difference: str | None


def read_script(path: Path) -> Script:
    """The script in a file. Raises ConfigError naming what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def replay(path: Path) -> ReplayReport:
    """Play the script in `path` against cold solo runs; stops at the first difference.

    Raises ConfigError or InvalidRequestError where the script itself is wrong.
    """
    script = read_script(path)
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = script.config(Path(folder))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}") from error
        player = Player(Engine(config), cold_oracle(config))
        done, difference = 0, None
        try:
            for operation in script.operations:
                player.apply(operation)
                done += 1
        except (DifferenceError, AssertionError) as error:
            difference = f"operation {done + 1}: {error}"
        return ReplayReport(
            num_operations=done,
            num_steps=player.num_steps,
            num_answers=sum(answer.finish_reason is not None for answer in player.answers.values()),
            num_hits=player.num_hits,
            num_preemptions=player.engine.scheduler.counters.num_preemptions,
            difference=difference,
        )


def cold_oracle(config: EngineConfig) -> Callable[[Request], Answer]:
    """Answers of an engine with the same model that has one request at a time, no cache and no disturbance."""
    engine = Engine(msgspec.structs.replace(config, enable_prefix_caching=False, schedule=Schedule()))

    def answer(request: Request) -> Answer:
        engine.add(request)
        found = Answer()
        while engine.has_work:
            for output in engine.step():
                found.extend(output)
        return found

    return answer


def _bits(value: int | TokenLogprobs) -> object:
    """Equal for equal bits only; floats themselves would take -0.0 for 0.0."""
    if isinstance(value, int):
        return value
    floats = [number.hex() for number in (value.logprob, *value.top_logprobs)]
    return value.token_id, value.rank, value.top_ids, floats
