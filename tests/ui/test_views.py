"""What is seen of the cache and of requests, by whom, and that it stays small."""

import gc
import weakref

import pytest

from samebit.core.plan import PlanRow
from samebit.core.request import Request, SamplingParams
from samebit.engine import cache_view as views
from samebit.engine import timeline as times
from samebit.engine.cache_view import Place, cache_view, label_of, place_of
from samebit.engine.timeline import Timeline
from samebit.engine.views import Attachment, Look
from samebit.scheduler.misses import Admission
from tests.scheduler.world import World

OPERATOR = Look(subject="cache", is_admin=True)
STRANGER = Look(subject="cache", is_admin=False)
PROMPT = list(range(1, 13))
NOWHERE = Place(Attachment(num_attached=0, num_matched=0, num_possible=0, miss_reason="cold"), None, None)


def request(name="a-0", tokens=(1, 2, 3), salt="", **params):
    return Request(
        request_id=name, prompt_token_ids=list(tokens), params=SamplingParams(**params), seed=1, cache_salt=salt
    )


def row(name, start, num_tokens, num_drafts=0):
    return PlanRow(name, 1, 1, start, num_tokens, [], num_drafts=num_drafts)


@pytest.fixture
def manager():
    """A cache in which two tenants and everybody else have prefixes."""
    world = World()
    for salt in ("", "red", "blue"):
        world.ask(PROMPT[:10], salt=salt, max_tokens=1)
        world.ask([*PROMPT[:5], *PROMPT[:7]], salt=salt, max_tokens=1)
    return world.manager


def place_in(manager):
    """Where a request attaches that finds pages of PROMPT without a checkpoint."""
    path = manager.tree.walk(manager.namespace(""), PROMPT, len(PROMPT))
    return place_of(Admission("a-0", 0, len(PROMPT), path, "no_checkpoint"), manager.geometry.page_size)


def texts(view):
    return {view.tenants[span.tenant].label for span in view.spans if span.token_ids}


def test_the_operator_sees_all_tenants_and_their_tokens(manager):
    view = cache_view(manager, OPERATOR, None, 256)
    assert {tenant.label for tenant in view.tenants} == {"", label_of("red"), label_of("blue")}
    assert texts(view) == {"", label_of("red"), label_of("blue")}
    assert all(tenant.is_shown for tenant in view.tenants)


def test_a_stranger_sees_counts_only(manager):
    view = cache_view(manager, STRANGER, None, 256)
    assert texts(view) == set()
    shown = {tenant.label for tenant in view.tenants if tenant.is_shown}
    assert shown == {""}
    assert {view.tenants[span.tenant].label for span in view.spans} == {""}
    assert all(tenant.num_tokens > 0 for tenant in view.tenants)


def test_a_tenant_sees_its_own_tokens_by_its_salt(manager):
    view = cache_view(manager, Look(subject="cache", is_admin=False, salt="red"), None, 256)
    assert texts(view) == {label_of("red")}
    assert {view.tenants[span.tenant].label for span in view.spans} == {"", label_of("red")}


def test_what_is_cached_without_a_salt_is_for_the_operator_to_read(manager):
    view = cache_view(manager, Look(subject="cache", is_admin=False, salt=""), None, 256)
    assert texts(view) == set()


def test_a_span_counts_the_hits_of_all_below(manager):
    for place, checkpoint in enumerate(manager.tree.checkpoints, start=1):
        checkpoint.num_hits = 10**place
    view = cache_view(manager, OPERATOR, None, 256)
    below = [[] for _ in view.spans]
    for index in reversed(range(len(view.spans))):
        span = view.spans[index]
        own = span.checkpoint.num_hits if span.checkpoint else 0
        assert span.num_hits == own + sum(below[index])
        if span.parent >= 0:
            below[span.parent].append(span.num_hits)
    assert any(below)
    assert sum(s.num_hits for s in view.spans if s.parent < 0) == sum(c.num_hits for c in manager.tree.checkpoints)


def test_no_look_tells_a_salt(manager):
    view = cache_view(manager, OPERATOR, None, 256)
    assert "red" not in repr(view)
    assert "blue" not in repr(view)


def test_spans_hold_every_token_once_parents_first(manager):
    view = cache_view(manager, OPERATOR, None, 256)
    size = manager.geometry.page_size
    assert sum(span.num_tokens for span in view.spans) == size * len(list(manager.tree.nodes()))
    for index, span in enumerate(view.spans):
        assert span.parent < index
        before = view.spans[span.parent].start + view.spans[span.parent].num_tokens if span.parent >= 0 else 0
        assert span.start == before
    assert sum(span.checkpoint is not None for span in view.spans) == len(manager.tree.checkpoints)


def test_a_large_tree_is_cut(manager, monkeypatch):
    monkeypatch.setattr(views, "MAX_SPANS", 2)
    view = cache_view(manager, OPERATOR, None, 256)
    assert view.is_cut
    assert len(view.spans) <= 2
    monkeypatch.setattr(views, "MAX_NODES", 3)
    assert cache_view(manager, STRANGER, None, 256).is_cut


def test_a_place_is_found_again_while_the_cache_has_it(manager):
    place = place_in(manager)
    assert place.matched is not None
    view = cache_view(manager, OPERATOR, place, 256)
    span = view.spans[view.matched_span]
    assert span.start < place.attachment.num_matched <= span.start + span.num_tokens
    manager.drop_all_checkpoints()
    assert cache_view(manager, OPERATOR, place, 256).matched_span == -1


