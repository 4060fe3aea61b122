"""Faults of state on the device: checkpoints, resuming, rings, slots, pages, acknowledgement."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from samebit.kernels.values import SINK_ROW
from samebit.runner.graphs import _Watch
from tests.mutants.changes import (
    FILL,
    after_index,
    believe_histories,
    do_not_count,
    do_not_store,
    drop_entries,
    entries_of_the_first_row,
    is_mixed,
    is_recording,
    pad_rows_with_a_live_slot,
    read_former_tenant,
    read_zeros,
    swap_kept_draws,
    write_through_the_source,
    zeroed,
)
from tests.mutants.edits import Mutant, define, edit, wrap

CONVOLVE, ATTEND = "models.hash:HashModel._convolve", "models.hash:HashModel._attend"
ACKNOWLEDGE = "indexing:acknowledge"
INCIDENT = "sglang PR #34043"
WRITTEN = "rows.index_copy_(0, sources.dest, torch.where(sources.is_pooled, found, x[sources.tokens]))"
TAGGED = "pool.row_tags.index_copy_(0, sources.dest, sources.tags ^ stale)"

STATE_MUTANTS = [
    # First the three faults of one incident.
    Mutant(
        "tracking is switched off by another setting",
        "Steps that report logprobs drop their checkpoint entries, while the scheduler goes on publishing.",
        (INCIDENT,),
        (drop_entries(lambda plan: any(sample.num_top for sample in plan.samples)),),
        "hits",
        "refused",
    ),
    Mutant(
        "a branch is specialised away at capture",
        "Conv rows are kept behind a Python `if` that is false while inert inputs are recorded.",
        (INCIDENT,),
        (
            define("models.hash", "_is_recording", is_recording),
            edit(CONVOLVE, WRITTEN, "_is_recording() or " + WRITTEN),
        ),
        "graphs",
        "GraphError",
    ),
    Mutant(
        "a kernel is missing in one bucket",
        "Steps of sixteen tokens are recorded without the kernel that keeps conv rows; all others have it.",
        (INCIDENT,),
        (
            define("models.hash", "_is_recording", is_recording),
            edit(CONVOLVE, WRITTEN, "len(x) == 16 and _is_recording() or " + WRITTEN),
        ),
        "graphs",
        "GraphError",
    ),
    Mutant(
        "padding is left stale",
        "A fill writes the live rows and leaves the rest of the bucket as the step before it did.",
        (INCIDENT, "vLLM #41841"),
        (
            edit(FILL, "np.copyto(self._bytes, self._inert)", "pass"),
            edit(
                "inputs:InputBuffer._fill_rows",
                'host["query_start"].fill(num_tokens)',
                'host["query_start"][len(plan.rows)] = num_tokens',
            ),
        ),
        "graphs",
        "token_ids",
    ),
    Mutant(
        "a branch is off whenever operations are watched",
        "Conv rows of checkpoints are kept in eager steps only: recording and comparison agree, and a replay keeps nothing.",
        (INCIDENT,),
        (
            define("models.hash", "_is_eager", lambda: not isinstance(_get_current_dispatch_mode(), _Watch)),
            edit(CONVOLVE, WRITTEN, "_is_eager() and " + WRITTEN, TAGGED, "_is_eager() and " + TAGGED),
        ),
        "graphs",
        "refused",
    ),
    # Checkpoints
    Mutant(
        "entries of mixed steps are lost",
        "A step with prefill and decode rows drops its checkpoint entries.",
        ("sglang #39342",),
        (drop_entries(is_mixed),),
        "hits",
        "refused",
    ),
    Mutant(
        "one stream keeps nothing",
        "The last conv stream does not write the rows of checkpoints, nor their tags.",
        ("omlx #2536", "imp PR #1503"),
        (
            edit(
                "models.hash:HashModel.forward",
                "index.conv, sources)",
                "index.conv, sources if place.layer < len(pools.conv) - 1 else _sinking(sources, index))",
            ),
            define(
                "models.hash",
                "_sinking",
                lambda sources, index: replace(
                    sources,
                    dest=torch.where(
                        torch.arange(sources.dest.numel()) < index.conv.entry_dest.numel(), SINK_ROW, sources.dest
                    ),
                ),
            ),
        ),
        "answers",
        "refused",
    ),
    Mutant(
        "a tag without its row",
        "The tag of a checkpoint's row is written and the row is not.",
        ("vLLM #53084",),
        (edit(CONVOLVE, WRITTEN, "pass"),),
        "answers",
        "conv stream",
    ),
    Mutant(
        "a row without its tag",
        "The rows of a checkpoint are written and their tags are not.",
        ("vLLM #53084",),
        (edit(CONVOLVE, TAGGED, "pass"),),
        "answers",
        "refused",
    ),
    Mutant(
        "checkpoint rows are in reverse order",
        "The rows of a checkpoint are kept newest first.",
        (),
        (
            edit(
                "kernels.torch_index:_entry_addresses",
                "dest = s.snapshot_origin + (snapshot + 1) * s.history + _history(s, row)",
                "dest = s.snapshot_origin + (snapshot + 1) * s.history + _history(s, row).flip(0)",
            ),
        ),
        "answers",
        "conv stream",
    ),
    Mutant(
        "a checkpoint takes the rows of another request",
        "Sources in the step are counted from the first row of the batch instead of the request's own.",
        ("sglang PR #37836",),
        (after_index(entries_of_the_first_row),),
        "hits",
        "conv stream",
    ),
    Mutant(
        "a checkpoint is one position late",
        "The rows of a checkpoint end with the boundary's own token.",
        ("vLLM PR #34587",),
        (
            edit(
                "kernels.torch_index:_entry_addresses",
                "position = f.entry_boundaries[:, None] + _history(s, row)",
                "position = f.entry_boundaries[:, None] + _history(s, row) + 1",
            ),
        ),
        "answers",
        "IndexError",
    ),
    # Resuming
    Mutant(
        "a hit starts from a zeroed conv window",
        "The rows before a resumed position are zeros.",
        (INCIDENT, "Mference PR #4"),
        (after_index(read_zeros),),
        "hits",
        "token_ids",
    ),
    Mutant(
        "only the first stream is restored",
        "Every other stream resumes from zeros, without a comparison.",
        ("vmlx-swift PR #210",),
        (
            define("models.hash", "_zeroed", zeroed),
            edit(
                "models.hash:HashModel.forward",
                "index.conv, sources)",
                "index.conv, _zeroed(sources, index.conv) if place.layer else sources)",
            ),
        ),
        "hits",
        "token_ids",
    ),
    Mutant(
        "a fresh request reads the former tenant",
        "The rows before a first token come from the slot's ring instead of being zeros.",
        ("sglang PR #24717", "vLLM PR #56524"),
        (after_index(read_former_tenant),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "resumed rows are not carried into the ring",
        "What a resumed row reads is not stored, so that after a short chunk the history has a hole.",
        ("vLLM PR #56196",),
        (after_index(do_not_store),),
        "hits",
        "damaged",
    ),
    Mutant(
        "a short chunk writes through its source",
        "After a hit, a chunk shorter than the history overwrites the rows of the checkpoint.",
        ("vLLM PR #56196", "vmlx #198"),
        (after_index(write_through_the_source),),
        "hits",
        "damaged",
    ),
    # The ring
    Mutant(
        "a ring is written before it is read",
        "The step's inputs go into the ring before entries and histories are read.",
        (),
        (
            edit(
                CONVOLVE, "rows = pool.rows.view(-1)", "rows = pool.rows.view(-1).index_copy_(0, sources.write_rows, x)"
            ),
        ),
        "answers",
        "group 0, layer 0",
    ),
    Mutant(
        "a ring is a row short",
        "A ring has one row less than a stop just before a page boundary needs.",
        ("vLLM PR #50272",),
        (
            edit(
                "state.layout:StateGeometry.ring_length",
                "+ self.page_size + 2 + 3 * self.max_drafts",
                "+ self.page_size - 2",
            ),
        ),
        "traffic",
        "refused",
    ),
    Mutant(
        "a ring takes the padding",
        "Padding tokens are written where the last row's tokens belong.",
        ("vLLM PR #37728",),
        (
            edit(
                "kernels.torch_index:_tokens",
                "torch.where(live, rows.slot[row], 0), position, tag, live)",
                "rows.slot[row], position, tag, torch.ones_like(live))",
            ),
        ),
        "answers",
        "token_ids",
    ),
    # Slots and pages
    Mutant(
        "a padding row has a live slot",
        "Padding rows carry the slot of the first row.",
        ("vLLM PR #37728", "vLLM #41841"),
        (wrap(FILL, pad_rows_with_a_live_slot),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a slot's length does not advance",
        "The device does not count the tokens of a step.",
        ("sglang PR #37505",),
        (wrap("kernels.sets:KernelSet.accept", do_not_count),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "the next token of another slot",
        "Drawn tokens are kept for the slots of other rows.",
        ("vLLM PR #53919",),
        (wrap("kernels.sets:KernelSet.accept", swap_kept_draws),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a page delta goes to the wrong group",
        "New pages are entered in the table of the group before.",
        (),
        (
            edit(
                "kernels.torch_index:_apply_page_deltas",
                "mine = f.delta_groups == g",
                "mine = f.delta_groups == (g + 1) % len(t.page_table)",
            ),
        ),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a window is one key short",
        "A query of a window of W sees W - 1 keys.",
        (),
        (edit(ATTEND, "last_unseen = index.positions - window", "last_unseen = index.positions - window + 1"),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a window is one key long",
        "A query of a window of W sees W + 1 keys.",
        ("sglang PR #37505",),
        (edit(ATTEND, "last_unseen = index.positions - window", "last_unseen = index.positions - window - 1"),),
        "answers",
        "token_ids",
    ),
    # Acknowledgement
    Mutant(
        "only the first stream is acknowledged",
        "A checkpoint counts as written when the first stream carries its tag.",
        ("vLLM #53084", "omlx #2536"),
        (edit(ACKNOWLEDGE, "pools.row_tags", "pools.row_tags[:1]"),),
        "losses",
        "published without",
    ),
    Mutant(
        "pages of one group are not compared",
        "Stamps of groups without a window are taken as they are.",
        ("vLLM #53084",),
        (
            edit(
                ACKNOWLEDGE,
                "list(pools.page_tags)",
                "[tags[: len(tags) if group.window else 0] for tags, group in zip(pools.page_tags, geometry.layout.groups)]",
            ),
        ),
        "losses",
        "published without",
    ),
    Mutant(
        "histories are not compared",
        "The rows that a batch row reads are taken to carry the right tags.",
        ("sglang #39830",),
        (after_index(believe_histories),),
        "losses",
        "token_ids",
    ),
    Mutant(
        "a copy hides a stale source",
        "A row that is copied into a checkpoint gets its tag whether or not its source had the right one.",
        ("vLLM #53084", INCIDENT),
        (edit(CONVOLVE, TAGGED, "pool.row_tags.index_copy_(0, sources.dest, sources.tags)"),),
        "losses",
        "token_ids",
    ),
]
