"""Any history of arrivals, aborts, evictions and preemptions gives every request the oracle's tokens (see world.py)."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from samebit.core.config import Schedule
from tests.fakes import VOCAB, make_geometry
from tests.scheduler.world import World

# Window, K, streams: with and without full attention, two windows (one below a page), K = 3.
LAYOUTS = [
    {"windows": (6, None)},
    {"windows": (None,), "streams": 2},
    {"windows": (6,), "kernel_size": 3},
    {"windows": (3, None, 9), "kernel_size": 3, "layers": 2},
    {"windows": (5, 8), "kernel_size": 4},
    {"windows": (6, None), "kernel_size": 6, "streams": 1},
]
# The smallest pools hold one request and little else.
POOLS = [
    {"num_slots": 4, "num_snapshots": 16, "num_pages": 60},
    {"num_slots": 3, "num_snapshots": 3, "num_pages": 12},
    {"num_slots": 2, "num_snapshots": 1, "num_pages": 10},
    {"num_slots": 8, "num_snapshots": 5, "num_pages": 18},
]
MAX_LENGTH = 40
SHARED = random.Random(7).choices(range(VOCAB), k=MAX_LENGTH)

schedules = st.builds(
    Schedule,
    seed=st.integers(0, 2**16),
    chunk_sizes=st.sampled_from([(), (), (1,), (7,), (3, 5, 2), (4,), (8, 1)]),
    preempt_percent=st.sampled_from([0, 0, 10, 40]),
    max_rows=st.sampled_from([0, 0, 1, 2]),
    shuffle_rows=st.booleans(),
)
settings_of_requests = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9),
        "seed": st.integers(0, 3),
        "salt": st.sampled_from(["", "", "", "tenant"]),
        "temperature": st.sampled_from([0.0, 1.0]),
        "ignore_eos": st.booleans(),
    },
    optional={
        "prompt_logprobs": st.sampled_from([0, 2]),
        "start": st.integers(1, 12),
        "logprobs": st.sampled_from([0, 3]),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=10, max_size=30),
        "min_tokens": st.just(1),
    },
)


class EngineMachine(RuleBasedStateMachine):
    """Random operations on a watched scheduler; `requests` are all that may still be running."""

    requests = Bundle("requests")

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        pools=st.sampled_from(POOLS),
        schedule=schedules,
        budget=st.sampled_from([8, 8, 16, 64]),
        interval=st.sampled_from([8, 4, 16]),
        enable_caching=st.sampled_from([True] * 5 + [False]),
        order_seed=st.integers(0, 100),
        max_drafts=st.sampled_from([0, 1, 3, 7]),
        on_device=st.booleans(),
        accepts=st.sampled_from([(), (), (0,), (9,), (1, 0, 2), (3, 9, 0), (2, 7, 1, 0)]),
        runs_ahead=st.booleans(),
    )
    def set_up(self, layout, pools, schedule, max_drafts, **options):
        counts = (pools["num_pages"],) * len(layout["windows"])
        sizes = {"num_pages": counts, "max_length": MAX_LENGTH, "max_drafts": max_drafts}
        geometry = make_geometry(**layout, **(pools | sizes))
        self.world = World(geometry, schedule=schedule, **options)

    @rule(
        target=requests,
        shared=st.integers(0, 24),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
        params=settings_of_requests,
    )
    def arrive(self, shared, own, params):
        return self.world.add(SHARED[:shared] + own, **params)

    @rule(target=requests, number=st.integers(1, 8), length=st.integers(1, 24), params=settings_of_requests)
    def arrive_together(self, number, length, params):
        """Identical prompts in one step; the last of them can be aborted."""
        return [self.world.add(SHARED[:length], **params) for _ in range(number)][-1]

    @rule(target=requests, first=consumes(requests), own=st.lists(st.integers(0, VOCAB - 1), max_size=4))
    def continue_conversation(self, first, own):
        """A next turn: what was answered so far is part of the prompt."""
        prompt = [*first.request.prompt_token_ids, *first.token_ids, *own][: MAX_LENGTH - 4]
        return self.world.add(prompt, max_tokens=4, seed=1)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            if self.world.scheduler.has_work:
                self.world.step()

    @rule(watched=consumes(requests))
    def abort(self, watched):
        self.world.abort(watched)

    @rule(watched=st.lists(consumes(requests), min_size=1, max_size=2))
    def abort_in_flight(self, watched):
        self.world.step(abort=watched)

    @rule()
    def evict_all(self):
        self.world.manager.drop_all_checkpoints()
        self.world.scheduler.check()

    @rule(which=st.integers(0, 15), stream=st.integers(0, 2), row=st.integers(0, 5))
    def damage(self, which, stream, row):
        """A conv row of a checkpoint is lost: whoever resumes there must notice."""
        world = self.world
        if world.checkpoints:
            layout = world.geometry.layout
            snapshot = world.checkpoints[which % len(world.checkpoints)].snapshot
            world.runner.damage_snapshot(snapshot, stream % len(layout.streams), row % layout.history)

    @rule()
    def drain(self):
        self.world.run()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run()
            self.world.check_empty()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=250, stateful_step_count=30)


def test_ten_thousand_operations_lose_no_id():
    rng = random.Random(2024)
    geometry = make_geometry(num_slots=4, num_snapshots=6, num_pages=(14, 20), max_length=MAX_LENGTH)
    schedule = Schedule(seed=5, preempt_percent=8, chunk_sizes=(7, 3, 16), shuffle_rows=True)
    world = World(geometry, schedule=schedule)
    for _ in range(10_000):
        match rng.choices(["arrive", "step", "abort", "abort in flight", "evict"], [20, 70, 5, 4, 1])[0]:
            case "arrive" if len(world.live) < 12:
                prompt = SHARED[: rng.randint(0, 24)] + rng.choices(range(VOCAB), k=rng.randint(1, 8))
                world.add(prompt, max_tokens=rng.randint(1, 8), salt=rng.choice(["", "", "tenant"]))
            case "abort" if world.live:
                world.abort(world.requests[rng.choice(sorted(world.live))])
            case "abort in flight" if world.live:
                world.step(abort=[world.requests[rng.choice(sorted(world.live))]])
            case "evict":
                world.manager.drop_all_checkpoints()
            case _:
                world.step()
    world.run()
    world.check_empty()
    # The run must have been worth it: every kind of event, many times.
    assert world.counters.num_preemptions > 200
    assert world.counters.num_published > 2000
    assert world.manager.num_evicted_tokens > 2000
    assert sum(watched.num_cached_tokens > 0 for watched in world.requests.values()) > 300
    assert world.counters.num_refused_checkpoints == world.counters.num_damaged_resumes == 0
