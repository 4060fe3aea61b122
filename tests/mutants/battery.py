"""The battery: a fixed list of checks of an engine. Each raises at the first thing that is wrong.

All but "weights" use models of integers, whose oracles share no code with the engine. Settings are small, so that
pages, windows, rings, chunks and pools end everywhere.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from samebit.audit.replay import Abort, Evict, Step
from samebit.core.config import EngineConfig, Schedule
from samebit.core.request import Request, SamplingParams
from samebit.engine.engine import Engine
from samebit.models.hash import HashConfig, save_hash
from samebit.state.manager import StateManager
from samebit.state.nodes import CheckpointKind
from tests.driving import Result, make_request, run, run_alone
from tests.fakes import make_geometry
from tests.hash.cold import greedy
from tests.hash.fuzzer import SHARED, VOCAB, World
from tests.hash.oracle import cold_model
from tests.mutants import worlds
from tests.mutants.ahead import check_ahead
from tests.mutants.grammars import check_grammars
from tests.mutants.losses import check_losses
from tests.mutants.worlds import (
    MIXED,
    ROOMY,
    SMALL,
    TWO_WINDOWS,
    any_request,
    expect,
    finish,
    make_drafting_world,
    make_guessing_world,
    make_world,
)
from tests.random_checkpoint import write_checkpoint
from tests.scheduler.world import World as IntegerWorld


def look(check: Callable[[], None]) -> str | None:
    """What a check finds, in a line."""
    try:
        check()
    except Exception as error:  # noqa: BLE001 - whatever a fault breaks is a finding
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


# Text


def check_text() -> None:
    """Several requests at once: text is that of the token ids, up to the stop string that ends first."""
    with tempfile.TemporaryDirectory() as folder:
        _check_stops(Path(folder) / "ascii", vocab_size=128)
        _check_stops(Path(folder) / "bytes", vocab_size=256)


def _check_stops(folder: Path, vocab_size: int) -> None:
    hashed = HashConfig(mixers=("conv", "full"), vocab_size=vocab_size, max_length=64)
    engine = Engine(
        EngineConfig(model=str(save_hash(folder, hashed)), num_threads=1, page_size=4, kernels="torch", **ROOMY)
    )
    full = {f"t{n}": greedy(cold_model(hashed), SHARED[n : n + 3], 12) for n in range(5)}
    ends = {"t0": 3, "t1": 6, "t3": 9}  # the others look for what only their neighbours say
    texts = {name: bytes(ids).decode("utf-8", "replace") for name, ids in full.items()}
    stops = {n: [texts[n][end - 2 : end]] if n in ends else [texts["t0"][1:3]] for n, end in ends.items()}
    params = {"temperature": 0.0, "max_tokens": 12, "logprobs": 1}
    for n, name in enumerate(full):
        stop = stops.get(name, [texts["t0"][1:3] + "?"]) if vocab_size == 128 else None
        request = Request(
            request_id=name, prompt_token_ids=SHARED[n : n + 3], params=SamplingParams(stop=stop, **params), seed=0
        )
        engine.add(request)
    results = {name: Result() for name in full}
    while engine.has_work:
        for output in engine.step():
            assert results[output.request_id].finish_reason is None, "an ended request reports"
            results[output.request_id].add(output)
        engine.scheduler.check()
    for name, result in results.items():
        end = ends.get(name, 12) if vocab_size == 128 else 12
        text = texts[name][: end - 2] if end < 12 else texts[name]
        assert result.error is None, f"{name}: {result.error}"
        assert result.token_ids == full[name][:end], f"{name}: token_ids"
        assert result.text == text, f"{name}: text {result.text!r}, wanted {text!r}"
        assert len(result.logprobs) == end, f"{name}: logprobs"
        assert result.finish_reason == ("stop" if end < 12 else "length"), f"{name}: finish_reason"


# Ids


def check_ids() -> None:
    """With a step in flight, what is let go stays away from others until it has retired."""
    manager = StateManager(make_geometry(num_slots=1, num_snapshots=1, num_pages=(4, 4)), order_seed=0)
    assert 0 not in {*manager.slots._free, *manager.snapshots._free, *manager.pages[0]._free}, "a reserved id is free"
    state = manager.admit("", list(range(9)), 8)
    assert manager.grow(state, 16) == 16
    manager.launch(7)
    pending = manager.plan_checkpoint(state, 0, 8, CheckpointKind.GRID, 7)
    manager.advance(state, 13, 7)
    manager.trim(state)
    assert manager.pages[0].take() is None, "a window page is reused while a step may read it"
    manager.discard(pending)
    assert manager.snapshots.take() is None, "a snapshot is reused while a step may write it"
    manager.release(state)
    assert manager.admit("", [1, 2], 1) is None, "a slot is reused while a step may write it"
    manager.retire(7)
    manager.check([], [])
    for pool in (*manager.pages, manager.slots, manager.snapshots):
        assert pool.num_free == pool.total, f"{pool.name}: not all free"


# Answers


def check_answers() -> None:
    """Each request has the interpreter's tokens, logprobs and end, alone and in a padded and shuffled batch."""
    for layout in (MIXED, TWO_WINDOWS):
        crowded = {"pad_rows": 2, "pad_tokens": 3, "shuffle_rows": True, "seed": 2}
        for schedule in ({}, crowded, {"pad_tokens": 3}):
            world = make_world(layout, schedule=schedule, enable_prefix_caching=False, max_num_batched_tokens=64)
            rng = random.Random(11)
            for number in range(12):
                world.add(SHARED[number : number + 1 + number * 2], **any_request(rng, number))
                finish(world) if not schedule or number % 4 == 3 else world.do(Step())
            finish(world)

    world = make_world(MIXED, num_window_pages=4, max_num_batched_tokens=8)  # all that one request needs at a time
    world.add(SHARED[:24], params={"max_tokens": 12, "temperature": 0.0})
    finish(world)


