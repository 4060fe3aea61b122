"""Faults of the device side: inputs, addresses, state kernels, tags, recordings."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from samebit.kernels.native.build import host_isas, load_library
from samebit.kernels.values import INDEX_RESULTS, SINK_ROW, IndexFields
from samebit.runner.graphs import _Recorder, _Watch
from tests.mutants.edits import Mutant, define, edit, wrap

CONVOLVE, ATTEND = "models.hash:HashModel._convolve", "models.hash:HashModel._attend"
FILL = "inputs:InputBuffer.fill"
ACKNOWLEDGE = "indexing:acknowledge"


# What the wrappers below do


def after_index(change):
    """Change the addresses of a step once they have been computed: `change(fields, tables, results by name, sizes)`."""

    def wrapper(original, kernels, fields, tables, results, sizes):
        original(kernels, fields, tables, results, sizes)
        change(IndexFields(*fields), tables, dict(zip(INDEX_RESULTS, results, strict=False)), sizes)

    return wrap("kernels.sets:KernelSet.step_index", wrapper)


def read_zeros(fields, tables, found, sizes):
    resumes = fields.row_resume[:, None] > 0
    found["read_rows"].copy_(torch.where(resumes, 0, found["read_rows"]))
    found["read_tags"].copy_(torch.where(resumes, 0, found["read_tags"]))


def read_former_tenant(fields, tables, found, sizes):
    slot = fields.row_slots.long()[:, None]
    ring = sizes.ring_origin + slot * sizes.ring_length + torch.arange(sizes.history)
    fresh = (found["read_rows"] == 0) & (slot > 0)
    found["read_rows"].copy_(torch.where(fresh, ring.int(), found["read_rows"]))
    found["read_tags"].copy_(torch.where(fresh, tables[3][0][found["read_rows"].long()], found["read_tags"]))


def do_not_store(fields, tables, found, sizes):
    found["store_rows"].fill_(SINK_ROW)


def write_through_the_source(fields, tables, found, sizes):
    start, number = fields.query_start.long(), torch.arange(found["write_rows"].shape[0])
    row = torch.searchsorted(start[1:], number, right=True)
    live, row = row < fields.row_slots.shape[0], row.clamp(max=fields.row_slots.shape[0] - 1)
    short = live & (fields.row_resume[row] > 0) & (start.diff()[row] < sizes.history)
    source = found["read_rows"][row, (number - start[row]).clamp(0, sizes.history - 1)]
    found["write_rows"].copy_(torch.where(short, source, found["write_rows"]))


def entries_of_the_first_row(fields, tables, found, sizes):
    sources, first = found["entry_sources"], fields.query_start[fields.entry_rows.long()][:, None]
    sources.copy_(torch.where(sources >= 0, sources - first, sources))


def shift_sample_positions(fields, tables, found, sizes):
    found["sample_positions"].sub_(1)


def sample_the_token_before(fields, tables, found, sizes):
    found["sample_tokens"].sub_(1).clamp_(min=0)


def swap_kept_slots(fields, tables, found, sizes):
    found["sample_slots"].copy_(found["sample_slots"].flip(0))


def believe_histories(fields, tables, found, sizes):
    found["rows_intact"].fill_(True)


def drop_entries(condition):
    def wrapper(original, buffer, plan):
        view = original(buffer, plan)
        if condition(plan):
            for name in ("entry_rows", "entry_snapshots", "entry_boundaries", "entry_tags"):
                buffer._host[name].fill(0)
        return view

    return wrap(FILL, wrapper)


def is_mixed(plan) -> bool:
    decodes = [row.num_tokens == 1 for row in plan.rows if row.num_tokens]
    return any(decodes) and not all(decodes)


def pad_rows_with_a_live_slot(original, buffer, plan):
    view = original(buffer, plan)
    if plan.rows:
        buffer._host["row_slots"][len(plan.rows) :] = plan.rows[0].slot
    return view


def seeds_of_the_neighbour(original, buffer, plan):
    view = original(buffer, plan)
    seeds = buffer._host["sample_seeds"]
    seeds[: len(plan.samples)] = seeds[: len(plan.samples)][::-1].copy()
    return view


def zeroed(sources, pools):
    """No rows of checkpoints."""
    cached = sources.pool_rows >= pools.geometry.snapshot_base(1)
    return replace(
        sources,
        pool_rows=torch.where(cached, 0, sources.pool_rows),
        expected=torch.where(cached, 0, sources.expected),
    )


def call_c_directly(original, model, index, pools):
    swiglu = load_library(host_isas()[0]).functions.swiglu
    rows, out = torch.zeros(1, 32), torch.empty(1, 16)
    swiglu(*(ctypes.c_void_p(t.data_ptr()) for t in (rows, out)), 1, 16, 1)
    return original(model, index, pools)


def move_a_table(original, runner, plan):
    table = runner._pools.tables.length
    with torch.inference_mode():
        table.set_(table.clone())
    return original(runner, plan)


def drop_experts_when_crowded(original, kernels, x, expert_ids, weights, num_tokens, w):
    if x.shape[0] > 4:
        weights = weights.clone()
        weights[4:, 0] = 0
    return original(kernels, x, expert_ids, weights, num_tokens, w)


def normalise_the_batch(original, kernels, x, gain, eps):
    return original(kernels, x, gain, eps) + x.mean() * 1e-4


def fill_other_inputs(original, buffer, plan):
    """A bucket's inputs get a new place for each step."""
    fresh = type(buffer)(buffer.bucket, torch.device("cpu"))
    original(fresh, plan)
    buffer.view = fresh.view
    return fresh.view


