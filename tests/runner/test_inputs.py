"""What a plan says is in the fields of its bucket, each number in its place, and nothing is left of the plan before."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.plan import DRAW, BatchPlan, CheckpointEntry, PageDelta, PlanDraft, PlanRow, PlanSample, owner_tag
from samebit.inputs import Bucket, InputBuffer, StaticInputs, owner_tags
from tests.fakes import logits_rows

CPU = torch.device("cpu")
small, wide = st.integers(0, 1 << 20), st.integers(-(1 << 63), (1 << 63) - 1)
shares = st.floats(0, 1, width=32)
entries = st.builds(CheckpointEntry, row=small, boundary=small, snapshot=small, tag=wide)
deltas = st.builds(PageDelta, group=small, slot=small, index=small, page=small, stamp=wide)


@st.composite
def plans(draw):
    """Steps of a few rows with any numbers, some of which draw, score, continue or guess."""
    rows, samples = [], []
    for number in range(draw(st.integers(0, 5))):
        count = draw(st.integers(0, 4))
        ids = draw(st.sampled_from([[], draw(st.lists(small, min_size=count, max_size=count))]))
        slot, owner, start, resume = (draw(small) for _ in range(4))
        rows.append(PlanRow("r", slot, owner, start, count, ids, resume, draw(wide), draw(st.integers(0, 3))))
        for target in draw(st.lists(st.sampled_from([DRAW, 7]), max_size=3)):
            settings = (draw(shares), draw(small), draw(shares), draw(shares), draw(wide), draw(small))
            draws = draw(st.integers(1, 3)) if target == DRAW else 1
            samples.append(PlanSample(number, draw(small), target, *settings, num_top=0, count=draws))
    drawing = sorted({sample.row for sample in samples if sample.target == DRAW})
    drafts = [PlanDraft(row, draw(small)) for row in drawing if draw(st.booleans())]
    step = draw(small)
    return BatchPlan(step, rows, samples, draw(st.lists(entries)), draw(st.lists(deltas)), drafts=drafts)


def filled(buffer, plan):
    view = buffer.fill(plan)
    return {field.name: getattr(view, field.name).clone() for field in fields(StaticInputs)}


@given(small, st.lists(st.integers(0, (1 << 63) - 1), max_size=9))
def test_tags_of_many_owners_are_those_of_each(step, owners):
    assert owner_tags(step, owners).tolist() == [owner_tag(step, owner) for owner in owners]


NAMES = {
    "samples": "rows:row offsets:offset targets:target temperature:temperature top_k:top_k top_p:top_p min_p:min_p seeds:seed "
    "indices:sample_index",
    "entries": "rows:row boundaries:boundary snapshots:snapshot tags:tag",
    "page_deltas": "groups:group slots:slot indices:index pages:page stamps:stamp",
    "rows": "slots:slot drafts:num_drafts start:start resume:resume_snapshot resume_tag:resume_tag",
}
AXES = {"samples": "sample", "entries": "entry", "page_deltas": "delta", "rows": "row"}


@given(plans())
def test_each_number_of_a_plan_is_in_the_field_of_its_name(plan):
    found = filled(InputBuffer(Bucket.of(plan), CPU), plan)
    plan = msgspec.structs.replace(plan, samples=logits_rows(plan))
    for items, names in NAMES.items():
        for suffix, name in (pair.split(":") for pair in names.split()):
            wanted = [getattr(item, name) for item in getattr(plan, items)]
            assert found[f"{AXES[items]}_{suffix}"][: len(wanted)].tolist() == wanted, (items, name)


@given(plans())
def test_what_follows_from_a_plan_is_in_its_fields(plan):
    found = filled(InputBuffer(Bucket.of(plan), CPU), plan)
    start = 0
    for number, row in enumerate(plan.rows):
        assert found["query_start"][number : number + 2].tolist() == [start, start + row.num_tokens]
        if row.token_ids:
            assert found["token_ids"][start : start + row.num_tokens].tolist() == row.token_ids
        assert found["row_continues"][number] == (row.num_tokens > 0 and not row.token_ids)
        assert found["row_tags"][number] == owner_tag(plan.step, row.owner)
        draws = [i for i, sample in enumerate(logits_rows(plan)) if sample.row == number and sample.target == DRAW]
        assert found["row_first_draw"][number] == (draws or [-1])[0]
        start += row.num_tokens
    for number, draft in enumerate(plan.drafts):
        row = plan.rows[draft.row]
        assert found["draft_slots"][number] == row.slot
        assert found["draft_samples"][number] == found["row_first_draw"][draft.row]
        assert found["draft_limits"][number] == draft.limit
        assert found["draft_tags"][number] == owner_tag(plan.step, row.owner ^ (1 << 60))


@given(plans(), plans())
def test_nothing_is_left_of_the_plan_before(first, second):
    sizes = [Bucket.of(first), Bucket.of(second)]
    bucket = Bucket(*map(max, *sizes))
    used = InputBuffer(bucket, CPU)
    used.fill(first)
    again, fresh = filled(used, second), filled(InputBuffer(bucket, CPU), second)
    for name, values in again.items():
        assert torch.equal(values, fresh[name]), name
