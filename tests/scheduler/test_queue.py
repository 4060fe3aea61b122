"""Who waits for whom: priorities go first, age outweighs them, and nobody starves."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.errors import InvalidRequestError
from samebit.core.request import Request, SamplingParams
from samebit.scheduler.queue import WaitingQueue
from samebit.scheduler.sequence import Sequence
from tests.fakes import VOCAB, make_geometry
from tests.scheduler.world import World

AGING = 10

arrivals = st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=1, max_size=30)


def sequence(name, priority=0, **fields):
    request = Request(
        request_id=str(name), prompt_token_ids=[1], params=SamplingParams(), seed=0, priority=priority, **fields
    )
    return Sequence(request=request, token_ids=[1], max_length=9, prompt_end=0)


def names(queue):
    return [item.request.request_id for item in queue]


def test_a_higher_priority_goes_first_and_equals_go_in_order():
    queue = WaitingQueue(AGING)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)):
        queue.add(sequence(name, priority), 1)
    assert names(queue) == ["b", "d", "a", "c", "e"]


def test_a_level_of_priority_is_worth_so_many_steps_and_no_more():
    queue = WaitingQueue(AGING)
    queue.add(sequence("old"), 5)
    queue.add(sequence("in time", 1), 5 + AGING - 1)
    queue.add(sequence("too late", 1), 5 + AGING)
    assert names(queue) == ["in time", "old", "too late"]


def test_what_was_preempted_comes_before_all_that_never_ran():
    queue = WaitingQueue(AGING)
    queue.add(sequence("urgent", 9), 1)
    for name in ("first", "second"):
        queue.add_first(sequence(name, -9))
    assert names(queue) == ["second", "first", "urgent"]


def test_a_shadow_comes_after_all_requests_even_if_it_was_preempted():
    queue = WaitingQueue(AGING)
    queue.add(sequence("shadow", 9, is_shadow=True), 1)
    queue.add(sequence("late", -9), 1000)
    assert (names(queue), queue.num_requests) == (["late", "shadow"], 1)
    shadow = next(item for item in queue if item.request.is_shadow)
    queue.remove(shadow)
    queue.add_first(shadow)
    assert names(queue) == ["late", "shadow"]


@given(arrivals, st.integers(1, 20))
def test_whoever_waits_is_overtaken_only_by_what_comes_in_time(gaps, aging):
    queue, step, arrived = WaitingQueue(aging), 0, {}
    for number, (gap, priority) in enumerate(gaps):
        step += gap
        arrived[str(number)] = step, priority
        queue.add(sequence(number, priority), step)
    order = names(queue)
    assert sorted(order, key=int) == list(arrived)
    for place, earlier in enumerate(order):
        for later in order[place + 1 :]:
            (step, priority), (other_step, other_priority) = arrived[earlier], arrived[later]
            if int(earlier) > int(later):
                assert step - other_step < (priority - other_priority) * aging


@given(arrivals, st.randoms(use_true_random=False))
def test_removal_leaves_the_others_in_order(gaps, rng):
    queue, members = WaitingQueue(AGING), []
    for number, (gap, priority) in enumerate(gaps):
        members.append(sequence(number, priority))
        (queue.add_first(members[-1]) if gap == 5 else queue.add(members[-1], gap))
    gone = rng.sample(members, rng.randint(0, len(members)))
    kept = [item for item in queue if item not in gone]
    for item in gone:
        queue.remove(item)
    assert list(queue) == kept
    assert len(queue) == len(kept)


@given(st.integers(0, 2**16), st.integers(1, 8))
def test_a_stream_of_urgent_requests_does_not_starve_a_patient_one(seed, aging):
    """One slot, and a new request of the highest priority in every step, for ever."""
    rng = random.Random(seed)
    world = World(make_geometry(num_slots=1), priority_aging_steps=aging)
    patient = world.add([1, 2, 3], priority=-2)
    for _ in range(60 + 4 * aging * 6):
        if patient.finish_reason is not None:
            return
        world.add(rng.choices(range(VOCAB), k=3), priority=rng.randint(0, 2), max_tokens=1)
        world.step()
    raise AssertionError("starved")


def test_the_urgent_request_runs_before_those_that_came_earlier():
    world = World(make_geometry(num_slots=1))
    ordinary = [world.add([1, 2, number]) for number in range(3)]
    urgent = world.add([3, 2, 1], priority=5)
    while urgent.finish_reason is None:
        world.step()
    assert [watched.finish_reason for watched in ordinary] == [None] * 3
    world.run()


@pytest.mark.parametrize("priority", [-1001, 1001, 2**40])
def test_a_priority_out_of_range_is_refused_by_name(priority):
    with pytest.raises(InvalidRequestError, match="priority=") as caught:
        World().add([1], priority=priority)
    assert caught.value.param == "priority"
