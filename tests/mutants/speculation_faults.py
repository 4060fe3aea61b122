"""Faults of verifying guesses: what is accepted, what is kept of a row, and what the next step takes from it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from tests.fakes import logits_rows
from tests.mutants.changes import FILL, after_index
from tests.mutants.edits import Mutant, edit, wrap

ACCEPT = "kernels.sets:KernelSet.accept"
COMMIT = "scheduler.scheduler:Scheduler._commit_row"
SCHEDULER = "scheduler.scheduler:Scheduler."
PLANNING = "scheduler.planning:"
SEQUENCE = "scheduler.sequence:Sequence."


def compare_with_the_next_row(original, kernels, drawn, index, length, next_token, max_drafts):
    """A guess is held against what was drawn a place later."""
    guessing = (index.row_drafts > 0).int()
    return original(
        kernels,
        drawn,
        replace(index, row_first_draw=index.row_first_draw + guessing),
        length,
        next_token,
        max_drafts,
    )


def accept_equal_ones_anywhere(original, kernels, drawn, index, length, next_token, max_drafts):
    """Counting does not end at the first guess that is wrong."""
    accepted = original(kernels, drawn, index, length, next_token, max_drafts)
    more = (accepted < index.row_drafts).int()
    length[index.row_slots.long()] += more
    return accepted + more


def take_the_last_row(original, kernels, drawn, index, length, next_token, max_drafts):
    """The next token is that behind all guesses."""
    accepted = original(kernels, drawn, index, length, next_token, max_drafts)
    draws = index.row_first_draw >= 0
    last = drawn[torch.where(draws, index.row_first_draw + index.row_drafts, 0).long()]
    next_token[torch.where(draws, index.row_slots, 0).long()] = last
    return accepted


def do_not_rewind(original, kernels, drawn, index, length, next_token, max_drafts):
    """The slot's length counts the whole row."""
    accepted = original(kernels, drawn, index, length, next_token, max_drafts)
    length[index.row_slots.long()] += index.row_drafts - accepted
    return accepted


def draw_a_row_at_one_position(fields, tables, found, sizes):
    """All draws of a batch row have the position of the first one among those given to the step."""
    row, positions = fields.sample_rows.long(), found["sample_positions"]
    behind = torch.zeros_like(row, dtype=torch.bool)
    behind[1:] = (row[1:] == row[:-1]) & (positions[1:] == positions[:-1] + 1)
    positions.sub_(behind.long())


def leave_guesses_out(original, row):
    """A row goes on from the device's words, in which no guesses stand."""
    planned = original(row)
    return msgspec.structs.replace(planned, token_ids=[]) if row.drafts else planned


def verify_greedily(original, buffer, plan):
    """Draws that verify a guess have no temperature."""
    view = original(buffer, plan)
    for number, sample in enumerate(logits_rows(plan)):
        row = plan.rows[sample.row]
        if row.num_drafts and sample.offset < row.num_tokens - 1:
            buffer._host["sample_temperature"][number] = 0.0
    return view


