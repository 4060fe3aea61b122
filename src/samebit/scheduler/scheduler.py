"""The scheduler: which sequences take how many tokens in the next step, and what a step's results mean for them.

A pure function of its calls: no tensors, clock, randomness or I/O. One step is `plan()`, executed elsewhere, then
`commit(output)`; while it runs, `plan_ahead()` may plan the one behind it. The oldest running sequence is never preempted,
and everything else can be, so it always proceeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from samebit.core.config import EngineConfig
from samebit.core.errors import InvalidRequestError
from samebit.core.plan import BatchPlan, StepOutput
from samebit.core.request import FinishReason, Request
from samebit.grammar.matcher import Matcher
from samebit.scheduler.counters import Counters
from samebit.scheduler.edits import LogitRules
from samebit.scheduler.misses import Admission, admission
from samebit.scheduler.planning import (
    PlannedRow,
    PlannedStep,
    awaits_prefix,
    chunk_limit,
    is_worth_drafting,
    match_limit,
    may_pass_boundary,
    may_plan_ahead,
    next_row,
    picked,
    planned_row,
    publishable_boundary,
    worthy_guesses,
    write_plan,
)
from samebit.scheduler.queue import WaitingQueue, check_fits
from samebit.scheduler.results import take_samples
from samebit.scheduler.sequence import Progress, Sequence
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
        self._step, self._is_short = 0, False  # short: somebody has found no page while a step was in flight
        self._sequences, self._waiting = dict[str, Sequence](), WaitingQueue(config.priority_aging_steps)
        self._running, self._publishing = list[Sequence](), list[Sequence]()
        self._flights, self._admitted = deque[PlannedStep](), list[Admission]()

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted; no shadows."""
        return self._waiting.num_requests

    @property
    def num_running(self) -> int:
        """Requests with a slot that still produce tokens; no shadows."""
        return sum(not sequence.request.is_shadow for sequence in self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._waiting or self._running or self._publishing or self._flights)

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
        if sequence.flight is None:
            self._end(sequence)
        return True

    def plan(self) -> BatchPlan:
        """Decide the next step. Every call must be followed by `commit`, or by `fail` if the step cannot be executed."""
        assert not self._flights, "the last step has not been committed"
        self._step, self._is_short = self._step + 1, False
        for sequence in picked(self._running, self._config.schedule, self._step):
            self._preempt(sequence)
        return self._launch(self._plan_rows())

    def plan_ahead(self) -> BatchPlan | None:
        """Decide the step behind the one in flight, or None where its results are needed first.

        It takes the next tokens of whoever draws, wherever guesses leave its last row, the next chunk of a prompt, requests that wait.
        Whoever then turns out to have ended has computed them in vain.
        """
        assert len(self._flights) == 1, "one step is in flight"
        if self._is_short or not may_plan_ahead(self._flights[0], self._running, self._config.schedule):
            return None
        self._step += 1
        planned = self._plan_rows()
        if planned:
            return self._launch(planned)
        self._step -= 1
        return None

    def commit(self, output: StepOutput) -> list[Progress]:
        """Take in the results of the oldest step in flight: tokens, acknowledged checkpoints, damaged resumes."""
        flight = self._flights.popleft()
        assert output.step == flight.step, "results belong to the oldest step in flight"
        self._manager.retire(flight.step)
        progress = [self._commit_row(number, row, output) for number, row in enumerate(flight.rows)]
        return [item for item in progress if item is not None]

    def fail(self, error: str) -> list[Progress]:
        """End every request of the steps in flight, whose results are lost; nothing of them is published."""
        rows = [row for flight in self._flights for row in flight.rows]
        self._flights.clear()
        self._manager.retire(self._step)
        failed = []
        for row in rows:
            for _, pending in row.pending:
                self._manager.discard(pending)
            row.sequence.flight = None
            if row.sequence.state is not row.state:
                continue
            if row.sequence.finish_reason is None:
                failed.append(self._error(row.sequence, error))
            else:
                self._drop(row.sequence)
        return failed

    def take_admitted(self) -> list[Admission]:
        """Requests that were admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def check(self) -> None:
        """Assert that every id is accounted for."""
        live = [s.state for s in (*self._running, *self._publishing) if s.state]
        assert all(sequence.state is None for sequence in self._waiting), "a waiting request holds state"
        assert all(s.status == "waiting" for s in self._waiting), "a request that has ended waits"
        self._manager.check(live, [p for flight in self._flights for row in flight.rows for _, p in row.pending])

    def _plan_rows(self) -> list[PlannedRow]:
        """The rows of the next step: running sequences in order, then as many that wait as find room, then those that end."""
        planned: list[PlannedRow] = []
        config, room = self._config, self._config.max_num_batched_tokens
        most_rows = config.schedule.max_rows or config.max_num_seqs
        running, most = list(self._running), self._manager.geometry.max_drafts
        guesses = worthy_guesses(running, self._waiting, config, self._step, max_drafts=most)
        nothing: list[int] = []
        for place, sequence in enumerate(running, start=1):
            if not room or len(planned) >= most_rows:
                break
            worthy = nothing
            if guesses and (worthy := guesses.get(sequence.request.request_id, nothing)):
                # Guesses never take the place of another sequence's next token, nor all room of those that wait.
                reserve = len(running) - place + (config.max_num_batched_tokens // 2 if self._waiting else 0)
                worthy = worthy[: max(0, room - 1 - reserve)]
            row = self._running_row(sequence, room, worthy) if sequence.status == "running" else None
            if row is not None:
                planned.append(row)
                room -= row.num_tokens
        for sequence in list(self._waiting):
            if not room or len(planned) >= most_rows:
                break
            if awaits_prefix(sequence, [*self._running, *self._publishing], self._manager, config):
                continue
            row = self._admitted_row(sequence, room)
            if row is None:
                break
            planned.append(row)
            room -= row.num_tokens
        return planned + [self._publishing_row(sequence) for sequence in self._publishing if sequence.flight is None]

    def _launch(self, planned: list[PlannedRow]) -> BatchPlan:
        is_drafting = self._drafter is None and is_worth_drafting(planned, self._config, self._manager.geometry)
        plan = write_plan(self._step, planned, self._manager, self._config, is_drafting=is_drafting)
        self._flights.append(PlannedStep(self._step, planned))
        for row in planned:
            row.sequence.flight = row
        self._manager.launch(self._step)
        return plan

    def _running_row(self, sequence: Sequence, room: int, drafts: list[int]) -> PlannedRow | None:
        state = sequence.state
        assert state is not None, "a running sequence has state"
        begins = next_row(sequence, state)
        if begins is None:
            return None
        start, num_ahead = begins
        left = len(sequence.token_ids) + num_ahead - start
        wanted = chunk_limit(self._config.schedule, sequence, min(room, left + len(drafts)))
        if num_ahead > 1 and may_pass_boundary(sequence, state, start + wanted, self._config):
            return None
        before = start - state.length
        while (num_tokens := self._manager.grow(state, before + wanted) - before) <= 0:
            # Nobody is preempted while a step is in flight: what it is about to give is not known. The next plan waits for its end.
            self._is_short = bool(self._flights)
            if self._is_short or not self._preempt_youngest(sequence):
                return None
        sequence.num_chunks += 1
        guesses = drafts[: max(0, num_tokens - left)] if drafts else drafts
        return planned_row(sequence, state, start, num_tokens, guesses, num_ahead)

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
        self._running = sorted([*self._running, sequence], key=lambda running: running.request.is_shadow)
        sequence.status, sequence.state = "running", state
        sequence.drew_last, sequence.drafts, sequence.confidence = False, [], []
        if sequence.num_cached < 0:
            self._first_admitted(sequence, state)
        sequence.num_chunks += 1
        return planned_row(sequence, state, state.length, num_tokens, [], resume=state.resume)

    def _first_admitted(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.num_cached = state.length
        if sequence.request.is_shadow:
            return
        self._admitted.append(admission(sequence, self._manager))
        sequence.miss_reason = self._admitted[-1].miss_reason
        if sequence.miss_reason is not None:
            self.counters.missed(sequence.miss_reason)

    def _publishing_row(self, sequence: Sequence) -> PlannedRow:
        assert sequence.state is not None, "only a sequence with state is published"
        return planned_row(sequence, sequence.state, sequence.state.length, 0, [])

    def _preempt_youngest(self, needy: Sequence) -> bool:
        """Preempt the youngest running sequence; False if that leaves nothing for `needy` to wait for in this step."""
        victim = self._running[-1]
        if victim is self._running[0]:
            return False
        self._preempt(victim)
        return victim is not needy and victim.state is None

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.num_preemptions += not sequence.request.is_shadow
        sequence.num_preemptions += 1
        self._store(sequence)

    def _commit_row(self, number: int, row: PlannedRow, output: StepOutput) -> Progress | None:
        sequence, state = row.sequence, row.state
        if sequence.flight is row:
            sequence.flight = None
        if sequence.state is not state:
            self._discard(row)
            return None
        intact = output.rows_intact[number] and (row.resume_entry is None or output.pages_intact[row.resume_entry])
        checkpoint = None if row.resume is None else self._manager.unpin(state)
        accepted = output.accepted[number]
        rejected = len(row.drafts) - accepted
        if rejected and sequence.flight is not None:
            sequence.flight.end -= rejected
        first = row.first_sample
        behind = first + row.num_scored + (1 + accepted if row.draws else 0)
        samples, finite = output.samples[first:behind], output.finite[first:behind]
        usable, progress = intact and False not in finite, None
        if intact and sequence.status == "running" and sequence.finish_reason is None:
            good = samples if usable else samples[: finite.index(False)]
            progress = take_samples(sequence, row, good, accepted, output, self.counters)
        if usable:
            # What was accepted behind a stop is no part of the sequence.
            length = min(row.end - rejected, len(sequence.token_ids))
            self._manager.advance(state, length, output.step)
        if row.pending:
            self._publish(row, output, is_usable=usable)
        if sequence.status == "publishing":
            self._drop(sequence)
            return None
        if not intact:
            self.counters.num_damaged_resumes += 1
            if checkpoint is not None:
                self._manager.drop_damaged(checkpoint)
            return self._start_over(sequence)
        if progress is not None and progress.finish_reason is not None:
            del self._sequences[sequence.request.request_id]
            sequence.finish_reason = progress.finish_reason
        if sequence.finish_reason is not None:
            if not usable:
                # The step has moved the ring on but not the committed length: nothing is left to publish from.
                self._drop(sequence)
            elif sequence.flight is None:  # what it has in flight goes first
                self._end(sequence)
            return progress
        if not usable:
            return self._error(sequence, "the model's logits are not finite", progress)
        self._manager.trim(state)
        return progress

    def _discard(self, row: PlannedRow) -> None:
        """A row whose sequence has lost the state that it was planned with leaves nothing."""
        for _, pending in row.pending:
            self._manager.discard(pending)

    def _publish(self, row: PlannedRow, output: StepOutput, *, is_usable: bool) -> None:
        """Publish what was acknowledged of a row's checkpoints; one that lies past the accepted drafts never came to be."""
        for index, pending in row.pending:
            is_past = is_usable and row.state.length < pending.entry.boundary <= row.end
            if is_usable and not is_past and output.pages_intact[index] and output.rows_written[index]:
                self._manager.publish(row.state, row.sequence.token_ids, pending)
                self.counters.num_published += 1
            else:
                self._manager.discard(pending)
                self.counters.num_refused_checkpoints += not is_past

    def _start_over(self, sequence: Sequence) -> Progress | None:
        """Compute again from the first token, once: damage in a run that no cache had a part in would only come back."""
        if sequence.is_cold and sequence.finish_reason is None:
            return self._error(sequence, "the device loses state that it has written")
        sequence.is_cold = True
        self._drop(sequence)
        return None

    def _end(self, sequence: Sequence) -> None:
        """A finished sequence leaves the queues; its state is stored if there is any worth it."""
        if sequence.status == "running":
            self._store(sequence)
        elif sequence.status == "waiting":
            self._drop(sequence)

    def _store(self, sequence: Sequence) -> None:
        """Plan an empty row that publishes the page floor, or drop at once where there is nothing to publish."""
        state = sequence.state
        assert state is not None, "a running sequence has state"
        is_cached = self._manager.enable_caching and not sequence.request.is_shadow
        if not is_cached or publishable_boundary(state, self._config.page_size) is None:
            self._drop(sequence)
            return
        self._running.remove(sequence)
        self._publishing.append(sequence)
        sequence.status = "publishing"

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence's state away; unless it is finished, it waits again, before all others. A row in flight is none of it now."""
        sequence.flight = None
        match sequence.status:
            case "running":
                self._running.remove(sequence)
            case "publishing":
                self._publishing.remove(sequence)
            case "waiting":
                self._waiting.remove(sequence)
        if sequence.state is not None:
            self._manager.release(sequence.state)
            sequence.state = None
        sequence.status = "done"
        if sequence.finish_reason is None:
            sequence.status = "waiting"
            self._waiting.add_first(sequence)

    def _error(self, sequence: Sequence, error: str, progress: Progress | None = None) -> Progress:
        """End a request with an error; `progress` is what it gained before."""
        sequence.finish_reason = "error"
        del self._sequences[sequence.request.request_id]
        self._drop(sequence)
        gained = progress or Progress(request_id=sequence.request.request_id)
        return msgspec.structs.replace(gained, finish_reason="error", error=error)
