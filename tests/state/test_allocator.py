"""Id pools: quarantine, references, and a check that sees every kind of wrong count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.plan import PageId
from samebit.state.allocator import IdPool


def make_pool(count: int = 4, **options) -> IdPool[PageId]:
    return IdPool("pages", [PageId(i + 1) for i in range(count)], **options)


def test_a_freed_id_waits_for_the_step_that_may_touch_it():
    pool = make_pool(1)
    taken = pool.take()
    pool.drop(taken, last_step=3)
    assert (pool.num_free, pool.num_quarantined, pool.take()) == (0, 1, None)
    pool.retire(2)
    assert pool.take() is None
    assert pool.take_newly_free() == []
    pool.retire(3)
    assert pool.take_newly_free() == [taken]
    assert pool.take_newly_free() == []
    assert pool.take() == taken


def test_an_id_that_no_step_touches_any_more_is_free_at_once():
    pool = make_pool(1)
    taken = pool.take()
    pool.retire(3)
    pool.drop(taken, last_step=3)
    assert pool.take() == taken


def test_a_shared_id_is_free_after_its_last_reference():
    pool = make_pool(1)
    taken = pool.take()
    pool.share(taken)
    pool.drop(taken, last_step=0)
    assert (pool.num_used, pool.num_free) == (1, 0)
    pool.drop(taken, last_step=0)
    assert (pool.num_used, pool.num_free) == (0, 1)


@pytest.mark.parametrize("operation", ["share", "drop"])
def test_an_id_without_an_owner_cannot_be_shared_or_freed_again(operation):
    pool = make_pool(2)
    taken = pool.take()
    pool.drop(taken, last_step=0)
    with pytest.raises(KeyError):
        pool.share(taken) if operation == "share" else pool.drop(taken, 0)


def test_zero_is_never_given_out():
    pool = make_pool(5, order_seed=1)
    assert sorted(pool.take() for _ in range(5)) == [1, 2, 3, 4, 5]
    assert pool.take() is None


def test_the_order_seed_changes_the_order_and_nothing_else():
    orders = {tuple(pool.take() for _ in range(9)) for pool in (make_pool(9, order_seed=s) for s in range(5))}
    assert len(orders) == 5
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(1, 10))}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "free list twice"),
        (lambda pool: pool._free.append(next(iter(pool._references))), "two owners"),
        (lambda pool: pool._quarantine.append((9, pool._free[0])), "two owners"),
        (lambda pool: pool._free.popleft(), "lost"),
        (lambda pool: pool._references.clear(), "lost"),
        (lambda pool: (pool._free.popleft(), pool._free.append(PageId(0))), "reserved"),
        (lambda pool: pool._others.update({PageId(3): 1}), "a free id has an owner"),
    ],
    ids=[
        "free twice",
        "free and used",
        "free and waiting",
        "lost from free",
        "lost from used",
        "reserved",
        "free and owned",
    ],
)
def test_the_check_names_what_is_wrong(spoil, message):
    pool = make_pool(4)
    pool.take()
    pool.check()
    spoil(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()


@given(
    st.lists(st.tuples(st.sampled_from(["take", "share", "keep", "drop", "retire"]), st.integers(0, 7)), max_size=80)
)
def test_no_history_loses_an_id_or_frees_it_too_early(history):
    # Who refers to an id: the cache (True) or another.
    pool, step, held, waiting = make_pool(4, order_seed=0), 1, list[tuple[int, bool]](), dict[int, int]()

    def used():
        return [taken for taken, _ in held]

    for operation, number in history:
        if operation == "take" and (taken := pool.take()) is not None:
            assert taken not in used()
            assert taken not in waiting
            held.append((taken, False))
        elif operation in ("share", "keep") and held:
            held.append((held[number % len(held)][0], operation == "keep"))
            pool.share(held[-1][0], kept=held[-1][1])
        elif operation == "drop" and held:
            gone, is_kept = held.pop(number % len(held))
            pool.drop(gone, last_step=step, kept=is_kept)
            if gone not in used():
                waiting[gone] = step
        elif operation == "retire":
            pool.retire(step)
            waiting.clear()
            step += 1
        pool.check()
        assert pool.num_used == len(set(used()))
        assert pool.num_kept_only == len(set(used()) - {taken for taken, is_kept in held if not is_kept})
        assert pool.num_quarantined == len(waiting)
        assert pool.references() == {taken: used().count(taken) for taken in used()}
