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
from samebit.kernels.values import INDEX_RESULTS, IndexFields, IndexSizes

SLOTS, PAGES, RING, HISTORY, PAGE = 6, 12, 9, 3, 4
SIZES = IndexSizes(HISTORY, RING, 2 - RING, 2 + SLOTS * RING - HISTORY, PAGE)
NUM_ROWS = 2 + SLOTS * RING + 5 * HISTORY


def random_plan(rng, lengths):
    """Prefill, decode from the slot's words, resume and publication, with entries and page deltas, and padding."""
    rows, entries, deltas, samples = [], [], [], []
    for number, slot in enumerate(rng.sample(range(1, SLOTS + 1), rng.randint(1, SLOTS))):
        kind = rng.choice(["prefill", "decode", "resume", "publish"])
        start = rng.randrange(0, 20) if kind == "prefill" else rng.randrange(1, 5) * PAGE
        start = lengths[slot] if kind in ("decode", "publish") else start
        count = {"prefill": rng.randint(1, 20), "decode": 1, "resume": rng.randint(1, 9), "publish": 0}[kind]
        ids = [] if kind in ("decode", "publish") else [rng.randrange(99) for _ in range(count)]
        resume = (rng.randint(1, 5), rng.getrandbits(62)) if kind == "resume" else (0, 0)
        rows.append(PlanRow(str(number), slot, rng.getrandbits(30), start, count, ids, *resume))
        first = max(PAGE, start - start % PAGE if kind == "publish" else start + 1)
        crossed = [boundary for boundary in range(first, start + count + 1) if boundary % PAGE == 0]
        entries += [CheckpointEntry(number, b, rng.randint(0, 5), rng.getrandbits(62)) for b in crossed]
        for index in range(start // PAGE, -(-(start + count) // PAGE)):
            deltas += [PageDelta(group, slot, index, rng.randint(1, 40), rng.getrandbits(60)) for group in (0, 1)]
        if count:
            target = rng.choice([DRAW, 7])
            samples.append(PlanSample(number, count - 1, target, 1.0, 0, 1.0, 0.0, 1, 0, 0))
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
    tables[3][:, 2 : 2 + SLOTS * RING] = tables[2][1:].reshape(-1)
    copies = [table.clone() for table in tables]
    results, expected = run(native, fields, tables), run(twin, fields, copies)
    names = [*INDEX_RESULTS, *("pages",) * (len(results) - len(INDEX_RESULTS))]
    for name, found, wanted in zip(names, results, expected, strict=True):
        assert torch.equal(found, wanted), name
    for table, copy in zip(tables, copies, strict=True):
        # Slot 0 takes what is unwanted.
        assert torch.equal(table[1:], copy[1:])


def test_devices_compute_the_tags_that_the_host_expects(kernels):
    plan = BatchPlan(41, [PlanRow("r", 2, 77, 5, 3, [1, 2, 3])], [], [], [])
    inputs = InputBuffer(Bucket.of(plan), torch.device("cpu")).fill(plan)
    fields = [getattr(inputs, name) for name in IndexFields._fields]
    results = run(kernels, fields, random_tables(random.Random(0), [0] * (SLOTS + 1)))
    tags = results[INDEX_RESULTS.index("token_tags")].tolist()
    assert tags == [position_tag(owner_tag(41, 77), position) for position in (5, 6, 7)]


def test_a_position_that_the_ring_has_left_behind_is_not_taken_for_the_one_in_its_place(kernels):
    # A publication at 8 of a sequence whose device length is 20: positions 5..7 were overwritten by 14..16.
    plan = BatchPlan(3, [PlanRow("r", 1, 5, 8, 0, [])], [], [CheckpointEntry(0, 8, 1, 99)], [])
    inputs = InputBuffer(Bucket.of(plan), torch.device("cpu")).fill(plan)
    fields = [getattr(inputs, name) for name in IndexFields._fields]
    for length, is_intact in ((8, True), (20, False)):
        tables = random_tables(random.Random(0), [0, length, *[0] * (SLOTS - 1)])
        tables[3][:, 2 : 2 + SLOTS * RING] = tables[2][1:].reshape(-1)
        results = run(kernels, fields, tables)
        assert results[INDEX_RESULTS.index("rows_intact")].tolist() == [is_intact]
