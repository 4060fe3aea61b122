"""Addresses of a step: every set against the twin, on plans with all kinds of rows at once."""

import random

import pytest
import torch

from samebit.core.plan import (
    DRAW,
    BatchPlan,
    CheckpointEntry,
    PageDelta,
    PlanRow,
    PlanSample,
    owner_tag,
    position_tag,
)
from samebit.inputs import Bucket, InputBuffer
from samebit.kernels.torch_index import index_results
from samebit.kernels.values import INDEX_RESULTS, DraftIndex, IndexFields, IndexSizes

SLOTS, PAGES, RING, HISTORY, PAGE, DRAFTS = 6, 12, 11, 3, 4, 3
SIZES = IndexSizes(HISTORY, RING, 2 - RING, 2 + SLOTS * RING - HISTORY, PAGE, DRAFTS)
NUM_ROWS = 2 + SLOTS * RING + 5 * HISTORY


def random_plan(rng, lengths):
    """Prefill, decode and drafts, given or from the slot's words, resume and publication, with entries, page deltas and padding."""
    rows, entries, deltas, samples = [], [], [], []
    for number, slot in enumerate(rng.sample(range(1, SLOTS + 1), rng.randint(1, SLOTS))):
        kind = rng.choice(["prefill", "decode", "guess", "resume", "publish"])
        num_drafts = rng.randint(0, DRAFTS) if kind in ("decode", "guess") else 0
        start = rng.randrange(0, 20) if kind == "prefill" else rng.randrange(1, 5) * PAGE
        start = lengths[slot] if kind in ("decode", "guess", "publish") else start
        count = {"prefill": rng.randint(1, 20), "resume": rng.randint(1, 9), "publish": 0}.get(kind, 1 + num_drafts)
        ids = [] if kind in ("decode", "publish") else [rng.randrange(99) for _ in range(count)]
        resume = (rng.randint(1, 5), rng.getrandbits(62)) if kind == "resume" else (0, 0)
        rows.append(PlanRow(str(number), slot, rng.getrandbits(30), start, count, ids, *resume, num_drafts))
        first = max(PAGE, start - start % PAGE if kind == "publish" else start + 1)
        crossed = [boundary for boundary in range(first, start + count + 1) if boundary % PAGE == 0]
        entries += [CheckpointEntry(number, b, rng.randint(0, 5), rng.getrandbits(62)) for b in crossed]
        for index in range(start // PAGE, -(-(start + count) // PAGE)):
            deltas += [PageDelta(group, slot, index, rng.randint(1, 40), rng.getrandbits(60)) for group in (0, 1)]
        if count:
            targets = [7] * rng.randint(0, 2) + [DRAW] * (1 + num_drafts)
            offsets = range(count - 1 - num_drafts, count)
            offsets = [0] * (len(targets) - len(offsets)) + [*offsets]
            if not num_drafts and rng.random() < 0.3:
                targets, offsets = [7], [0]
            for target, offset in zip(targets, offsets, strict=True):
                samples.append(PlanSample(number, offset, target, 1.0, 0, 1.0, 0.0, 1, 0, 0))
    return BatchPlan(
        rng.randint(1, 1000),
        rows,
        samples,
        entries,
        deltas,
        pad_tokens=rng.randint(0, 3),
        pad_rows=rng.randint(0, 2),
    )


def random_tables(rng, lengths):
    generator = torch.Generator().manual_seed(rng.getrandbits(30))

    def integers(*shape, high=2**60, dtype=torch.int64):
        return torch.randint(0, high, shape, generator=generator, dtype=dtype)

    return [
        torch.tensor(lengths),
        integers(SLOTS + 1, high=99, dtype=torch.int32),
        integers(SLOTS + 1, DRAFTS, high=3, dtype=torch.int32),
        integers(SLOTS + 1, RING),
        integers(2, NUM_ROWS),
        *(integers(SLOTS + 1, PAGES, high=40, dtype=torch.int32) for _ in range(2)),
        *(integers(SLOTS + 1, PAGES) for _ in range(2)),
    ]


def run(kernels, fields, tables):
    results = index_results(fields, tables, SIZES)
    kernels.step_index(fields, tables, results, SIZES)
    return results


@pytest.mark.parametrize("seed", range(40))
def test_every_set_finds_the_addresses_of_the_twin(native, twin, seed):
    rng = random.Random(seed)
    lengths = [0, *(rng.randrange(1, 24) for _ in range(SLOTS))]
    plan = random_plan(rng, lengths)
    inputs = InputBuffer(Bucket.of(plan), torch.device("cpu")).fill(plan)
    fields = [getattr(inputs, name) for name in IndexFields._fields]
    tables = random_tables(rng, lengths)
    # Some rows are as they should be, so that both answers occur.
    tables[4][:, 2 : 2 + SLOTS * RING] = tables[3][1:].reshape(-1)
    copies = [table.clone() for table in tables]
    results, expected = run(native, fields, tables), run(twin, fields, copies)
    names = [*INDEX_RESULTS, *("pages",) * (len(results) - len(INDEX_RESULTS))]
    for name, found, wanted in zip(names, results, expected, strict=True):
        assert torch.equal(found, wanted), name
    for table, copy in zip(tables, copies, strict=True):
        # Slot 0 takes what is unwanted.
        assert torch.equal(table[1:], copy[1:])
    check_acceptance(rng, inputs, dict(zip(names, results, strict=False)), tables, native, twin)


def check_acceptance(rng, inputs, found, tables, native, twin):
    """Both sets accept the same drafts as a loop over the rows does."""
    names = ("query_start", "row_slots", "row_drafts", "row_first_draw")
    index = DraftIndex(
        token_ids=found["token_ids"], row_start=found["row_start"], **{name: getattr(inputs, name) for name in names}
    )
    ids, firsts = found["token_ids"].tolist(), inputs.row_first_draw.tolist()
    drawn = torch.tensor([rng.randrange(3) for _ in range(len(inputs.sample_rows))], dtype=torch.int32)
    expected, lengths, lasts = [], tables[0].clone(), tables[1].clone()
    for row, slot in enumerate(inputs.row_slots.tolist()):
        begin, end = inputs.query_start[row : row + 2].tolist()
        first_guess = end - int(inputs.row_drafts[row])
        same = [ids[t] == int(drawn[firsts[row] + t - first_guess]) for t in range(first_guess, end)]
        count = (*same, False).index(False)
        expected.append(count)
        lengths[slot] = int(found["row_start"][row]) + first_guess - begin + count
        if firsts[row] >= 0:
            lasts[slot] = drawn[firsts[row] + count]
    for kernels in (native, twin):
        length, last = tables[0].clone(), tables[1].clone()
        assert kernels.accept(drawn, index, length, last, DRAFTS).tolist() == expected
        assert torch.equal(length[1:], lengths[1:])
        assert torch.equal(last[1:], lasts[1:])


def test_devices_compute_the_tags_that_the_host_expects(kernels):
    plan = BatchPlan(41, [PlanRow("r", 2, 77, 5, 3, [1, 2, 3])], [], [], [])
    inputs = InputBuffer(Bucket.of(plan), torch.device("cpu")).fill(plan)
    fields = [getattr(inputs, name) for name in IndexFields._fields]
    results = run(kernels, fields, random_tables(random.Random(0), [0] * (SLOTS + 1)))
    tags = results[INDEX_RESULTS.index("token_tags")].tolist()
    assert tags == [position_tag(owner_tag(41, 77), position) for position in (5, 6, 7)]


def test_a_position_that_the_ring_has_left_behind_is_not_taken_for_the_one_in_its_place(kernels):
    # A publication at 8 of a sequence whose device length is 20: positions 5..7 were overwritten by 16..18.
    plan = BatchPlan(3, [PlanRow("r", 1, 5, 8, 0, [])], [], [CheckpointEntry(0, 8, 1, 99)], [])
    inputs = InputBuffer(Bucket.of(plan), torch.device("cpu")).fill(plan)
    fields = [getattr(inputs, name) for name in IndexFields._fields]
    for length, is_intact in ((8, True), (20, False)):
        tables = random_tables(random.Random(0), [0, length, *[0] * (SLOTS - 1)])
        tables[4][:, 2 : 2 + SLOTS * RING] = tables[3][1:].reshape(-1)
        results = run(kernels, fields, tables)
        assert results[INDEX_RESULTS.index("rows_intact")].tolist() == [is_intact]