SPECULATION_MUTANTS = [
    # Acceptance
    Mutant(
        "a guess is compared with the row after it",
        "Acceptance holds each guess against what was drawn a place later.",
        (),
        (wrap(ACCEPT, compare_with_the_next_row),),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "a wrong guess is accepted",
        "One more guess is accepted than was drawn.",
        (),
        (wrap(ACCEPT, accept_equal_ones_anywhere),),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "the next token is that of the last row",
        "What a slot goes on with was drawn behind all guesses instead of behind the accepted ones.",
        (),
        (wrap(ACCEPT, take_the_last_row),),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "the length is not taken back",
        "After a step with guesses a slot counts the rejected ones, too, and the next step without any goes on from there.",
        ("vLLM #39273",),
        (wrap(ACCEPT, do_not_rewind),),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "guesses are verified greedily",
        "A row that verifies a guess ignores the request's temperature.",
        (),
        (wrap(FILL, verify_greedily),),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "noise does not move on inside a row",
        "All draws of a row of guesses have the noise of one position.",
        (),
        (after_index(draw_a_row_at_one_position),),
        "guesses",
        "token_ids",
    ),
    # What a row of guesses leaves
    Mutant(
        "rejected guesses are committed",
        "The committed length is that of the whole row.",
        ("sglang PR #35694",),
        (
            edit(
                COMMIT,
                "length = min(row.end - rejected, len(sequence.token_ids))",
                "length = row.end",
            ),
        ),
        "guesses",
        "not as long",
    ),
    Mutant(
        "what is accepted behind a stop is committed",
        "A sequence that stops inside a row keeps the length of all accepted guesses.",
        ("sglang PR #35694",),
        (
            edit(
                COMMIT,
                "min(row.end - rejected, len(sequence.token_ids))",
                "row.end - rejected",
            ),
        ),
        "guesses",
        "not as long",
    ),
    Mutant(
        "a checkpoint past the accepted guesses is published",
        "A boundary that a row of guesses reached is kept, whether or not they were accepted.",
        ("sglang PR #35694",),
        (
            edit(
                SCHEDULER + "_publish",
                "is_past = is_usable and row.state.length < pending.entry.boundary <= row.end",
                "is_past = False",
            ),
        ),
        "guesses",
        "not as long",
    ),
    Mutant(
        "draws behind a rejected guess are reported",
        "All draws of a row become part of the answer.",
        (),
        (edit(COMMIT, "(1 + accepted if", "(1 + len(row.drafts) if"),),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "a ring has no room for guesses",
        "Rejected inputs overwrite those that a stop before them still needs.",
        ("vLLM PR #50272",),
        (edit("state.layout:StateGeometry.ring_length", "2 + 3 * self.max_drafts", "2"),),
        "guesses",
        "refused",
    ),
    Mutant(
        "window pages are let go by the length of the row",
        "Trimming counts rejected guesses, and frees pages that the accepted part still sees.",
        (),
        (
            edit(
                COMMIT,
                "self._manager.trim(state)",
                "state.length += rejected\n    self._manager.trim(state)\n    state.length -= rejected",
            ),
        ),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "a stop inside a row is passed over",
        "Only the last token of a row can end a request.",
        (),
        (
            edit(
                "scheduler.results:take_samples",
                "reason, stop_id = sequence.stop_after(item.token_id)",
                "reason, stop_id = sequence.stop_after(item.token_id) if item is samples[-1] else (None, None)",
            ),
        ),
        "guesses",
        "token_ids",
    ),
    # What is guessed
    Mutant(
        "a guess counts as output before it is accepted",
        "All guesses of a row are taken for tokens of the answer when `min_tokens` is looked at.",
        (),
        (
            edit(
                PLANNING + "_plan_samples",
                "drafts[:ahead]",
                "drafts",
            ),
        ),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "stops are barred in the first place of a row only",
        "Behind the first guess `min_tokens` is forgotten.",
        (),
        (
            edit(
                SEQUENCE + "logit_edits",
                "self.num_output + len(guesses) < request.params.min_tokens",
                "not guesses and self.num_output < request.params.min_tokens",
            ),
        ),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "stops are barred as long as in the first place of a row",
        "Whether `min_tokens` is reached is asked once a row.",
        (),
        (
            edit(
                SEQUENCE + "logit_edits",
                "self.num_output + len(guesses) < request.params.min_tokens",
                "self.num_output < request.params.min_tokens",
            ),
        ),
        "guesses",
        "token_ids",
    ),
    Mutant(
        "guesses go beyond `max_tokens`",
        "A row may be longer than what is left of the answer.",
        (),
        (
            edit(
                PLANNING + "_offer",
                "min(sequence.max_length - len(sequence.token_ids) - num_ahead - 1, max_drafts)",
                "max_drafts",
            ),
        ),
        "guesses",
        "IndexError",
    ),
    Mutant(
        "guesses stay on the host",
        "A row of guesses takes its tokens from the slot's words, which hold none.",
        (),
        (wrap(PLANNING + "_plan_row", leave_guesses_out),),
        "guesses",
        "rejected",
    ),
    Mutant(
        "guesses of another request",
        "A new request takes over the proposer of one that still runs.",
        (),
        (
            edit(
                SCHEDULER + "add",
                "proposer=self._drafter(request) if",
                "proposer=next((s.proposer for s in self._sequences.values()), self._drafter(request)) if",
            ),
        ),
        "guesses",
        "rejected",
    ),
]
