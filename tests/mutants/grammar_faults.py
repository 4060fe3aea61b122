"""Faults of answers that are held to a grammar."""

from __future__ import annotations

from tests.mutants.edits import Mutant, edit

SEQUENCE = "scheduler.sequence:Sequence."
MATCHER = "grammar.matcher:Matcher."

GRAMMAR_MUTANTS = [
    Mutant(
        "a grammar advances on guesses",
        "The matcher itself goes along the guesses of a row, and stays there when they are rejected.",
        ("TensorRT-LLM PR #19296",),
        (edit(MATCHER + "_walk", "self._matcher.deep_copy()", "self._matcher"),),
        "grammars",
        "guesses changed an answer",
    ),
    Mutant(
        "all places of a row have the mask of the first",
        "What guesses change in the mask is forgotten.",
        (),
        (edit(SEQUENCE + "logit_edits", "self.matcher.masks(guesses)[-1]", "self.matcher.masks(guesses)[0]"),),
        "grammars",
        "the grammar cannot be followed",
    ),
    Mutant(
        "a known mask is used a place too late",
        "The masks behind accepted guesses are not moved up.",
        (),
        (edit(MATCHER + "accept", "self._masks[1:]", "self._masks"),),
        "grammars",
        "the grammar cannot be followed",
    ),
    Mutant(
        "a grammar that is over goes on",
        "An answer does not end where its grammar does.",
        (),
        (
            edit(
                SEQUENCE + "stop_after",
                "if self.matcher is not None and self.matcher.is_over:",
                "if self.matcher is not None and self.matcher.is_over and not self.request.params.min_tokens:",
            ),
        ),
        "grammars",
        "the grammar cannot be followed",
    ),
    Mutant(
        "an end token is free under a grammar",
        "`min_tokens` takes nothing from a mask.",
        (),
        (edit(SEQUENCE + "_masked", "left = without(mask, banned)", "left = mask"),),
        "grammars",
        "an answer ends early",
    ),
    Mutant(
        "masks are of the rows before",
        "Every mask but the first is applied to the logits row before its own.",
        (),
        (
            edit(
                "runner.step:_draw_edited",
                "rows = _own_rows(inputs.mask_samples, first, num_rows)",
                "rows = _own_rows((inputs.mask_samples - 1).clamp(min=0), first, num_rows)",
            ),
        ),
        "grammars",
        "the grammar cannot be followed",
    ),
]
