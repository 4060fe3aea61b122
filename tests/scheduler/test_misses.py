"""Why a prompt found nothing in the cache; and that tenants share nothing in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import make_geometry
from tests.scheduler.world import World

PAGE = 4
PROMPT = list(range(2, 2 + 3 * PAGE))


def reason_of(world, watched):
    return world.reasons[watched.request.request_id]


def asked(world, prompt=PROMPT, **fields):
    return reason_of(world, world.ask(prompt, **fields))


def test_the_first_of_its_kind_is_cold_and_the_second_is_no_miss():
    world = World()
    assert asked(world) == "cold"
    watched = world.ask(PROMPT)
    assert watched.num_cached_tokens
    assert reason_of(world, watched) is None
    assert dict(world.counters.misses) == {"cold": 1}
    assert world.counters.totals()["misses_cold"] == 1


def test_a_prompt_without_a_full_page_before_its_last_token():
    world = World()
    assert asked(world, PROMPT[:PAGE]) == "shorter_than_page"
    assert asked(world, PROMPT[PAGE : 2 * PAGE + 1]) == "cold"


def test_tokens_that_must_be_scored_cannot_come_from_the_cache():
    world = World()
    world.ask(PROMPT)
    assert asked(world, prompt_logprobs=0) == "prompt_logprobs"


def test_a_tenant_that_has_nothing_is_told_so_and_not_what_others_have():
    world = World()
    world.ask(PROMPT)
    assert asked(world, salt="tenant") == "salt"
    assert asked(world, PROMPT[::-1], salt="tenant") == "cold", "its own prefixes are there now"
    assert asked(world, PROMPT[1:]) == "cold"


def test_what_was_evicted_is_remembered_until_the_cache_is_emptied():
    world = World(make_geometry(num_snapshots=1))
    world.ask(PROMPT)
    world.ask(PROMPT[::-1])
    assert asked(world) == "evicted"
    assert asked(world, PROMPT, salt="tenant") == "salt"
    world.manager.drop_all_checkpoints()
    assert asked(world) == "cold"


def test_a_prompt_that_leaves_a_path_before_its_first_checkpoint_is_told_so():
    world = World(interval=64)
    world.ask(PROMPT)
    assert asked(world, [*PROMPT[:PAGE], 0, 1, 2, 3]) == "no_checkpoint"


def test_a_path_whose_checkpoint_had_to_go_lacks_its_window():
    world = World(interval=64)
    short, long = PROMPT[: PAGE + 1], PROMPT
    world.ask(short)
    world.ask(long)
    manager = world.manager
    (first,) = (c for c in manager.tree.checkpoints if c.boundary == PAGE)
    manager.drop_checkpoint(first)
    assert asked(world, short) == "window_evicted", "its page is there as that of the long one"
    assert asked(world, [*PROMPT[:PAGE], 0, 1]) is None, "the last one has published the checkpoint again"


@pytest.mark.parametrize(("asked_for", "reason"), [(30, "evicted"), (70, "no_checkpoint")])
def test_a_branch_that_was_evicted_is_told_from_one_that_never_was(asked_for, reason):
    world = World(interval=64)
    one, two, asked_now = ([*PROMPT[:PAGE], *range(first, first + 2 * PAGE)] for first in (30, 50, asked_for))
    world.add(one)
    world.add(two)
    world.run()
    for checkpoint in world.manager.tree.checkpoints:
        if [*checkpoint.node.lineage()][-3].key == tuple(one[PAGE : 2 * PAGE]):
            world.manager.drop_checkpoint(checkpoint)
    assert asked(world, asked_now) == reason


def test_every_eviction_is_timed_once():
    world = World(make_geometry(num_snapshots=1))
    world.ask(PROMPT)
    world.ask(PROMPT[::-1])
    times = world.manager.evicted.take_times()
    assert len(times) >= 1
    assert all(time_s > 0 for time_s in times)
    assert world.manager.evicted.take_times() == []


def test_another_effort_is_the_reason_where_it_is_known():
    world = World()
    assert asked(world, effort_changed=True) == "effort_changed"


def test_without_a_cache_nothing_is_missed():
    world = World(enable_caching=False)
    assert asked(world) is None
    assert not world.counters.misses


salted = st.lists(st.tuples(st.sampled_from(["", "a", "b", "0:a"]), st.integers(0, 12)), min_size=2, max_size=8)


@given(salted, st.booleans())
def test_tenants_never_share_a_page(asks, is_together):
    world = World(make_geometry(num_snapshots=60, num_pages=(300, 300)))
    for salt, cut in asks:
        world.add([*PROMPT[:cut], 1, *PROMPT[cut:]], salt=salt)
        if not is_together:
            world.run()
    world.run()
    tree = world.manager.tree
    owned = {}
    for salt in {salt for salt, _ in asks}:
        root = tree._roots[world.manager.namespace(salt)]
        nodes = [node for node in tree.nodes() if [*node.lineage()][-1] is root]
        pages = {(None, node.page) for node in nodes}
        checkpoints = [node.checkpoint for node in nodes if node.checkpoint]
        pages |= {(g, item.page) for c in checkpoints for g, held in c.windows.items() for item in held}
        owned[salt] = pages | {("snapshot", c.snapshot) for c in checkpoints}
        assert checkpoints
    assert sum(map(len, owned.values())) == len(set().union(*owned.values()))


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_new_weights_hit_nothing_that_old_ones_computed(salt):
    world = World()
    world.ask(PROMPT, salt=salt)
    old = world.manager.namespace(salt)
    world.manager.begin_epoch()
    assert world.manager.namespace(salt) != old
    assert not list(world.manager.tree.nodes())
    assert world.ask(PROMPT, salt=salt).num_cached_tokens == 0
    assert world.ask(PROMPT, salt=salt).num_cached_tokens
    # Two things stand in the way of a stale hit, and each does so alone.
    world.manager.drop_all_checkpoints = lambda: None
    world.manager.begin_epoch()
    assert world.ask(PROMPT, salt=salt).num_cached_tokens == 0


def test_weights_do_not_change_under_a_running_request():
    world = World()
    world.add(PROMPT)
    world.step()
    with pytest.raises(AssertionError, match="old weights"):
        world.manager.begin_epoch()
