"""The scheduler: which sequences take how many tokens in the next step, and what a step's results mean for them.

A pure function of its calls: no tensors, clock, randomness or I/O. One step is `plan()`, executed elsewhere, then
`commit(output)`. The oldest running sequence is never preempted, and everything else can be, so it always proceeds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import msgspec

from samebit.core.config import EngineConfig
from samebit.core.errors import InvalidRequestError
from samebit.core.plan import DRAW, BatchPlan, SampleOutput, StepOutput
from samebit.core.request import FinishReason, Request, SpeculationCounts, TokenLogprobs
from samebit.grammar.matcher import Matcher
from samebit.scheduler.counters import Counters
from samebit.scheduler.edits import LogitRules
from samebit.scheduler.misses import miss_reason
from samebit.scheduler.planning import (
    PlannedRow,
    chunk_limit,
    is_picked,
    match_limit,
    promised_boundary,
    publishable_boundary,
    worthy_guesses,
    write_plan,
)
from samebit.scheduler.queue import WaitingQueue, check_fits
from samebit.scheduler.sequence import Progress, Sequence, Status
from samebit.speculative.host import HostDrafter
from samebit.state.manager import SequenceState, StateManager


class Scheduler:
    """Owner of all sequences. `max_length` is the most tokens a request may have, prompt and output.

    A step verifies at most as many guessed tokens of a sequence as the manager's geometry has room for. `drafter` makes what
    guesses them on the host; without one, the device does. `grammar` makes what holds a request's answer to a grammar, or None.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: StateManager,
        max_length: int,
        drafter: HostDrafter | None = None,
        grammar: Callable[[Request], Matcher | None] = lambda _: None,
    ) -> None:
        self._config, self._drafter, self._grammar = config, drafter, grammar
        self._manager, self.max_length = manager, max_length
        self.counters = Counters(accepted_per_position=[0] * manager.geometry.max_drafts)
        self._step, self._sequences = 0, dict[str, Sequence]()
        self._waiting = WaitingQueue(config.priority_aging_steps)
        self._running, self._publishing = list[Sequence](), list[Sequence]()
        self._in_flight, self._admitted = list[PlannedRow](), list[str]()

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot that still produce tokens."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting or self._running or self._publishing)

    def add(self, request: Request) -> None:
        """Queue a request; InvalidRequestError (or PromptTooLongError) when it can never run."""
        if request.request_id in self._sequences:
            raise InvalidRequestError(f"request_id={request.request_id!r}: already in use", param="request_id")
        check_fits(request, self.max_length)
        num_prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens
        size = self._config.page_size
        sequence = Sequence(
            request=request,
            token_ids=list(request.prompt_token_ids),
            max_length=num_prompt + wanted if wanted else self.max_length,
            prompt_end=(num_prompt - 1) // size * size,
            stop_ids=request.stop_ids,
            rules=LogitRules.of(request),
            matcher=self._grammar(request),
            proposer=self._drafter(request) if self._drafter and request.params.speculation else None,
        )
        self._sequences[request.request_id] = sequence
        self._waiting.add(sequence, self._step)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request from outside (a stop string, an abort); False if it is not known (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        sequence.finish_reason = reason
        if any(row.sequence is sequence for row in self._in_flight):
            return True
        self._end(sequence)
        return True

    def plan(self) -> BatchPlan:
        """Decide the next step. Every call must be followed by `commit`, or by `fail` if the step cannot be executed."""
        assert not self._in_flight, "the last step has not been committed"
        self._step += 1
        self._preempt_picked()
        planned, num_tokens = list[PlannedRow](), 0
        running = list(self._running)
        guesses = worthy_guesses(
            self._running, self._waiting, self._config, self._step, max_drafts=self._manager.geometry.max_drafts
        )
        for place, sequence in enumerate(running, start=1):
            room = self._room(len(planned), num_tokens)
            # Guesses never take the place of another sequence's next token, nor all room of those that wait.
            reserve = len(running) - place + (self._config.max_num_batched_tokens // 2 if self._waiting else 0)
            worthy = guesses.get(sequence.request.request_id, [])[: max(0, room - 1 - reserve)]
            row = self._running_row(sequence, room, worthy) if room and sequence.status is Status.RUNNING else None
            if row is not None:
                planned.append(row)
                num_tokens += row.num_tokens
        for sequence in list(self._waiting):
            room = self._room(len(planned), num_tokens)
            if room and self._awaits_prefix(sequence):
                continue
            row = self._admitted_row(sequence, room) if room else None
            if row is None:
                break
            planned.append(row)
            num_tokens += row.num_tokens
        planned += [self._publishing_row(sequence) for sequence in self._publishing]
        is_drafting = self._drafter is None and self._manager.geometry.max_drafts > 0
        plan = write_plan(self._step, planned, self._manager, self._config, is_drafting=is_drafting)
        self._in_flight = planned
        self._manager.launch(self._step)
        return plan

    def commit(self, output: StepOutput) -> list[Progress]:
        """Take in a step's results: tokens, acknowledged checkpoints, damaged resumes."""
        assert output.step == self._step, "results belong to the step in flight"
        planned, self._in_flight = self._in_flight, []
        self._manager.retire(self._step)
        progress = [self._commit_row(number, row, output) for number, row in enumerate(planned)]
        return [item for item in progress if item is not None]

    def fail(self, error: str) -> list[Progress]:
        """End every request of the step in flight, whose results are lost; nothing of it is published."""
        planned, self._in_flight = self._in_flight, []
        self._manager.retire(self._step)
        failed = []
        for row in planned:
            for _, pending in row.pending:
                self._manager.discard(pending)
            if row.sequence.finish_reason is None:
                failed.append(self._error(row.sequence, error))
            else:
                self._drop(row.sequence)
        return failed

    def take_admitted(self) -> list[str]:
        """Requests that were admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def check(self) -> None:
        """Assert that every id is accounted for; between steps only."""
        assert not self._in_flight, "a step is in flight"
        live = [s.state for s in (*self._running, *self._publishing) if s.state]
        assert all(sequence.state is None for sequence in self._waiting), "a waiting request holds state"
        assert all(s.status is Status.WAITING for s in self._waiting), "a request that has ended waits"
        self._manager.check(live, [])

    # Planning

    def _room(self, num_rows: int, num_tokens: int) -> int:
        """Tokens that a step with so many rows and tokens can still take; 0 when it has all its rows."""
        if num_rows >= (self._config.schedule.max_rows or self._config.max_num_seqs):
            return 0
        return self._config.max_num_batched_tokens - num_tokens

    def _running_row(self, sequence: Sequence, room: int, drafts: list[int]) -> PlannedRow | None:
        state = sequence.state
        assert state is not None, "a running sequence has state"
        left = len(sequence.token_ids) - state.length
        wanted = chunk_limit(self._config.schedule, sequence, min(room, left + len(drafts)))
        while not (num_tokens := self._manager.grow(state, wanted)):
            if not self._preempt_youngest(sequence):
                return None
        sequence.num_chunks += 1
        return PlannedRow(sequence, state, state.length, num_tokens, drafts[: max(0, num_tokens - left)])

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to publish more of this one's tokens than the cache holds now."""
        if not self._manager.enable_caching:
            return False
        limit, salt = match_limit(sequence), sequence.request.cache_salt
        leaders = [s for s in self._running if s.request.cache_salt == salt]
        promised = [promised_boundary(s, sequence, limit, self._config.checkpoint_interval) for s in leaders]
        best = max(promised, default=0)
        return best > 0 and best > self._manager.match_length(salt, sequence.token_ids, limit)

    def _admitted_row(self, sequence: Sequence, room: int) -> PlannedRow | None:
        """Admit a waiting sequence if its whole prompt finds pages now, without preempting anybody."""
        total = len(sequence.token_ids)
        state = self._manager.admit(sequence.request.cache_salt, sequence.token_ids, match_limit(sequence))
        if state is None:
            return None
        wanted = chunk_limit(self._config.schedule, sequence, min(room, total - state.length))
        num_tokens = self._manager.grow(state, wanted, whole=total)
        if not num_tokens:
            self._manager.release(state)
            return None
        self._waiting.remove(sequence)
        self._running.append(sequence)
        sequence.status, sequence.state = Status.RUNNING, state
        sequence.drew_last, sequence.drafts, sequence.confidence = False, [], []
        if sequence.num_cached < 0:
            self._first_admitted(sequence, state)
        sequence.num_chunks += 1
        return PlannedRow(sequence, state, state.length, num_tokens)

    def _first_admitted(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.num_cached = state.length
        self._admitted.append(sequence.request.request_id)
        if self._manager.enable_caching and not state.length:
            sequence.miss_reason = miss_reason(sequence, self._manager)
            self.counters.missed(sequence.miss_reason)

    def _publishing_row(self, sequence: Sequence) -> PlannedRow:
        assert sequence.state is not None, "only a sequence with state is published"
        return PlannedRow(sequence, sequence.state, sequence.state.length, 0)

    def _preempt_picked(self) -> None:
        for sequence in self._running[:0:-1]:
            state = sequence.state
            assert state is not None, "a running sequence has state"
            if is_picked(self._config.schedule, self._step, state.owner):
                self._preempt(sequence)

    def _preempt_youngest(self, needy: Sequence) -> bool:
        """Preempt the youngest running sequence; False if that leaves nothing for `needy` to wait for in this step."""
        victim = self._running[-1]
        if victim is self._running[0]:
            return False
        self._preempt(victim)
        return victim is not needy and victim.state is None

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.num_preemptions += 1
        sequence.num_preemptions += 1
        self._store(sequence)

    # Committing

    def _commit_row(self, number: int, row: PlannedRow, output: StepOutput) -> Progress | None:
        sequence, state = row.sequence, row.state
        intact = output.rows_intact[number] and (row.resume_entry is None or output.pages_intact[row.resume_entry])
        checkpoint = self._manager.unpin(state)
        rejected = len(row.drafts) - output.accepted[number]
        samples = output.samples[row.first_sample : row.first_sample + len(row.targets) - rejected]
        finite = list(takewhile(lambda sample: sample.is_finite, samples))
        usable = intact and len(finite) == len(samples)
        progress = None
        if intact and sequence.status is Status.RUNNING and sequence.finish_reason is None:
            progress = self._take_samples(sequence, row, finite, output.accepted[number])
            if row.draft_index is not None:
                sequence.drafts = output.drafts[row.draft_index]
                sequence.confidence = output.confidence[row.draft_index]
        if usable:
            # What was accepted behind a stop is no part of the sequence.
            length = min(row.start + row.num_tokens - rejected, len(sequence.token_ids))
            self._manager.advance(state, length, self._step)
        self._publish(row, output, is_usable=usable)
        if sequence.status is Status.PUBLISHING:
            self._drop(sequence)
            return None
        if not intact:
            self.counters.num_damaged_resumes += 1
            if checkpoint is not None:
                self._manager.drop_damaged(checkpoint)
            return self._start_over(sequence)
        if sequence.finish_reason is not None:
            # An unusable step has moved the ring on but not the committed length: nothing is left to publish from.
            (self._end if usable else self._drop)(sequence)
            return None
        if progress is not None and progress.finish_reason is not None:
            del self._sequences[sequence.request.request_id]
            sequence.finish_reason = progress.finish_reason
            (self._end if usable else self._drop)(sequence)
            return progress
        if not usable:
            return self._error(sequence, "the model's logits are not finite", progress)
        self._manager.trim(state)
        return progress

    def _publish(self, row: PlannedRow, output: StepOutput, *, is_usable: bool) -> None:
        """Publish what was acknowledged of a row's checkpoints; one that lies past the accepted drafts never came to be."""
        for index, pending in row.pending:
            is_past = is_usable and row.state.length < pending.entry.boundary <= row.start + row.num_tokens
            if is_usable and not is_past and output.pages_intact[index] and output.rows_written[index]:
                self._manager.publish(row.state, row.sequence.token_ids, pending)
                self.counters.num_published += 1
            else:
                self._manager.discard(pending)
                self.counters.num_refused_checkpoints += not is_past

    def _take_samples(
        self, sequence: Sequence, row: PlannedRow, samples: list[SampleOutput], num_accepted: int
    ) -> Progress | None:
        """Fold a row's results into its sequence one by one, up to where it stops."""
        scored: list[TokenLogprobs] = []
        drawn: list[TokenLogprobs] = []
        reason, stop_id = None, None
        for target, sample in zip(row.targets, samples, strict=False):
            item = TokenLogprobs(sample.token_id, sample.logprob, sample.rank, sample.top_ids, sample.top_logprobs)
            if target != DRAW:
                scored.append(item)
                continue
            drawn.append(item)
            sequence.append(item.token_id)
            reason, stop_id = sequence.stop_after(item.token_id)
            if reason is not None:
                break
        sequence.num_scored += len(scored)
        sequence.drew_last, sequence.drafts, sequence.confidence = bool(drawn), [], []
        sequence.estimate.learn(len(row.drafts), num_accepted)
        counts = SpeculationCounts()
        if row.drafts:
            counts = self.counters.verified(len(row.drafts), min(num_accepted, len(drawn)))
        if not (scored or drawn or sequence.request.wants_progress):
            return None
        return Progress(
            request_id=sequence.request.request_id,
            tokens=drawn,
            prompt=scored,
            finish_reason=reason,
            stop_token_id=stop_id,
            error=sequence.failure,
            speculation=counts,
            num_cached_tokens=max(sequence.num_cached, 0),
            num_processed_tokens=min(row.start + row.num_tokens, sequence.num_prompt),
            cache_miss_reason=sequence.miss_reason,
            num_preemptions=sequence.num_preemptions,
        )

    def _start_over(self, sequence: Sequence) -> Progress | None:
        """Compute again from the first token, once: damage in a run that no cache had a part in would only come back."""
        if sequence.is_cold and sequence.finish_reason is None:
            return self._error(sequence, "the device loses state that it has written")
        sequence.is_cold = True
        self._drop(sequence)
        return None

    def _end(self, sequence: Sequence) -> None:
        """A finished sequence leaves the queues; its state is stored if there is any worth it."""
        if sequence.status is Status.RUNNING:
            self._store(sequence)
        elif sequence.status is Status.WAITING:
            self._drop(sequence)

    def _store(self, sequence: Sequence) -> None:
        """Plan an empty row that publishes the page floor, or drop at once where there is nothing to publish."""
        state = sequence.state
        assert state is not None, "a running sequence has state"
        has_news = publishable_boundary(state, self._config.page_size) is not None
        if not (has_news and self._manager.enable_caching):
            self._drop(sequence)
            return
        self._running.remove(sequence)
        self._publishing.append(sequence)
        sequence.status = Status.PUBLISHING

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence's state away; unless it is finished, it waits again, before all others."""
        match sequence.status:
            case Status.RUNNING:
                self._running.remove(sequence)
            case Status.PUBLISHING:
                self._publishing.remove(sequence)
            case Status.WAITING:
                self._waiting.remove(sequence)
        if sequence.state is not None:
            self._manager.release(sequence.state)
            sequence.state = None
        sequence.status = Status.DONE
        if sequence.finish_reason is None:
            sequence.status = Status.WAITING
            self._waiting.add_first(sequence)

    def _error(self, sequence: Sequence, error: str, progress: Progress | None = None) -> Progress:
        """End a request with an error; `progress` is what it gained before."""
        sequence.finish_reason = "error"
        del self._sequences[sequence.request.request_id]
        self._drop(sequence)
        gained = progress or Progress(request_id=sequence.request.request_id)
        return msgspec.structs.replace(gained, finish_reason="error", error=error)
