"""The shadow audit: some finished requests are computed a second time, and must come out the same, bit for bit.

A shadow is cold (nothing of it comes from the prefix cache or goes into it) and nobody guesses for it. It goes behind all
requests, one at a time, and gives way to whoever waits. Knows the scheduler; no device, clock of requests or text.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from samebit.core.config import EngineConfig
from samebit.core.request import FinishReason, Request, TokenLogprobs
from samebit.scheduler.scheduler import Scheduler
from samebit.scheduler.sequence import Progress

MAX_PENDING = 256
MAX_PENDING_TOKENS = 1 << 20
Kind = Literal["tokens", "logprobs", "prompt_logprobs", "endings"]
KINDS: tuple[Kind, ...] = ("tokens", "logprobs", "prompt_logprobs", "endings")
RESULTS = ("match", "mismatch", "skipped")
_SHADOWS = "\0shadow"  # their names and their salt; a client's have other ones

_log = logging.getLogger(__name__)


class Difference(NamedTuple):
    """The first place where a shadow differs: the position of a token of prompt and answer, and both values, spelled out."""

    kind: Kind
    position: int
    name: str
    delivered: str
    computed: str


@dataclass(slots=True, eq=False)
class _Answer:
    """What a client got. `ending`: how the answer ended by its own tokens; None where something else has cut it off."""

    request: Request
    tokens: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)
    ending: tuple[FinishReason, int | None] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.tokens)

    def shadow(self, name: str) -> Request:
        """The request that must give the same answer, up to where it was cut off."""
        params = msgspec.structs.replace(self.request.params, speculation=False)
        if self.ending is None:
            params = msgspec.structs.replace(params, max_tokens=len(self.tokens))
        return msgspec.structs.replace(
            self.request, request_id=name, params=params, cache_salt=_SHADOWS, is_shadow=True, wants_progress=False
        )


@dataclass(slots=True, eq=False)
class _Shadow:
    """A second run, which has given so many tokens that are all as they must be."""

    name: str
    answer: _Answer
    num_tokens: int = 0
    num_prompt: int = 0

    def take(self, progress: Progress) -> Difference | None:
        """Compare what a step gave; the first difference, if there is any."""
        answer, num_ids = self.answer, len(self.answer.request.prompt_token_ids)
        first = answer.request.prompt_logprobs_start
        for item in progress.prompt:
            if found := _compared("prompt_logprobs", first + self.num_prompt, answer.prompt, self.num_prompt, item):
                return found
            self.num_prompt += 1
        for item in progress.tokens:
            if found := _compared("logprobs", num_ids + self.num_tokens, answer.tokens, self.num_tokens, item):
                return found
            self.num_tokens += 1
        return None

    def conclude(self, progress: Progress) -> Difference | None:
        """It has ended: the difference in that, if there is any."""
        answer, ending = self.answer, (progress.finish_reason, progress.stop_token_id)
        position = len(answer.request.prompt_token_ids) + self.num_tokens
        if self.num_prompt != len(answer.prompt):
            first_missing = answer.request.prompt_logprobs_start + self.num_prompt
            counts = f"{len(answer.prompt)} logprobs", f"{self.num_prompt} logprobs"
            return Difference("prompt_logprobs", first_missing, "end of the prompt's", *counts)
        if self.num_tokens != len(answer.tokens):
            return Difference("endings", position, "end", f"{len(answer.tokens)} tokens", f"{self.num_tokens} tokens")
        if answer.ending not in (None, ending):
            return Difference("endings", position, "end", str(answer.ending), str(ending))
        return None


class ShadowAudit:
    """Owner of what is kept of requests for their second run, and of that run.

    `counts`: second runs by result; `differences`: mismatches by the kind of the first difference; `num_tokens`: tokens compared
    and found equal; `last_mismatch_s`: when, in seconds since 1970 (0: never).
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        self.counts: Counter[str] = Counter()
        self.differences: Counter[Kind] = Counter()
        self.num_tokens = 0
        self.last_mismatch_s = 0.0
        self._config, self._scheduler = config, scheduler
        self._open: dict[str, _Answer] = {}
        self._pending: deque[_Answer] = deque()
        self._num_pending_tokens = 0
        self._shadow: _Shadow | None = None
        self._num_shadows = 0

    @property
    def is_running(self) -> bool:
        """Whether the scheduler has a shadow."""
        return self._shadow is not None

    @property
    def has_work(self) -> bool:
        """Whether an answer waits for its second run, or is in it."""
        return bool(self._shadow or self._pending)

    # What clients get

    def opened(self, request: Request) -> None:
        """A request was taken on."""
        if is_chosen(request.request_id, self._config.audit_rate, self._config.seed):
            self._open[request.request_id] = _Answer(request)

    def delivered(self, progress: Progress, num_tokens: int, *, is_over: bool) -> None:
        """A client gets the first `num_tokens` tokens of `progress`, and no more if `is_over`."""
        answer = self._open.get(progress.request_id)
        if answer is None:
            return
        answer.prompt += progress.prompt
        answer.tokens += progress.tokens[:num_tokens]
        if is_over:
            if progress.finish_reason in {"stop", "length"} and num_tokens == len(progress.tokens):
                answer.ending = progress.finish_reason, progress.stop_token_id
            self.ended(progress.request_id)

    def ended(self, request_id: str) -> None:
        """A client gets no more."""
        answer = self._open.pop(request_id, None)
        if answer is None:
            return
        if not answer.tokens:
            self.counts["skipped"] += 1
            return
        self._pending.append(answer)
        self._num_pending_tokens += answer.num_tokens
        while len(self._pending) > MAX_PENDING or self._num_pending_tokens > MAX_PENDING_TOKENS:
            self._next()
            self.counts["skipped"] += 1

    # Second runs

    def begin(self) -> None:
        """Give the scheduler a shadow, if there is room for one."""
        scheduler = self._scheduler
        while self._pending and not self.is_running:
            if scheduler.num_waiting or scheduler.num_running >= self._config.max_num_seqs:
                return
            answer = self._next()
            self._num_shadows += 1
            name = f"{_SHADOWS} {self._num_shadows}"
            try:
                scheduler.add(answer.shadow(name))
            except Exception as error:  # noqa: BLE001 - whatever a second run meets, no request may come to hear of it
                scheduler.finish(name, "abort")
                self._skip(answer, error)
            else:
                self._shadow = _Shadow(name, answer)

    def make_way(self) -> None:
        """Take the shadow back if a step was planned and a request still waits; it begins anew when there is room."""
        if self._shadow is not None and self._scheduler.num_waiting:
            answer = self._stop(self._shadow)
            self._pending.appendleft(answer)
            self._num_pending_tokens += answer.num_tokens

    def sift(self, gained: list[Progress]) -> list[Progress]:
        """Take in what is the shadow's, and return the rest."""
        shadow = self._shadow
        if shadow is None:
            return gained
        for progress in gained:
            if progress.request_id == shadow.name:
                self._take(shadow, progress)
        return [progress for progress in gained if progress.request_id != shadow.name]

    def drop_all(self) -> None:
        """The weights are about to change, and nothing that was computed with the old ones can be compared any more."""
        if self._shadow is not None:
            self._stop(self._shadow)
            self.counts["skipped"] += 1
        self.counts["skipped"] += len(self._pending)
        self._pending.clear()
        self._num_pending_tokens = 0

    def totals(self) -> dict[str, float]:
        """All by name: `audits_r` of result r, `audit_differences_k` of kind k, tokens, and the time of the last mismatch."""
        return {
            **{f"audits_{result}": self.counts[result] for result in RESULTS},
            **{f"audit_differences_{kind}": self.differences[kind] for kind in KINDS},
            "audited_tokens": self.num_tokens,
            "audit_last_mismatch_s": self.last_mismatch_s,
        }

    def _next(self) -> _Answer:
        answer = self._pending.popleft()
        self._num_pending_tokens -= answer.num_tokens
        return answer

    def _stop(self, shadow: _Shadow) -> _Answer:
        self._shadow = None
        self._scheduler.finish(shadow.name, "abort")
        return shadow.answer

    def _take(self, shadow: _Shadow, progress: Progress) -> None:
        before = shadow.num_tokens + shadow.num_prompt
        difference = shadow.take(progress)
        self.num_tokens += shadow.num_tokens + shadow.num_prompt - before
        is_short = shadow.num_tokens < len(shadow.answer.tokens)
        if difference is None and progress.finish_reason == "error" and is_short:
            self._shadow = None
            self._skip(shadow.answer, progress.error)
            return
        if difference is None and progress.finish_reason is not None:
            difference = shadow.conclude(progress)
        if difference is not None:
            self._mismatch(self._stop(shadow).request, difference)
        elif progress.finish_reason is not None:
            self._shadow = None
            self.counts["match"] += 1

    def _skip(self, answer: _Answer, error: object) -> None:
        self.counts["skipped"] += 1
        _log.warning("audit: request %s could not be computed again: %s", answer.request.request_id, error)

    def _mismatch(self, request: Request, difference: Difference) -> None:
        self.counts["mismatch"] += 1
        self.differences[difference.kind] += 1
        self.last_mismatch_s = time.time()
        _log.error(
            "audit: request %s is not what a cold run gives: %s at position %d (the prompt has %d): %s was delivered, %s is computed",
            request.request_id,
            difference.name,
            difference.position,
            len(request.prompt_token_ids),
            difference.delivered,
            difference.computed,
        )


