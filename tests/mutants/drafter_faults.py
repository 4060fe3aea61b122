"""Faults of drafters with state on the device: what they take in, keep, restore and write."""

from __future__ import annotations

from dataclasses import replace

import torch

from samebit.kernels.values import SINK_ROW
from tests.mutants.edits import Mutant, edit, wrap

SPECULATE, BEGIN, AT = "runner.step:_speculate", "drafting:DraftSteps.begin", "drafting:DraftSteps.at"
ADVANCE, PROPOSE = "speculative.hash:HashDrafter.advance", "speculative.hash:HashDrafter.propose"


def keep_no_checkpoint(original, drafter, index, hidden, state):
    """The drafter's rows of a checkpoint are not written; its own rows are."""
    dest = torch.full_like(index.conv.entry_dest, SINK_ROW)
    return original(drafter, replace(index, conv=replace(index.conv, entry_dest=dest)), hidden, state)


def cut_history(original, drafter, index, hidden, state):
    """A resumed row reads zeros for the tokens before it, and believes them."""
    resumed = index.conv.store_rows > 1
    conv = replace(
        index.conv,
        read_rows=torch.where(resumed, 0, index.conv.read_rows),
        read_tags=torch.where(resumed, 0, index.conv.read_tags),
    )
    return original(drafter, replace(index, conv=conv), hidden, state)


DRAFTER_MUTANTS = [
    Mutant(
        "a drafter learns only of those who speculate",
        "Steps in which nobody is to be guessed for pass the drafter by.",
        ("sglang PR #34043",),
        (edit(SPECULATE, "if speculation is not None:", "if speculation is not None and steps.num_rows:"),),
        "drafter",
        "loses state",
    ),
    Mutant(
        "the drafter's part is missing from checkpoints",
        "What the target writes of a checkpoint is complete, what its drafter writes is not.",
        ("sglang PR #34043",),
        (wrap(ADVANCE, keep_no_checkpoint),),
        "drafter",
        "refused",
    ),
    Mutant(
        "a drafter's history is cut at a hit",
        "Behind a prefix from the cache the drafter begins with nothing before it.",
        ("omlx #2438",),
        (wrap(ADVANCE, cut_history),),
        "drafter",
        "drafts",
    ),
    Mutant(
        "guesses are written wherever the page table points",
        "A guess behind the pages of its sequence goes to a page that is somebody else's.",
        ("vLLM PR #42971",),
        (edit(AT, "has_page = position < self._inputs.draft_limits", "has_page = position >= 0"),),
        "drafter",
        "page 1",
    ),
    Mutant(
        "guesses begin a token early",
        "The drafter's first row is that of the last token with state.",
        ("sglang PR #37505",),
        (edit(BEGIN, "self._tables.length[slots], 0)", "self._tables.length[slots] - 1, 0)"),),
        "drafter",
        "drafts",
    ),
    Mutant(
        "guesses follow what was drawn before",
        "The drafter takes the token that the step began with for the last one.",
        ("vLLM PR #53919",),
        (edit(BEGIN, "self._tables.next_token[slots], 0)", "self._tables.next_token[slots].roll(1), 0)"),),
        "drafter",
        "drafts",
    ),
    Mutant(
        "a guess has the noise of the place before",
        "The drafter samples with the noise of the token before the one that it guesses.",
        (),
        (edit(PROPOSE, "steps.columns(ahead + 1)", "steps.columns(ahead)"),),
        "drafter",
        "drafts",
    ),
    Mutant(
        "a guess has the settings of another request",
        "Temperature, filters and seed are those of the first row that guesses.",
        (),
        (
            edit(
                "drafting:DraftSteps.columns",
                "rows = self._inputs.draft_samples.long()",
                "rows = self._inputs.draft_samples.long()[:1].expand(self.num_rows)",
            ),
        ),
        "drafter",
        "drafts",
    ),
    Mutant(
        "guesses are kept for the slots of others",
        "Each slot keeps what was guessed for another row of the step.",
        (),
        (
            edit(
                SPECULATE,
                "pools.tables.drafts[slots.long(), : found.tokens.shape[1]] = found.tokens",
                "pools.tables.drafts[slots.long(), : found.tokens.shape[1]] = found.tokens.flip(0)",
            ),
        ),
        "drafter",
        "few guesses are accepted",
    ),
]