def test_what_is_remembered_of_requests_keeps_no_node_alive(manager):
    timeline = Timeline()
    timeline.arrived(request(tokens=PROMPT), 0.0)
    place = place_in(manager)
    node = weakref.ref(place.matched)
    timeline.admitted("a-0", place, 0.1)
    del place
    manager.drop_all_checkpoints()
    gc.collect()
    assert node() is None
    assert timeline.place(OPERATOR).matched is None


def test_what_ended_is_forgotten_in_the_end_and_what_is_open_is_not(monkeypatch):
    monkeypatch.setattr(times, "MAX_ENDED", 5)
    timeline = Timeline()
    timeline.arrived(request("open-0"), 0.0)
    for number in range(50):
        name = f"{number}-0"
        timeline.arrived(request(name), float(number))
        timeline.step([row(name, 0, 3)], [0], number, number + 0.5)
        timeline.ended(name, "stop", number + 0.6)
    kept = timeline.view(Look(subject="requests", is_admin=True)).requests
    labels = [one.label for one in kept]
    assert labels[0] == label_of("open-0")
    assert len(labels) <= 7
    assert labels[-1] == label_of("49-0")


def test_steps_are_bounded_too(monkeypatch):
    monkeypatch.setattr(times, "MAX_ROWS", 100)
    timeline = Timeline()
    for number in range(40):
        name = f"{number}-0"
        timeline.arrived(request(name), 0.0)
        for step in range(20):
            timeline.step([row(name, step, 1)], [0], 0.0, 0.1)
        timeline.ended(name, "stop", 1.0)
    kept = timeline.view(Look(subject="requests", is_admin=True)).requests
    assert sum(step.num_steps for one in kept for step in one.steps) <= 120


def test_rows_become_chunks_draws_and_verified_guesses():
    timeline = Timeline()
    timeline.arrived(request("a-0", range(10)), 5.0)
    timeline.admitted("a-0", NOWHERE, 5.5)
    rows = [(row("a-0", 0, 4), 0), (row("a-0", 4, 6), 0), (row("a-0", 10, 3, 2), 1), (row("a-0", 12, 1), 0)]
    for number, (one, accepted) in enumerate(rows):
        timeline.step([one], [accepted], 6.0 + number, 6.5 + number)
    timeline.step([row("a-0", 13, 0)], [0], 10.0, 10.5)
    (whole,) = timeline.view(Look(subject="requests", is_admin=True, name="a")).requests
    assert [(step.kind, step.num_drawn) for step in whole.steps] == [
        ("prefill", 0),
        ("prefill", 1),
        ("verify", 2),
        ("decode", 1),
        ("publish", 0),
    ]
    assert whole.admitted_s == 0.5
    assert [step.start_s for step in whole.steps] == [1.0, 2.0, 3.0, 4.0, 5.0]
    (short,) = timeline.view(Look(subject="requests", is_admin=True)).requests
    assert [(step.kind, step.num_steps, step.num_drawn) for step in short.steps] == [
        ("prefill", 1, 0),
        ("prefill", 1, 1),
        ("verify", 2, 3),
        ("publish", 1, 0),
    ]


def test_requests_of_other_tenants_are_counted_only_and_no_look_tells_an_id():
    timeline = Timeline()
    for name, salt in (("plain-0", ""), ("secret-0", "red")):
        timeline.arrived(request(name, salt=salt), 0.0)
    stranger = timeline.view(Look(subject="requests", is_admin=False))
    assert [one.tenant for one in stranger.requests] == [""]
    assert stranger.num_hidden == 1
    tenant = timeline.view(Look(subject="requests", is_admin=False, salt="red"))
    assert [one.tenant for one in tenant.requests] == ["", label_of("red")]
    everything = timeline.view(Look(subject="requests", is_admin=True))
    assert "secret" not in repr(everything)
    assert "plain" not in repr(everything)


def test_an_answer_is_found_by_its_id_or_by_its_label():
    timeline = Timeline()
    for name in ("x-0", "x-1", "y-0"):
        timeline.arrived(request(name), 0.0)
    found = timeline.view(Look(subject="requests", is_admin=False, name="x")).requests
    assert [one.label for one in found] == [label_of("x-0"), label_of("x-1")]
    (by_label,) = timeline.view(Look(subject="requests", is_admin=False, name=label_of("y-0"))).requests
    assert by_label.label == label_of("y-0")


def draws(timeline, names, numbers):
    for name in names:
        timeline.arrived(request(name, range(10)), 0.0)
        timeline.step([row(name, 0, 10)], [0], 0.0, 0.1)
        for number in numbers:
            timeline.step([row(name, 10 + number, 1)], [0], number + 1.0, number + 1.5)


def test_steps_that_were_looked_at_as_they_came_are_those_seen_at_once():
    watched, unwatched = Timeline(), Timeline()
    look = Look(subject="requests", is_admin=True)
    for timeline in (watched, unwatched):
        draws(timeline, ["a-0"], range(3))
        if timeline is watched:
            timeline.view(look)
        for number in range(3, 9):
            timeline.step([row("a-0", 10 + number, 1)], [0], number + 1.0, number + 1.5)
            if timeline is watched:
                timeline.view(look)
    assert watched.view(look).requests[0].steps == unwatched.view(look).requests[0].steps
    assert [step.num_steps for step in watched.view(look).requests[0].steps] == [1, 9]


def test_a_look_takes_in_a_bounded_number_of_steps_and_the_next_one_goes_on(monkeypatch):
    monkeypatch.setattr(times, "MAX_NEW_ROWS", 8)
    timeline = Timeline()
    draws(timeline, ["a-0", "b-0"], range(9))
    look = Look(subject="requests", is_admin=True)
    seen = [sum(s.num_steps for one in timeline.view(look).requests for s in one.steps) for _ in range(4)]
    assert seen == [8, 16, 20, 20]
