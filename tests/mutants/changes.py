"""What faults of the device side change: addresses of a step, its inputs, the rows it reads, calls of kernels."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from samebit.kernels.native.build import host_isas, load_library
from samebit.kernels.values import INDEX_RESULTS, INDEX_TABLES, SINK_ROW, IndexFields
from samebit.runner.graphs import _Recorder
from tests.mutants.edits import wrap

FILL = "inputs:InputBuffer.fill"


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
    found["read_tags"].copy_(
        torch.where(fresh, tables[INDEX_TABLES.index("row_tags")][0][found["read_rows"].long()], found["read_tags"])
    )


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


def swap_kept_draws(original, kernels, drawn, index, length, next_token, max_drafts):
    """What rows drew is kept for each other's slots."""
    drawing = index.row_first_draw >= 0
    swapped = index.row_slots.clone()
    swapped[drawing] = index.row_slots[drawing].flip(0)
    lengths = length.clone()
    original(kernels, drawn, replace(index, row_slots=swapped), lengths, next_token, max_drafts)
    return original(kernels, drawn, index, length, next_token.clone(), max_drafts)


def do_not_count(original, kernels, drawn, index, length, next_token, max_drafts):
    original(kernels, drawn, index, length.clone(), next_token, max_drafts)
    length[index.row_slots.long()] = index.row_start.long()
    return torch.zeros_like(index.row_slots)


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
    seeds[: plan.num_samples] = seeds[: plan.num_samples][::-1].copy()
    return view


def zeroed(sources, conv):
    """No rows of checkpoints: those that are stored as well."""
    cached = torch.cat([torch.zeros_like(conv.entry_dest, dtype=torch.bool).flatten(), (conv.store_rows > 1).flatten()])
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


def is_recording() -> bool:
    """Whether operations are kept for later, and not just done."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return isinstance(_get_current_dispatch_mode(), _Recorder)


def move_a_table(original, runner, plan):
    table = runner._pools.tables.length
    with torch.inference_mode():
        table.set_(table.clone())
    return original(runner, plan)


def drop_experts_when_crowded(original, kernels, x, logits, *others):
    if x.shape[0] > 4:
        logits = logits.clone()
        logits[0, 4:, 0] = -80
    return original(kernels, x, logits, *others)


def normalise_the_batch(original, kernels, x, gain, eps):
    return original(kernels, x, gain, eps) + x.mean() * 1e-4


def fill_other_inputs(original, buffer, plan):
    """A bucket's inputs get a new place for each step."""
    fresh = type(buffer)(buffer.bucket, buffer.view.token_ids.device)
    original(fresh, plan)
    buffer.view = fresh.view
    return fresh.view
