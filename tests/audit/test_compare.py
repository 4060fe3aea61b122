"""The comparison: one changed bit, anywhere in a record, is found and named."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebit.audit.compare import compare, make_reference
from samebit.audit.recording import Record, Value, spell
from samebit.audit.state import StatePart

floats = st.floats(width=32)
places = st.tuples(st.integers(0, 40), st.sampled_from(["token", "logprob", "rank", "top logprob 1"]))


def flip(number, bit):
    (word,) = struct.unpack("<I", struct.pack("<f", number))
    return struct.unpack("<f", struct.pack("<I", word ^ (1 << bit)))[0]


def a_record(values=(), state=()):
    return Record(values=dict(values), num_cached=0, num_preemptions=0, was_batched=False, state=list(state))


@st.composite
def parts(draw):
    """A few components, whose rows are bits of every kind, at positions in any order."""
    found = []
    for layer in range(draw(st.integers(1, 3))):
        positions = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True))
        words = draw(
            st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3 * len(positions), max_size=3 * len(positions))
        )
        rows = torch.tensor(words, dtype=torch.int32).reshape(-1, 3).view(torch.float32)
        found.append(StatePart(f"layers.{layer}", "k", positions, rows))
    return found


@given(parts())
def test_equal_state_is_equal_and_counted(state):
    comparison = compare("r", make_reference(a_record(state=state)), a_record(state=state))
    assert comparison.counts.state_rows == sum(len(part.positions) for part in state)
    assert (comparison.counts.mismatches, comparison.first, comparison.num_unknown) == (0, None, 0)


@given(parts(), st.data())
def test_a_changed_bit_of_state_is_named(state, data):
    which = data.draw(st.integers(0, len(state) - 1))
    part = state[which]
    row = data.draw(st.integers(0, len(part.positions) - 1))
    element, bit = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 31))
    rows = part.rows.clone()
    rows.view(torch.int32)[row, element] ^= -(2**31) if bit == 31 else 1 << bit
    changed = [*state[:which], StatePart(part.layer, part.component, part.positions, rows), *state[which + 1 :]]
    comparison = compare("r", make_reference(a_record(state=state)), a_record(state=changed))
    first = comparison.first
    assert comparison.counts.mismatches == 1
    assert (first.layer, first.position, first.element) == (part.layer, part.positions[row], element)


@given(st.dictionaries(places, floats, min_size=1), st.data())
def test_a_changed_value_is_named(numbers, data):
    place = data.draw(st.sampled_from(sorted(numbers)))
    changed = numbers | {place: flip(numbers[place], data.draw(st.integers(0, 22)))}
    expected, observed = (
        a_record({key: Value("logprobs", spell(value)) for key, value in each.items()}) for each in (numbers, changed)
    )
    comparison = compare("r", make_reference(expected), observed)
    # NaN is one value, whatever its payload: JSON and Python's float.hex do not tell them apart.
    if numbers[place] != numbers[place] and changed[place] != changed[place]:
        return
    assert comparison.counts.logprobs == len(numbers)
    assert comparison.counts.mismatches == 1
    assert (comparison.first.position, comparison.first.component) == place


def test_zeros_of_different_sign_differ_and_nan_equals_itself():
    assert spell(0.0) != spell(-0.0)
    assert spell(float("nan")) == spell(float("nan"))


@pytest.mark.parametrize("extra_in", ["expected", "observed"])
def test_a_value_that_only_one_side_has_is_a_difference(extra_in):
    short, long = (
        a_record({(3, "token"): Value("tokens", "1")}),
        a_record({(3, "token"): Value("tokens", "1"), (4, "token"): Value("tokens", "2")}),
    )
    expected, observed = (long, short) if extra_in == "expected" else (short, long)
    comparison = compare("r", make_reference(expected), observed)
    assert comparison.counts.mismatches == 1
    assert comparison.counts.tokens == 2
    assert comparison.first.position == 4
    assert "absent" in (comparison.first.expected, comparison.first.observed)


def test_the_lowest_position_comes_first_and_a_token_before_the_state_that_it_makes():
    def record(token, row, text="'a'"):
        values = {(5, "token"): Value("tokens", token), (-1, "text"): Value("endings", text)}
        return a_record(values, [StatePart("layers.0", "k", [4, 5], torch.tensor([[1.0], [row]]))])

    reference = make_reference(record("1", 1.0))
    assert compare("r", reference, record("2", 2.0)).first.component == "token"
    assert compare("r", reference, record("1", 2.0, "'b'")).first.component == "k"
    assert compare("r", reference, record("1", 1.0, "'b'")).first.component == "text"


def test_the_lowest_of_several_rows_comes_first():
    reference = make_reference(a_record(state=[StatePart("layers.0", "k", [5, 2, 9], torch.ones(3, 1))]))
    changed = a_record(state=[StatePart("layers.0", "k", [9, 5, 2], torch.tensor([[2.0], [1.0], [3.0]]))])
    comparison = compare("r", reference, changed)
    assert comparison.counts.mismatches == 2
    assert (comparison.first.position, comparison.first.observed) == (2, spell(3.0))


def test_state_without_a_reference_is_not_counted_as_equal():
    known = StatePart("layers.0", "k", [0, 1, 4], torch.ones(3, 1))
    other = StatePart("layers.0", "k", [1, 7, 3], torch.ones(3, 1))
    comparison = compare("r", make_reference(a_record(state=[known])), a_record(state=[other]))
    assert (comparison.counts.state_rows, comparison.num_unknown) == (1, 2)
    foreign = StatePart("layers.9", "k", [0], torch.ones(1, 1))
    assert compare("r", make_reference(a_record(state=[known])), a_record(state=[foreign])).num_unknown == 1