# The list

INCIDENT = "sglang PR #34043"
WRITTEN = "rows.index_copy_(0, sources.dest, torch.where(sources.is_pooled, found, x[sources.tokens]))"
TAGGED = "pool.row_tags.index_copy_(0, sources.dest, sources.tags ^ stale)"

DEVICE_MUTANTS = [
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
            define("models.hash", "_is_live", lambda: not isinstance(_get_current_dispatch_mode(), _Recorder)),
            edit(CONVOLVE, WRITTEN, "_is_live() and " + WRITTEN),
        ),
        "graphs",
        "GraphError",
    ),
    Mutant(
        "padding is left stale",
        "A fill writes the live rows and leaves the rest of the bucket as the step before it did.",
        (INCIDENT, "vLLM #41841"),
        (
            edit(FILL, "self._staging.copy_(self._inert)", "pass"),
            edit(
                "inputs:InputBuffer._fill_rows",
                'host["query_start"].fill(plan.num_tokens)',
                'host["query_start"][len(plan.rows)] = plan.num_tokens',
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
                "index.conv, _zeroed(sources, pools) if place.layer else sources)",
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
                "+ self.page_size + 2 * (1 + self.max_drafts)",
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
        "IndexError",
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
        (edit("kernels.torch_index:_record_writes", "= rows.start + f.query_start.diff()", "= rows.start"),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "the next token of another slot",
        "Drawn tokens are kept for the slots of other rows.",
        ("vLLM PR #53919",),
        (after_index(swap_kept_slots),),
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
        (edit(ACKNOWLEDGE, "written.all(dim=2).all(dim=0)", "written.all(dim=2)[0]"),),
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
                "pages_intact &= (same | outside).all(dim=1)",
                "pages_intact &= (same | outside).all(dim=1) | (group.window is None)",
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
    # Samples
    Mutant(
        "a sample is one position early",
        "Noise is that of the position before the token to draw.",
        (),
        (after_index(shift_sample_positions),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "a sample is drawn from the token before",
        "Logits rows take the hidden state one token early.",
        (),
        (after_index(sample_the_token_before),),
        "answers",
        "prompt_logprobs",
    ),
    Mutant(
        "the seed of a neighbour",
        "Seeds are in the order of another batch.",
        ("vLLM PR #53919",),
        (wrap(FILL, seeds_of_the_neighbour),),
        "answers",
        "token_ids",
    ),
    Mutant(
        "bans of another sample",
        "Tokens that are barred for one request are barred for the one after it.",
        (),
        (
            edit(
                FILL,
                "bans = [(number, token, BANNED_LOGIT)",
                "bans = [((number + 1) % len(plan.samples), token, BANNED_LOGIT)",
            ),
        ),
        "answers",
        "token_ids",
    ),
    Mutant(
        "logprobs of another row",
        "The likeliest tokens of a step come back in reverse order of rows.",
        (),
        (
            edit(
                "runner.runner:_read_back",
                "result.top_ids, result.top_logprobs)",
                "result.top_ids, result.top_logprobs[: len(plan.samples)].flip(0))",
            ),
        ),
        "answers",
        "prompt_logprobs",
    ),
    # Recordings
    Mutant(
        "a buffer moves after capture",
        "A table gets a new place with each step, also after steps have been recorded.",
        ("vLLM PR #55341",),
        (wrap("runner.runner:LocalRunner.execute", move_a_table),),
        "graphs",
        "GraphError",
    ),
    Mutant(
        "replays read the inputs of the capture",
        "Each step fills new inputs, which the recording does not know.",
        ("sglang #37606",),
        (wrap(FILL, fill_other_inputs),),
        "graphs",
        "token_ids",
    ),
    Mutant(
        "a kernel runs outside the dispatcher",
        "A native kernel is called directly, so that a recording holds no trace of it.",
        (INCIDENT,),
        (wrap("models.hash:HashModel.forward", call_c_directly),),
        "graphs",
        "GraphError",
    ),
    Mutant(
        "a value is read by the host",
        "The forward pass asks how many tokens are live.",
        ("vLLM #49918",),
        (
            edit(
                "models.hash:HashModel.forward",
                "return x[:, None]",
                "return x[:, None] * (1 if index.num_tokens > 0 else 1)",
            ),
        ),
        "graphs",
        "GraphError",
    ),
    # Kernels
    Mutant(
        "experts have a capacity",
        "In a crowded step, later tokens lose an expert.",
        (),
        (wrap("kernels.sets:KernelSet.moe", drop_experts_when_crowded),),
        "weights",
        "bits differ",
    ),
    Mutant(
        "a norm knows its neighbours",
        "A row's normalisation depends, slightly, on the rows beside it.",
        (),
        (wrap("kernels.sets:KernelSet.rms_norm", normalise_the_batch),),
        "weights",
        "bits differ",
    ),
]
