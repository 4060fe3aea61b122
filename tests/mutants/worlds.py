"""Watched engines of the battery, and what is asked of all of them."""

from __future__ import annotations

import random

from samebit.audit.replay import Drain, Step
from tests.hash.fuzzer import LAYOUTS, VOCAB, World

ROOMY = {"max_num_seqs": 6, "num_checkpoints": 16, "num_pages": 60, "num_window_pages": 60, "checkpoint_interval": 8}
SMALL = {"max_num_seqs": 3, "num_checkpoints": 3, "num_pages": 13, "num_window_pages": 9, "checkpoint_interval": 8}
# Conv streams before, between and after both kinds of attention; two windows, one below a page.
MIXED, TWO_WINDOWS = (["conv", 6, "conv", "full", "conv"], 4), LAYOUTS[3]
# Where engines of the battery run, how steps are recorded there, and the set of compiled kernels; test_on_device changes them.
PLACE = {"kernels": "torch"}
RECORDED = {"graph": "trace"}
COMPILED = {"kernels": "auto"}


def make_world(layout: tuple, **settings) -> World:
    """A watched engine; with the torch kernels, so that the faults of this list reach every address."""
    return World(*layout, **(PLACE | ROOMY | settings))


def make_guessing_world(layout: tuple, accepts: tuple[int, ...], **settings) -> World:
    """A watched engine with guesses of known quality, all of which are verified."""
    speculation = {"method": "ngram", "num_speculative_tokens": 5, "token_cost": 0.0}
    return make_world(layout, accepts=accepts, speculative_config=speculation, **settings)


def make_drafting_world(layout: tuple, max_drafts: int = 4, **settings) -> World:
    """A watched engine with a drafter on the device, all of whose guesses are verified."""
    speculation = {"method": "mtp", "num_speculative_tokens": max_drafts, "token_cost": 0.0}
    return make_world(layout, speculative_config=speculation, **settings)


def finish(world: World, max_steps: int = 150) -> None:
    """Run until idle; nothing that the battery asks for needs as many steps."""
    end = world.player.num_steps + max_steps
    while world.engine.has_work:
        world.do(Step())
        assert world.player.num_steps < end, f"requests have not ended after {max_steps} steps"
    world.do(Drain())
    counters = world.engine.scheduler.counters
    if not world.player.num_damages and world.player._after_step is not None:
        assert counters.num_refused_checkpoints == 0, "checkpoints were refused"
        assert counters.num_damaged_resumes == 0, "resumed state was damaged"


def expect(world: World, prompt: list[int], cached: int, *, salt: str = "", **params) -> None:
    settings = {"max_tokens": 3, "temperature": 0.0, "logprobs": 1, "ignore_eos": True, **params}
    (name,) = world.add(prompt, params=settings, salt=salt)
    finish(world)
    found = world.player.num_cached[name]
    assert found == cached, f"{len(prompt)} tokens with {cached} cached took {found} from the cache"


def any_request(rng: random.Random, number: int) -> dict:
    params = {
        "max_tokens": 1 + number % 6,
        "temperature": (0.0, 0.9, 1.4)[number % 3],
        "logprobs": 3,
        "prompt_logprobs": (None, 2, None)[number % 3],
        "top_k": (0, 5)[number % 2],
        "stop_token_ids": rng.sample(range(VOCAB), 40) if number % 4 == 1 else None,
        "min_tokens": 1 if number % 8 == 1 else 0,
    }
    return {"params": {k: v for k, v in params.items() if v is not None}, "seed": number, "start": 1 + number % 4}