def is_chosen(request_id: str, rate: float, seed: int) -> bool:
    """A choice that is true for a share of `rate` of all names, and always the same for a name and a seed."""
    if rate <= 0:
        return False
    digest = hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") < rate * (1 << 56)


def _compared(
    kind: Kind, position: int, wanted: list[TokenLogprobs], place: int, item: TokenLogprobs
) -> Difference | None:
    """What is not the same in the token at `place` of `wanted` and `item`, every bit counted."""
    if place >= len(wanted):
        ending: Kind = "endings" if kind == "logprobs" else kind
        return Difference(ending, position, "end", f"{place} tokens", f"token {item.token_id}")
    for (name, delivered), (_, computed) in zip(_values(wanted[place]), _values(item), strict=False):
        if delivered != computed:
            return Difference(
                "tokens" if name == "token" and kind == "logprobs" else kind, position, name, delivered, computed
            )
    return None


def _values(item: TokenLogprobs) -> Iterator[tuple[str, str]]:
    """Its parts, spelled so that equal texts mean equal bits."""
    yield "token", str(item.token_id)
    yield "logprob", item.logprob.hex()
    yield "rank", str(item.rank)
    yield "top tokens", str(item.top_ids)
    yield "top logprobs", " ".join(map(float.hex, item.top_logprobs))
