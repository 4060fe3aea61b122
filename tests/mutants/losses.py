"""A device that loses writes, and state that is damaged: what the engine must make of both."""

from __future__ import annotations

from dataclasses import replace

import torch

from samebit.audit.replay import Damage, Step
from samebit.kernels.values import SINK_PAGE, SINK_ROW
from samebit.models.hash import HashModel
from tests.driving import make_request
from tests.hash.fuzzer import SHARED, VOCAB, World
from tests.mutants.worlds import MIXED, expect, finish, make_world

CPU = torch.device("cpu")


class Lossy(HashModel):
    """Loses one kind of write: ("entry", stream), ("stamp", group, layer), or of tokens in a step ("ring", stream, slice)."""

    lost: tuple = ()

    def _convolve(self, x, pool, index, sources):
        stream = self.streams.index(pool.rows.data_ptr())
        if self.lost[:2] == ("ring", stream):
            rows = sources.write_rows.clone()
            rows[self.lost[2]] = SINK_ROW
            sources = replace(sources, write_rows=rows)
        if self.lost == ("entry", stream):
            entries = torch.arange(sources.dest.shape[0]) < index.entry_dest.numel()
            sources = replace(sources, dest=torch.where(entries, SINK_ROW, sources.dest))
        return super()._convolve(x, pool, index, sources)

    def _attend(self, x, pool, index, group, window, row):
        layers = [layer.k.data_ptr() for layer in self.layers[group]]
        if self.lost == ("stamp", group, layers.index(pool.k.data_ptr())):
            kv = list(index.kv)
            kv[group] = replace(kv[group], stamp_pages=torch.full_like(kv[group].stamp_pages, SINK_PAGE))
            index = replace(index, kv=tuple(kv))
        return super()._attend(x, pool, index, group, window, row)


def check_losses() -> None:
    """A write that did not happen is a refused checkpoint, damage found at a resume is computed anew; answers are right."""
    streams, layers = 3, ((0, 0), (1, 0))
    for lost in [*(("entry", n) for n in range(streams)), *(("stamp", *place) for place in layers)]:
        world, model = _lossy_world()
        model.lost = lost
        expect(world, SHARED[:18], 0)
        counters = world.engine.scheduler.counters
        assert not world.engine.manager.tree.checkpoints, f"published without {lost}"
        assert counters.num_refused_checkpoints == 3, f"{counters.num_refused_checkpoints} of 3 refused without {lost}"
        model.lost = ()
        expect(world, SHARED[:18], 0)
        expect(world, SHARED[:18], 16)
    for damage in [*(("rows", n) for n in range(streams)), *(("page", *place) for place in layers)]:
        world, _ = _lossy_world()
        expect(world, SHARED[:18], 0)
        _damage(world, damage)
        world.add(SHARED[:18], params={"max_tokens": 3, "temperature": 0.0, "logprobs": 1})
        finish(world)
        found = world.engine.scheduler.counters.num_damaged_resumes
        assert found == 1, f"{found} damaged resumes after damage of {damage}"
        expect(world, SHARED[:18], 16)
        assert world.engine.scheduler.counters.num_damaged_resumes == 1, f"damage of {damage} stays"
    _check_lost_ring_rows()


def _check_lost_ring_rows() -> None:
    # A row that no step reads, only the checkpoint of a request that is preempted in the middle of its prompt.
    schedule = {"chunk_sizes": (10,), "preempt_percent": 100}
    world, model = _lossy_world(checkpoint_interval=32, schedule=schedule)
    others = [(token + 1) % VOCAB for token in SHARED]
    for prompt in (SHARED[:18], others[:18]):
        world.add(prompt, params={"max_tokens": 3, "temperature": 0.0})
    model.lost = ("ring", 1, slice(15, 16))
    world.do(Step())
    model.lost = ()
    finish(world)
    assert world.engine.scheduler.counters.num_refused_checkpoints == 1, "published from a ring with a hole"
    # A device that always loses: the request ends with an error, and soon.
    world, model = _lossy_world()
    model.lost = ("ring", 0, slice(None))
    world.engine.add(make_request("lost", SHARED[:9]))
    errors = [output.error for _ in range(30) if world.engine.has_work for output in world.engine.step()]
    assert errors[-1] is not None, "no error from a device that loses all"
    assert not world.engine.has_work, "a request goes on, on a device that loses all"


def _lossy_world(**settings) -> tuple[World, Lossy]:
    world = make_world(MIXED, max_num_batched_tokens=64, **settings)
    runner, pools = world.engine._runner, world.engine.pools
    model = Lossy(world.config, CPU)
    model.streams, model.layers = [pool.rows.data_ptr() for pool in pools.conv], pools.kv
    runner._place = replace(runner._place, model=model)
    world._after_step = None
    world.player._after_step = None
    return world, model


def _damage(world: World, damage: tuple) -> None:
    checkpoints, pools = world.engine.manager.tree.checkpoints, world.engine.pools
    number = next(n for n, checkpoint in enumerate(checkpoints) if checkpoint.boundary == 16)
    if damage[0] == "rows":
        world.do(Damage(number, damage[1], 1))
        return
    _, group, layer = damage
    checkpoint = checkpoints[number]
    held = checkpoint.windows.get(group)
    page = held[-1].page if held else checkpoint.node.page
    pools.kv[group][layer].k[page] += 1
    pools.kv[group][layer].page_tags[page] += 1
