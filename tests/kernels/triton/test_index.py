"""Addresses of a step on a device: equal to the twin's, on plans with all kinds of rows at once and on random words."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.inputs import Bucket, InputBuffer
from samebit.kernels import torch_index
from samebit.kernels.triton import index
from samebit.kernels.values import INDEX_RESULTS, IndexFields, IndexSizes
from tests.kernels.test_index import DRAFTS, RING, SIZES, SLOTS, random_plan, random_tables


def on(device, tensors):
    return [x.to(device, copy=True) for x in tensors]


def check_step(device, fields, tables, sizes):
    """Both write the same results and, but for the inert slot, the same tables. Returns those results."""
    there, here = on(device, tables), on("cpu", tables)
    results = torch_index.index_results(on(device, fields), there, sizes)
    expected = torch_index.index_results(fields, here, sizes)
    index.step_index(on(device, fields), there, results, list(sizes))
    torch_index.step_index(fields, here, expected, list(sizes))
    names = [*INDEX_RESULTS, *("pages",) * (len(results) - len(INDEX_RESULTS))]
    for name, found, wanted in zip(names, results, expected, strict=True):
        assert torch.equal(found.cpu(), wanted), name
    for number, (table, copy) in enumerate(zip(there, here, strict=True)):
        assert torch.equal(table.cpu()[1:], copy[1:]), number
    return dict(zip(names, expected, strict=True))


def grouped(tables, groups):
    """The tables of a plan's two page groups, made those of ``groups``."""
    words, table, stamps = tables[:5], tables[5:7], tables[7:]
    take = [g % 2 for g in range(groups)]
    return [*words, *(table[g].clone() for g in take), *(stamps[g].clone() for g in take)]


@given(seed=st.integers(0, 2**32), groups=st.integers(2, 4))
def test_results_and_tables_are_those_of_the_twin(device, seed, groups):
    rng = random.Random(seed)
    lengths = [0, *(rng.randrange(1, 24) for _ in range(SLOTS))]
    plan = random_plan(rng, lengths)
    inputs = InputBuffer(Bucket.of(plan), torch.device("cpu")).fill(plan)
    tables = random_tables(rng, lengths)
    # Some rows are as they should be, so that both answers occur.
    tables[4][:, 2 : 2 + SLOTS * RING] = tables[3][1:].reshape(-1)
    # A slot's entry of both groups moves together, so that no entry is named twice: who would win is not defined.
    inputs.delta_groups[torch.arange(len(inputs.delta_groups)) // 2 % 3 == 0] += groups - 2
    fields = [getattr(inputs, name) for name in IndexFields._fields]
    found = check_step(device, fields, grouped(tables, groups), SIZES)
    check_acceptance(device, rng, inputs, found, tables)


def check_acceptance(device, rng, inputs, found, tables):
    drawn = torch.tensor([rng.randrange(3) for _ in range(len(inputs.sample_rows))], dtype=torch.int32)
    operands = (
        drawn, found["token_ids"] % 3, inputs.query_start, inputs.row_slots, found["row_start"], inputs.row_drafts,
        inputs.row_first_draw,
    )  # fmt: skip
    expected_words, words = on("cpu", tables[:2]), on(device, tables[:2])
    expected = torch_index.accept(*operands, *expected_words, DRAFTS)
    assert torch.equal(index.accept(*on(device, operands), *words, DRAFTS).cpu(), expected)
    for word, wanted in zip(words, expected_words, strict=True):
        assert torch.equal(word.cpu()[1:], wanted[1:])


def random_step(seed, *, rows, slots, tokens, streams=3, history=3, ring=23, page=16, drafts=2, entries=5, samples=7):
    """A step of any size in words that no plan would give: long rows, resumed or not, in any slot."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *shape, low=0, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    def wide(*shape):
        return integers(2**62, *shape, low=-(2**62), dtype=torch.int64)

    counts = integers(max(2, 2 * tokens // rows), rows)
    query_start = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)]).clamp(max=tokens)
    num_pages = 2 + (tokens + 200) // page
    continues = integers(2, rows)
    deltas = min(slots, 20)
    fields = IndexFields(
        query_start=query_start,
        token_ids=integers(999, tokens),
        row_slots=(torch.randperm(slots, generator=generator)[:rows] + 1).int(),
        row_continues=continues,
        row_resume=integers(4, rows) * (1 - continues),
        row_start=integers(150, rows, dtype=torch.int64),
        row_tags=wide(rows),
        row_resume_tag=wide(rows),
        entry_rows=integers(rows, entries),
        entry_snapshots=integers(4, entries),
        entry_boundaries=integers(150, entries, dtype=torch.int64),
        sample_rows=integers(rows, samples),
        sample_offsets=integers(9, samples),
        delta_groups=torch.zeros(deltas, dtype=torch.int32),
        delta_slots=(torch.randperm(slots, generator=generator)[:deltas] + 1).int(),
        delta_indices=integers(num_pages, deltas),
        delta_pages=integers(999, deltas),
        delta_stamps=wide(deltas),
    )
    sizes = IndexSizes(history, ring, 2, 2 + (slots + 1) * ring - history, page, drafts)
    num_rows = 2 + (slots + 1) * ring + 5 * history
    tables = [
        integers(150, slots + 1, dtype=torch.int64),
        integers(999, slots + 1),
        integers(999, slots + 1, drafts),
        wide(slots + 1, ring),
        wide(streams, num_rows),
        integers(999, slots + 1, num_pages),
        wide(slots + 1, num_pages),
    ]
    tables[4][:, 2 : 2 + (slots + 1) * ring] = tables[3].reshape(-1)
    return list(fields), tables, sizes


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    history=st.integers(0, 5),
    drafts=st.integers(0, 3),
    page=st.sampled_from([1, 3, 16]),
    entries=st.integers(0, 40),
)
def test_all_sizes_and_long_rows_are_those_of_the_twin(device, seed, rows, history, drafts, page, entries):
    step = random_step(
        seed,
        rows=rows,
        slots=9,
        tokens=70,
        history=history,
        ring=history + 9,
        page=page,
        drafts=drafts,
        entries=entries,
    )
    check_step(device, *step)


def test_more_batch_rows_than_are_searched_at_once(device):
    check_step(device, *random_step(3, rows=index.ROW_BLOCK + 30, slots=170, tokens=300, samples=200))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_large_steps_are_those_of_the_twin(device, seed):
    rows = (1, 64, 700, 1500)[seed % 4]
    step = random_step(
        seed,
        rows=rows,
        slots=1500,
        tokens=8192,
        streams=96,
        history=3,
        ring=41,
        drafts=seed % 5,
        entries=600,
        samples=2000,
    )
    check_step(device, *step)
