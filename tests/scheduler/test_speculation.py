"""Guesses change how many tokens a step gives, and nothing else (see world.py: every token is the oracle's)."""

from __future__ import annotations

import random
import re

import msgspec
import pytest

from samebit.core.config import Schedule, SpeculativeConfig
from samebit.core.request import SpeculationCounts
from tests.fakes import VOCAB, logits_rows, make_geometry
from tests.forced_drafts import ForcedDrafts
from tests.scheduler.test_properties import LAYOUTS, MAX_LENGTH, SHARED
from tests.scheduler.world import World

ACCEPTS = [(0,), (9,), (1, 0, 2), (3, 9, 0), (2, 7, 1, 0)]


def speculating(accepts, *, max_drafts=4, budget=16, max_length=MAX_LENGTH, **options) -> World:
    return World(make_geometry(max_drafts=max_drafts, max_length=max_length), accepts=accepts, budget=budget, **options)


def looking_beyond(answer: list[int]) -> World:
    """All guesses are right, also behind the end of a request that stops before its answer does."""
    world = speculating((9,), max_drafts=9)
    world.scheduler._drafter = lambda request: ForcedDrafts(request, (9,), lambda: answer, VOCAB)
    return world


@pytest.mark.parametrize(("on_device", "runs_ahead"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("accepts", ACCEPTS)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_a_busy_run_with_guesses_is_exact(layout, accepts, on_device, runs_ahead):
    rng = random.Random(f"{layout} {accepts}")
    counts = (14,) * len(LAYOUTS[layout]["windows"])
    sizes = {"num_slots": 4, "num_snapshots": 6, "num_pages": counts, "max_length": MAX_LENGTH, "max_drafts": 5}
    schedule = Schedule(seed=5, preempt_percent=8, chunk_sizes=(7, 3, 16), shuffle_rows=True)
    options = {"schedule": schedule, "on_device": on_device, "runs_ahead": runs_ahead}
    world = World(make_geometry(**LAYOUTS[layout], **sizes), accepts=accepts, **options)
    for _ in range(400):
        match rng.choices(["arrive", "step", "abort in flight"], [25, 70, 4])[0]:
            case "arrive" if len(world.live) < 12:
                prompt = SHARED[: rng.randint(0, 20)] + rng.choices(range(VOCAB), k=rng.randint(1, 8))
                stops = rng.choices(range(VOCAB), k=rng.choice([0, 8]))
                world.add(prompt, max_tokens=rng.randint(1, 12), min_tokens=rng.randint(0, 1), stop_token_ids=stops)
            case "abort in flight" if world.live:
                world.step(abort=[world.requests[rng.choice(sorted(world.live))]])
            case _:
                world.step()
    world.run()
    world.check_empty()
    counters = world.counters
    assert counters.num_preemptions > 0
    assert counters.num_published > 100
    assert counters.num_refused_checkpoints == counters.num_damaged_resumes == 0
    assert counters.num_draft_tokens > 100
    assert (counters.num_accepted_tokens > 30) == (accepts != (0,))


def test_right_guesses_take_fewer_steps():
    steps = {}
    for accepts in ((), (0,), (9,)):
        world = speculating(accepts, max_drafts=4 if accepts else 0)
        world.add(SHARED[:5], max_tokens=20)
        steps[accepts] = 0
        while world.scheduler.has_work:
            world.step()
            steps[accepts] += 1
    assert steps[()] == steps[0,] >= 20
    assert steps[9,] <= 6


def test_a_request_whose_guesses_were_wrong_is_tried_again_later():
    world = World(make_geometry(max_drafts=4, num_pages=(200, 200), max_length=200), accepts=(0,))
    costly = SpeculativeConfig(method="ngram", token_cost=0.3)
    world.scheduler._config = msgspec.structs.replace(world.scheduler._config, speculative_config=costly)
    world.add(SHARED[:5], max_tokens=150)
    with_guesses = []
    for _ in range(100):
        world.step()
        with_guesses.append(any(row.num_drafts for row in world.plan.rows))
    text = "".join("g" if guessed else "." for guessed in with_guesses)
    assert text.startswith(".ggg")
    assert len(re.findall(r"\.\.g", text)) > 10, text


def test_guesses_that_are_not_verified_yet_hold_no_step_up():
    world = speculating((2, 0, 9), max_drafts=4, on_device=True, runs_ahead=True, interval=32)
    ahead = []
    plan_ahead = world.scheduler.plan_ahead

    def watched():
        plan = plan_ahead()
        ahead.append([(row.num_tokens, row.num_drafts) for row in plan.rows] if plan else [])
        return plan

    world.scheduler.plan_ahead = watched
    world.ask(SHARED[:5], max_tokens=26)
    assert ahead.count([(5, 4)]) >= 5  # the last token that is drawn, and guesses, behind a row of as many
    assert ahead.count([]) <= 2, "only the end of the request is waited for"


def test_requests_whose_guesses_are_the_hosts_stay_together():
    # No step has room for all prompts, so there is always somebody who could be planned ahead of the rest.
    counts = []
    for runs_ahead in (False, True):
        world = World(
            make_geometry(max_drafts=4, num_slots=8, num_pages=(200, 200)), accepts=(1, 0, 2), runs_ahead=runs_ahead
        )
        for number in range(8):
            world.add([number] * 14, max_tokens=40)
        counts.append(0)
        while world.scheduler.has_work:
            world.step()
            counts[-1] += 1
    assert counts[1] <= counts[0], "requests were parted"


@pytest.mark.parametrize("steps", range(1, 6))
def test_logits_that_are_not_finite_end_a_request_with_its_next_guesses_in_flight(steps):
    world = speculating((9, 1), on_device=True, runs_ahead=True, interval=32)
    sick, well = world.add(SHARED[:5], max_tokens=30), world.add(SHARED[7:12], max_tokens=30)
    for _ in range(steps):
        world.step()
    commit, failed = world.scheduler.commit, []

    def watch(output):
        progress = commit(output)
        failed.extend(item for item in progress if item.error)
        world.live -= {item.request_id for item in failed}
        return [item for item in progress if not item.error]

    world.scheduler.commit = watch
    world.runner.not_finite.add("r0")
    world.run()
    assert [(item.request_id, item.tokens) for item in failed] == [("r0", [])]
    assert well.finish_reason == "length"
    world.runner.not_finite.clear()
    assert world.ask(sick.request.prompt_token_ids, max_tokens=9).finish_reason == "length"
    world.check_empty()


@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("max_drafts", [1, 3, 9])
def test_a_stop_inside_accepted_guesses_is_published_with_the_next_ones_in_flight(place, max_drafts):
    prompt = SHARED[:6]
    wanted = World(make_geometry()).ask(prompt, max_tokens=24).token_ids
    length = wanted.index(wanted[place]) + 1
    world = speculating((9,), max_drafts=max_drafts, on_device=True, runs_ahead=True, interval=32)
    world.runner.guess = lambda _name, num_known: wanted[num_known - len(prompt) :]
    watched = world.ask(prompt, max_tokens=24, stop_token_ids=[wanted[place]])
    assert watched.token_ids == wanted[:length]
    assert world.counters.num_refused_checkpoints == 0
    assert max(checkpoint.boundary for checkpoint in world.checkpoints) >= (len(prompt) + length - 1) // 4 * 4


def test_a_boundary_that_guesses_may_reach_is_waited_for():
    world = speculating((3, 1), max_drafts=3, on_device=True, runs_ahead=True, interval=8)
    world.ask(SHARED[:5], max_tokens=30)
    assert {checkpoint.boundary for checkpoint in world.checkpoints} >= {8, 16, 24, 32}


def test_guesses_are_counted_by_their_place_in_the_row():
    world = speculating((2,), max_drafts=4)
    watched = world.add(SHARED[:5], max_tokens=16)
    gained = []
    commit = world.scheduler.commit

    def watch(output):
        progress = commit(output)
        gained.extend(item.speculation for item in progress)
        return progress

    world.scheduler.commit = watch
    world.run()
    assert len(watched.token_ids) == 1 + 5 * 3
    counters = world.counters
    # There is no room for more than two guesses in the last row.
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (5, 4 * 4 + 2, 10)
    assert counters.accepted_per_position == [5, 5, 0, 0]
    assert counters.totals()["mean_acceptance_length"] == 3
    assert counters.totals()["num_accepted_tokens_at_1"] == 5
    assert sum(gained, SpeculationCounts()) == SpeculationCounts(5, 18, (5, 5))


@pytest.mark.parametrize("percent", [0, 30, 100])
def test_a_schedule_can_spoil_guesses_that_are_then_rejected(percent):
    schedule = Schedule(seed=3, spoil_percent=percent)
    world = World(make_geometry(max_drafts=4, max_length=MAX_LENGTH), accepts=(9,), schedule=schedule)
    for number in range(5):
        world.add(SHARED[number : number + 3], max_tokens=16)
    world.run()
    accepted, guessed = world.counters.num_accepted_tokens, world.counters.num_draft_tokens
    assert guessed > 40
    assert {0: accepted == guessed, 30: 0 < accepted < guessed, 100: accepted == 0}[percent]


def test_what_is_accepted_behind_a_stop_does_not_count():
    prompt = SHARED[:6]
    wanted = World(make_geometry()).ask(prompt, max_tokens=12).token_ids
    place = next(n for n, token in enumerate(wanted) if n > 1 and token not in wanted[:n])
    world = looking_beyond(wanted)
    world.ask(prompt, max_tokens=12, stop_token_ids=[wanted[place]])
    assert world.counters.num_accepted_tokens == place < world.counters.num_draft_tokens


def test_a_request_can_go_without_guesses():
    world = speculating((9,), max_drafts=4)
    plain = world.add(SHARED[:5], max_tokens=20, speculation=False)
    drafts = {}
    for wanted in (plain, world.add(SHARED[:5], max_tokens=20, seed=1)):
        drafts[wanted.request.request_id] = 0
    while world.scheduler.has_work:
        world.step()
        for row in world.plan.rows:
            drafts[row.request_id] += row.num_drafts
    assert drafts["r0"] == 0 < drafts["r1"]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_token_is_guessed_that_a_request_may_not_have(max_tokens):
    world = speculating((9,), max_drafts=4)
    watched = world.add(SHARED[:5], max_tokens=max_tokens)
    while world.scheduler.has_work:
        world.step()
        for row in world.plan.rows:
            assert row.start + row.num_tokens < 5 + max_tokens
    assert len(watched.token_ids) == max_tokens


@pytest.mark.parametrize("num_prompt", range(1, 28))
def test_no_guess_is_written_behind_the_last_position(num_prompt):
    # The last page of a sequence ends two positions behind it.
    world = speculating((9,), max_drafts=4, max_length=30, on_device=True)
    world.add(SHARED[:1] * num_prompt, max_tokens=None)
    while world.scheduler.has_work:
        world.step()
        assert all(draft.limit <= 30 for draft in world.plan.drafts)


@pytest.mark.parametrize("max_drafts", [0, 4])
def test_the_smallest_pools_starve_nobody(max_drafts):
    # The cache comes to hold all pages but a request's own, fewer than a chunk or a row of guesses would fill.
    sizes = {
        "windows": (9,),
        "page_size": 1,
        "num_slots": 1,
        "num_pages": (10,),
        "max_length": 32,
        "max_drafts": max_drafts,
    }
    for seed in range(10):
        world = World(make_geometry(**sizes), interval=2, budget=8, accepts=(0, 3, 9) if max_drafts else ())
        for length in random.Random(seed).choices(range(1, 16), k=5):
            world.add([*SHARED[:length], seed], max_tokens=14)
        world.run()


def test_who_waits_for_a_slot_makes_no_guess_worth_more():
    counts = []
    for num_waiting in (0, 3):
        world = World(make_geometry(max_drafts=8, num_pages=(200, 200)), budget=64, accepts=(0,))
        costly = SpeculativeConfig(method="ngram", token_cost=0.15)
        world.scheduler._config = msgspec.structs.replace(world.scheduler._config, speculative_config=costly)
        for seed in range(world.geometry.num_slots):
            world.add(SHARED[seed : seed + 4], max_tokens=40)
        for seed in range(num_waiting):
            world.add([seed] * 60, max_tokens=1)
        for _ in range(30):
            world.step()
        assert world.scheduler.num_waiting == num_waiting
        counts.append(world.counters.num_draft_tokens)
    assert 0 < counts[0] == counts[1]


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_inside_accepted_guesses_ends_there_and_is_published_up_to_there(place):
    prompt = SHARED[:6]
    wanted = World(make_geometry()).ask(prompt, max_tokens=12).token_ids
    stop = wanted[place]
    length = wanted.index(stop) + 1
    world = looking_beyond(wanted)
    watched = world.ask(prompt, max_tokens=12, stop_token_ids=[stop])
    assert watched.token_ids == wanted[:length]
    assert watched.finish_reason == "stop"
    # Everything up to the stop token has state, and whole pages of it are kept.
    deepest = max(checkpoint.boundary for checkpoint in world.checkpoints)
    assert deepest == max(4, (len(prompt) + length - (length == 1)) // 4 * 4)
    assert world.ask([*prompt, *watched.token_ids, 5]).num_cached_tokens == deepest


@pytest.mark.parametrize("budget", [4, 6, 9])
def test_guesses_never_take_the_place_of_another_sequences_next_token(budget):
    world = speculating((9,), max_drafts=7, budget=budget)
    for number in range(4):
        world.add([number, 1, 2], max_tokens=20)
    # Half of the room is left to those that wait.
    while world.scheduler.num_waiting:
        world.step()
    assert world.scheduler.num_running == 4
    most = 0
    while world.scheduler.num_running == 4:
        world.step()
        assert sum(row.num_tokens > 0 for row in world.plan.rows) == 4
        most = max(most, *(row.num_drafts for row in world.plan.rows))
    assert most == min(7, budget - 4)
    world.run()


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("min_tokens", [3, 4, 9])
def test_no_stop_is_drawn_before_its_time_inside_a_row_of_guesses(min_tokens, runs_ahead):
    prompt = SHARED[:6]
    stops = list(range(0, VOCAB, 2))
    answers = [
        World(
            make_geometry(max_drafts=5), accepts=accepts, on_device=runs_ahead, runs_ahead=runs_ahead, interval=32
        ).ask(prompt, max_tokens=12, min_tokens=min_tokens, stop_token_ids=stops)
        for accepts in ((), (9,), (0, 1))
    ]
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert not set(answers[1].token_ids[:min_tokens]) & set(stops)


@pytest.mark.parametrize("edits", [{}, {"min_tokens": 3}])
def test_a_row_gets_its_own_results_behind_one_that_scores_and_draws(edits):
    world = speculating((2,), budget=32)
    both = [world.add(SHARED[:5], prompt_logprobs=0, **edits), world.add(SHARED[3:9], **edits)]
    world.step()
    assert [len(watched.token_ids) for watched in both] == [1, 1]
    world.run(max_steps=20)


def test_logits_that_are_not_finite_behind_a_rejected_guess_harm_nobody():
    world = speculating((0,), max_drafts=3)
    watched = world.add(SHARED[:5], max_tokens=6)
    execute = world.runner.execute

    def broken(plan):
        samples = logits_rows(plan)
        pairs = ((sample, plan.rows[sample.row]) for sample in samples)
        finite = [sample.offset < row.num_tokens - row.num_drafts for sample, row in pairs]
        return msgspec.structs.replace(execute(plan), finite=finite)

    world.runner.execute = broken
    world.run()
    assert len(watched.token_ids) == 6