# Hits


def check_hits() -> None:
    """Each prompt takes from the cache just what it should, however chunks are cut, and is answered right."""
    for chunks in ((), (8,), (3, 5), (16, 1)):
        world = make_world(MIXED, schedule={"chunk_sizes": chunks}, max_num_batched_tokens=64)
        prompt, other = SHARED[:22], [(token + 1) % VOCAB for token in SHARED]
        expect(world, prompt, 0)
        expect(world, prompt, 20)
        expect(world, SHARED[:21], 20)
        expect(world, SHARED[:20], 16)
        answer = world.player.answers["r0.0"].token_ids
        expect(world, [*prompt, *answer, 1, 2], 24)
        expect(world, [*SHARED[:7], other[7], *SHARED[8:18]], 0)
        expect(world, SHARED[:6] + other[:4], 4)  # the third that begins with this page
        expect(world, prompt, 0, salt="tenant")
        expect(world, prompt, 20, salt="tenant")
        expect(world, prompt, 0, prompt_logprobs=1)
        finish(world)
        world.check_cache()
        world.check_empty()
    world = make_world(MIXED, num_checkpoints=1)
    expect(world, SHARED[:18], 0)
    # The only snapshot is read in the step that would like to write another.
    expect(world, [*SHARED[:18], *world.player.answers["r0.0"].token_ids, 1, 2, 3, 4, 5], 20)
    world = make_world(MIXED, schedule={"preempt_percent": 40, "seed": 1})
    names = [world.add(SHARED[n : n + 14], params={"max_tokens": 6, "temperature": 0.0})[0] for n in range(3)]
    finish(world)
    assert world.engine.scheduler.counters.num_preemptions > 1
    assert [world.player.num_cached[name] for name in names] == [0, 0, 0], "cached tokens of a later admission"


# Traffic


def check_traffic() -> None:
    """Arrivals, aborts, evictions and preemption in pools that hold little."""
    schedule = {"seed": 5, "preempt_percent": 12, "chunk_sizes": (7, 3, 16, 1), "pad_rows": 1, "shuffle_rows": True}
    for layout, pools in ((MIXED, ROOMY), (MIXED, SMALL), (TWO_WINDOWS, SMALL)):
        world = make_world(layout, **(pools | {"schedule": schedule, "max_num_batched_tokens": 24}))
        _drive(world, random.Random(3), 110)
        finish(world)
        world.check_cache()
        world.check_hits()
        world.check_empty()


