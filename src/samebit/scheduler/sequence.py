"""A running copy of a request, and what it reports. Changed by the scheduler only; holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from samebit.core.plan import LogitEdits
from samebit.core.request import FinishReason, MissReason, Request, SpeculationCounts, TokenLogprobs
from samebit.grammar.matcher import Matcher, is_empty, without
from samebit.scheduler.drafts import AcceptanceEstimate
from samebit.scheduler.edits import LogitRules, banning
from samebit.speculative.host import Proposer
from samebit.state.manager import SequenceState


class Flight(Protocol):
    """A sequence's row that is planned and not committed, as far as the next one depends on it (planning.PlannedRow)."""

    end: int
    drafts: list[int]
    draws: bool
    draft_index: int | None


Status = Literal["waiting", "running", "publishing", "done"]
"""Where a sequence stands. "publishing": it has ended or was preempted, and one empty row stores its state."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one request gained from a step. `error_param`: the field of the request that its `error` comes from, if it is one."""

    request_id: str
    tokens: list[TokenLogprobs] = []
    prompt: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_param: str | None = None
    speculation: SpeculationCounts = SpeculationCounts()
    num_cached_tokens: int = 0
    num_processed_tokens: int = 0
    cache_miss_reason: MissReason | None = None
    num_preemptions: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` is prompt and output; the first `state.length` of them have state.

    `num_cached` is the hit of the first admission (-1 before it), `miss_reason` why there was none. `prompt_end` is the checkpoint boundary at the prompt's
    end. `is_cold` bars the prefix cache after a damaged resume. `max_length` is where it ends for lack of room.
    `rules`: its bias and penalties, if it has any; `matcher`: its way through its grammar, likewise. `drew_last`: the last step drew its last token, so the device has it. `proposer` guesses its next tokens on the host;
    `drafts` are guesses that the last step made on the device, which has them too, with its `confidence` in each;
    `estimate` tells how good guesses have been. `flight` is its latest row that is planned and not committed.
    `settings` are those of its draws, in the order of PlanSample's. `is_edited`: logits of its draws may change before a
    token is drawn; `is_bound`: what the host adds to a row depends on the tokens before it (its guesses, a penalty, a grammar).
    """

    request: Request
    token_ids: list[int]
    max_length: int
    prompt_end: int
    status: Status = "waiting"
    state: SequenceState | None = None
    num_cached: int = -1
    miss_reason: MissReason | None = None
    num_preemptions: int = 0
    num_chunks: int = 0
    num_scored: int = 0
    is_cold: bool = False
    drew_last: bool = False
    proposer: Proposer | None = None
    drafts: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    estimate: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    finish_reason: FinishReason | None = None
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    rules: LogitRules | None = None
    matcher: Matcher | None = None
    flight: Flight | None = None
    num_prompt: int = field(init=False)
    settings: tuple[float, int, float, float, int, int] = field(init=False)
    is_edited: bool = field(init=False)
    is_bound: bool = field(init=False)

    def __post_init__(self) -> None:
        request, has_matcher = self.request, self.matcher is not None
        self.num_prompt = len(request.prompt_token_ids)
        self.settings = (
            request.params.temperature,
            max(request.params.top_k, 0),
            request.params.top_p,
            request.params.min_p,
            request.seed,
            request.sample_index,
        )
        may_ban = bool(request.banned_token_ids) or request.params.min_tokens > 0
        self.is_edited = may_ban or has_matcher or self.rules is not None
        counts_output = self.rules is not None and self.rules.counts_output
        self.is_bound = counts_output or has_matcher or self.proposer is not None

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt

    def logit_edits(self, guesses: list[int]) -> LogitEdits:
        """What changes in the logits of the token behind all tokens and `guesses`."""
        request = self.request
        banned = frozenset(request.banned_token_ids)
        if self.num_output + len(guesses) < request.params.min_tokens:
            banned |= self.stop_ids
        if self.matcher is not None:
            return self._masked(self.matcher.masks(guesses)[-1], guesses, banned)
        if self.rules is None:
            return banning(banned)
        return self.rules.edits(guesses, banned)

    def _masked(self, mask: bytes, guesses: list[int], banned: frozenset[int]) -> LogitEdits:
        """The edits of a draw that is held to a grammar, which has the last word: where it allows banned tokens only, they stay."""
        if self.request.params.ignore_eos:
            banned |= frozenset(self.request.eos_token_ids)
        left = without(mask, banned)
        edits = LogitEdits()
        if self.rules is not None:
            edits = self.rules.edits(guesses)
        return msgspec.structs.replace(edits, allowed=mask if is_empty(left) else left)

    @property
    def needs_results(self) -> bool:
        """Whether what the host adds to its next row depends on what its row in flight draws."""
        return self.is_bound and self.flight is not None and self.flight.draws

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, if it cannot."""
        error = None if self.matcher is None else self.matcher.error
        return None if error is None else f"the grammar cannot be followed: {error}"

    def append(self, token_id: int) -> None:
        """Take in a token that was drawn."""
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.take(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def stop_after(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Whether the sequence ends with `token_id`, just appended: (reason, the stop token if it was one)."""
        if token_id in self.stop_ids and self.num_output >= self.request.params.min_tokens:
            return "stop", token_id
        if self.matcher is not None and self.matcher.is_over:
            return "stop", token_id if token_id in self.request.eos_token_ids else None
        if self.matcher is not None and self.failure is not None:
            return "error", None
        if len(self.token_ids) >= self.max_length:
            return "length", None
        return None, None
