"""Compares the record of a run with the reference, value by value and bit by bit, and finds the first difference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samebit.audit.recording import WHOLE_ANSWER, Place, Record, Value, spell
from samebit.audit.state import StatePart
from samebit.audit.values import Counts, Difference

_ABSENT = Value("endings", "absent")


@dataclass(frozen=True, slots=True)
class ReferencePart:
    """Rows of one component by position: row `row_of[p]` of `rows` is position p's; -1 where there is none."""

    row_of: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Reference:
    """What every run of a request must show."""

    values: dict[Place, Value]
    state: dict[tuple[str, str], ReferencePart]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared. `num_unknown`: state rows that the reference does not have, which are not counted."""

    counts: Counts
    first: Difference | None
    num_unknown: int = 0


def make_reference(record: Record) -> Reference:
    """A reference of a solo cold run that published every page boundary."""
    state = {}
    for part in record.state:
        row_of = torch.full((max(part.positions) + 1,), -1, dtype=torch.int64)
        row_of[torch.tensor(part.positions)] = torch.arange(len(part.positions))
        state[part.layer, part.component] = ReferencePart(row_of, part.rows)
    return Reference(record.values, state)


def compare(name: str, reference: Reference, record: Record) -> Comparison:
    """All values and state rows of one run. The first difference is that of the lowest position.

    At one position the token and its logprobs come first, because the state there is computed from that token.
    """
    parts = [_compare_values(name, reference.values, record.values)]
    parts += [_compare_state(name, reference.state.get((p.layer, p.component)), p) for p in record.state]
    counts = Counts()
    for part in parts:
        counts += part.counts
    found = [part.first for part in parts if part.first is not None]
    return Comparison(counts, min(found, key=order, default=None), sum(part.num_unknown for part in parts))


def order(difference: Difference) -> int:
    """Sort key: by position, then as compared; what concerns the answer as a whole comes last."""
    return difference.position if difference.position != WHOLE_ANSWER else 1 << 62


def _compare_values(name: str, expected: dict[Place, Value], observed: dict[Place, Value]) -> Comparison:
    counts = {"tokens": 0, "logprobs": 0, "endings": 0}
    different: list[Difference] = []
    for place in expected | observed:
        want, got = expected.get(place, _ABSENT), observed.get(place, _ABSENT)
        counts[want.kind if place in expected else got.kind] += 1
        if want.text != got.text:
            different.append(
                Difference(
                    request=name,
                    position=place[0],
                    layer="",
                    component=place[1],
                    element=-1,
                    expected=want.text,
                    observed=got.text,
                )
            )
    return Comparison(Counts(**counts, mismatches=len(different)), min(different, key=order, default=None))


def _compare_state(name: str, reference: ReferencePart | None, part: StatePart) -> Comparison:
    positions = torch.tensor(part.positions)
    if reference is None:
        return Comparison(Counts(), None, len(positions))
    known = positions < len(reference.row_of)
    known[known.clone()] = reference.row_of[positions[known]] >= 0
    positions, rows = positions[known], part.rows[known]
    wanted = reference.rows[reference.row_of[positions]]
    differs = (_bits(rows) != _bits(wanted)).any(dim=1)
    counts = Counts(state_rows=len(positions), mismatches=int(differs.sum()))
    unknown = int((~known).sum())
    if not counts.mismatches:
        return Comparison(counts, None, unknown)
    where = differs.nonzero()[:, 0]
    row = int(where[positions[where].argmin()])
    unequal = (_bits(rows[row : row + 1]) != _bits(wanted[row : row + 1])).reshape(rows.shape[1], -1).any(dim=1)
    element = int(unequal.nonzero()[0, 0])
    first = Difference(
        request=name,
        position=int(positions[row]),
        layer=part.layer,
        component=part.component,
        element=element,
        expected=spell(wanted[row, element].item()),
        observed=spell(rows[row, element].item()),
    )
    return Comparison(counts, first, unknown)


def _bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)