def _drive(world: World, rng: random.Random, times: int) -> None:
    for number in range(times):
        live = world.player.live
        match rng.choices(["arrive", "step", "abort", "evict"], [30, 70, 6, 1])[0]:
            case "arrive" if len(live) < 8:
                prompt = SHARED[: rng.randint(0, 24)] + rng.choices(range(VOCAB), k=rng.randint(1, 6))
                prompt[rng.randrange(len(prompt))] = rng.choice([prompt[0], rng.randrange(VOCAB)])
                world.add(prompt, n=rng.choice([1, 1, 2]), salt=rng.choice(["", "tenant"]), **any_request(rng, number))
            case "arrive" | "abort" if live:
                world.do(Abort(rng.choice(live)))
            case "evict":
                world.do(Evict())
            case _:
                world.do(Step(2))
        scheduler = world.engine.scheduler
        assert scheduler.num_waiting + scheduler.num_running <= len(world.player.live), "an ended request is queued"
        assert world.player.num_steps < 400, "requests have not ended after 400 steps"


def check_flight() -> None:
    """On a device of integers, requests are also aborted while their step is in flight, and all writes are watched."""
    rng = random.Random(8)
    schedule = Schedule(seed=5, preempt_percent=8, chunk_sizes=(7, 3, 16), shuffle_rows=True)
    for geometry in (
        make_geometry(num_slots=3, num_snapshots=4, num_pages=(12, 16), max_length=40),
        make_geometry(windows=(5, 8), num_snapshots=4, num_pages=(9, 12), max_length=40),
    ):
        world = IntegerWorld(geometry, schedule=schedule)
        for _ in range(400):
            live = [world.requests[name] for name in sorted(world.live)]
            match rng.choices(["arrive", "step", "abort"], [30, 60, 10])[0]:
                case "arrive" if len(live) < 8:
                    prompt = SHARED[: rng.randint(0, 24)] + rng.choices(range(VOCAB), k=rng.randint(1, 6))
                    world.add(prompt, max_tokens=rng.randint(1, 8), salt=rng.choice(["", "", "tenant"]))
                case "abort" if live:
                    world.step(abort=[rng.choice(live)])
                case _:
                    world.step()
        world.run()
        world.check_empty()


# Guesses


