"""Faults of planning a step while another is in flight."""

from __future__ import annotations

from tests.mutants.edits import Mutant, edit

SCHEDULER = "scheduler.scheduler:Scheduler."
PLANNING = "scheduler.planning:"

AHEAD_MUTANTS = [
    Mutant(
        "a step is taken for the newest one",
        "Pages that a step completed get the stamps of the step that was planned behind it.",
        (),
        (edit(SCHEDULER + "_commit_row", "length, output.step)", "length, self._step)"),),
        "ahead",
        "refused",
    ),
    Mutant(
        "a row planned ahead begins at the committed length",
        "The row in flight is forgotten when the next one is planned.",
        (),
        (edit(PLANNING + "next_row", "return flight.end,", "return state.length,"),),
        "ahead",
        "DifferenceError",
    ),
    Mutant(
        "the token in flight does not count",
        "Whether `min_tokens` is reached is asked without the token that the step in flight draws.",
        (),
        (edit(PLANNING + "_plan_samples", "[DRAW] * row.num_ahead + drafts", "drafts"),),
        "ahead",
        "token_ids",
    ),
    Mutant(
        "penalties do not wait for the token",
        "A request with penalties is planned ahead, without what the step in flight draws.",
        (),
        (edit("scheduler.sequence:Sequence.__post_init__", "is_bound = counts_output or", "is_bound ="),),
        "ahead",
        "token_ids",
    ),
    Mutant(
        "a request goes on past its room",
        "The token in flight is the last that a request may have, and one more is planned.",
        (),
        (
            edit(
                PLANNING + "next_row",
                "len(sequence.token_ids) + num_ahead >= sequence.max_length",
                "False",
            ),
        ),
        "ahead",
        "beyond",
    ),
    Mutant(
        "guesses that were wrong count for the row behind them",
        "A row that was planned before the guesses in flight were verified stays where it would begin if all were right.",
        (),
        (edit(SCHEDULER + "_commit_row", "sequence.flight.end -= rejected", "pass"),),
        "ahead",
        "Error",
    ),
    Mutant(
        "a boundary is passed unseen",
        "A row that may reach a checkpoint's boundary is planned ahead, although it is not known where it begins.",
        (),
        (
            edit(
                SCHEDULER + "_running_row",
                "may_pass_boundary(sequence, state, start + wanted, self._config)",
                "False",
            ),
        ),
        "ahead",
        "IndexError",
    ),
    Mutant(
        "a ring holds what one step writes",
        "What is stored of a request that stops inside accepted guesses is overwritten by the step in flight.",
        (),
        (edit("state.layout:StateGeometry.ring_length", "2 + 3 * self.max_drafts", "2 + self.max_drafts"),),
        "ahead",
        "refused",
    ),
    Mutant(
        "what has lost its state is taken in",
        "A row in flight of a request that began anew counts for its new state.",
        (),
        (edit(SCHEDULER + "_commit_row", "if sequence.state is not state:", "if False:"),),
        "ahead",
        "Error",
    ),
]
