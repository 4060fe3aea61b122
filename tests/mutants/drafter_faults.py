"""Faults of drafters with state on the device: what they take in, keep, restore and write."""

from __future__ import annotations

from dataclasses import replace

import torch

from samebit.kernels.values import SINK_ROW
from tests.mutants.edits import Mutant, edit, wrap

SPECULATE, WORDS, AT = "runner.step:_speculate", "kernels.sets:KernelSet.draft_words", "drafting:DraftSteps.at"
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


def begin_early(original, kernels, slots, samples, length, *others):
    original(kernels, slots, samples, length - 1, *others)


def take_tokens_of_others(original, kernels, *operands):
    original(kernels, *operands)
    last_tokens = operands[5].last_tokens
    last_tokens.copy_(last_tokens.roll(1))


def take_settings_of_the_first(original, kernels, slots, samples, *others):
    original(kernels, slots, samples[:1].repeat(samples.shape[0]), *others)


DRAFTER_MUTANTS = [
    Mutant(
        "a drafter learns only of those who speculate",
        "Steps in which nobody is to be guessed for pass the drafter by.",
        ("sglang PR #34043",),
        (
            edit(
                "runner.step:run_step",
                "_taken_in(speculation,",
                "_taken_in(speculation if buffers.draft_steps.num_rows else None,",
            ),
        ),
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
        (wrap(WORDS, begin_early),),
        "drafter",
        "drafts",
    ),
    Mutant(
        "guesses follow what was drawn before",
        "The drafter takes the token that the step began with for the last one.",
        ("vLLM PR #53919",),
        (wrap(WORDS, take_tokens_of_others),),
        "drafter",
        "drafts",
    ),
    Mutant(
        "a guess has the noise of the place before",
        "The drafter samples with the noise of the token before the one that it guesses, where that is a guess too.",
        (),
        (edit(PROPOSE, "steps.columns(ahead + 1)", "steps.columns(max(1, ahead))"),),
        "drafter",
        "drafts",
    ),
    Mutant(
        "a guess has the settings of another request",
        "Temperature, filters and seed are those of the first row that guesses.",
        (),
        (wrap(WORDS, take_settings_of_the_first),),
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
                "return guesses, found.confidence",
                "kernels.keep_drafts(guesses.flip(0), slots, pools.tables.drafts); return guesses, found.confidence",
            ),
        ),
        "drafter",
        "few guesses are accepted",
    ),
]