def check_guesses() -> None:
    """Guesses of which some, none or all are right, also behind a stop, beside rows without any."""
    schedule = {"seed": 3, "chunk_sizes": (16, 3, 1, 7), "pad_rows": 1, "pad_tokens": 2, "shuffle_rows": True}
    for layout in (MIXED, TWO_WINDOWS):
        for accepts in ((9,), (0,), (1, 0, 2), (3, 9, 0, 4)):
            world = make_guessing_world(layout, accepts, schedule=schedule, max_num_seqs=3)
            rng = random.Random(4)
            for number in range(14):
                asked = any_request(rng, number)
                asked["params"] |= {"max_tokens": 4 + number, "min_tokens": number % 5}
                world.add(SHARED[number : number + 2 + number % 9], **asked)
                world.do(Step(2))
            finish(world)
            world.check_cache()
            world.check_hits()
            world.check_empty()
    world = make_guessing_world(MIXED, (9,))
    for place in range(1, 9):
        prompt = SHARED[place : place + 6]
        stop = greedy(cold_model(world.config), prompt, 12)[place]
        world.add(prompt, params={"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "stop_token_ids": [stop]})
    finish(world)
    world.check_cache()
    world = make_guessing_world(MIXED, (9,), max_num_seqs=1)
    for number in range(4):
        world.add(SHARED[number:8], params={"max_tokens": 32, "temperature": 0.0, "ignore_eos": True})
    finish(world)
    counters = world.engine.scheduler.counters
    assert counters.num_draft_tokens > 90, "few tokens are guessed"
    assert counters.num_accepted_tokens == counters.num_draft_tokens, "right guesses were rejected"


def check_drafter() -> None:
    """A drafter's guesses, alone and in a crowd, cold and from the cache, with and without pages behind a sequence."""
    schedule = {"seed": 3, "chunk_sizes": (16, 3, 7), "pad_rows": 1, "pad_tokens": 2, "preempt_percent": 5}
    for layout in (MIXED, TWO_WINDOWS):
        for sizes in (ROOMY, SMALL):
            world = make_drafting_world(layout, schedule=schedule, max_num_batched_tokens=24, **sizes)
            rng = random.Random(4)
            for number in range(16):
                asked = any_request(rng, number)
                asked["params"] |= {"max_tokens": 3 + number % 9, "speculation": number % 4 != 2}
                world.add(SHARED[: 3 + number % 11] + SHARED[number : number + 5], **asked)
                world.do(Step(2))
            finish(world)
            world.check_cache()
            world.check_hits()
            world.check_empty()
            assert world.num_drafts_checked > 50, "few guesses were looked at"
            counters = world.engine.scheduler.counters
            assert 3 * counters.num_accepted_tokens > counters.num_draft_tokens, "few guesses are accepted"


# Graphs


def check_graphs() -> None:
    """Recorded steps, replayed for requests of all sizes, cold and from the cache."""
    disturbed = {"chunk_sizes": (16, 3, 8), "seed": 4, "preempt_percent": 10}
    world = make_world(MIXED, **worlds.RECORDED, schedule=disturbed)
    rng = random.Random(6)
    for round_number in range(2):
        for number in range(6):
            world.add(SHARED[: 3 + number * 3], **any_request(rng, number + round_number))
            world.do(Step())
        finish(world)
    assert world.player.num_hits > 2, "nothing came from the cache"
    runner = world.engine._runner
    programs = [*runner._programs.values(), *runner._captured.values()]
    num_replayed = sum(getattr(program, "_is_checked", False) for program in programs)
    # A GPU's few sizes each hold many steps.
    assert num_replayed > (4 if worlds.RECORDED["graph"] == "trace" else 1), f"{num_replayed} recordings were replayed"
    # Rows leave a bucket out of order, and the others change places in it.
    world = make_world(MIXED, **worlds.RECORDED, schedule={"shuffle_rows": True}, enable_prefix_caching=False)
    for number in range(6):
        world.add(SHARED[number : number + 3], params={"max_tokens": (7, 3, 9, 2, 8, 4)[number], "temperature": 0.0})
    finish(world)
    world = make_world(MIXED, **(worlds.RECORDED | worlds.COMPILED))
    world.add(SHARED[:9], params={"max_tokens": 4, "temperature": 0.0})
    finish(world)


# Weights


def check_weights() -> None:
    """A small random model with experts: a padded batch in chunks, cold and from the cache, has the bits of solo runs."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model": str(write_checkpoint(Path(folder))),
            "num_threads": 1,
            "page_size": 4,
            "poison": True,
            "max_model_len": 64,
        }
        solo = Engine(EngineConfig(**settings, **ROOMY, enable_prefix_caching=False))
        schedule = Schedule(chunk_sizes=(5, 2), pad_tokens=3, pad_rows=2, shuffle_rows=True)
        engine = Engine(EngineConfig(**settings, **ROOMY, schedule=schedule))
        requests = [make_request(f"w{n}", SHARED[: 5 + 4 * n], seed=n, max_tokens=5) for n in range(4)]
        wanted = {request.request_id: run_alone(solo, request) for request in requests}
        for _ in range(2):
            for name, result in run(engine, requests).items():
                assert result == wanted[name], f"{name}: bits differ from a solo run"
        counters = engine.scheduler.counters
        assert counters.num_refused_checkpoints == counters.num_damaged_resumes == 0, "checkpoints were refused"


BATTERY: dict[str, Callable[[], None]] = {
    "ids": check_ids,
    "answers": check_answers,
    "hits": check_hits,
    "traffic": check_traffic,
    "flight": check_flight,
    "losses": check_losses,
    "guesses": check_guesses,
    "drafter": check_drafter,
    "grammars": check_grammars,
    "ahead": check_ahead,
    "graphs": check_graphs,
    "weights": check_weights,
    "text": check_text,
}
