"""The real step with one write left out or one tag spoiled: refused or dropped, and the bits are right anyway."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from samebit.core.config import EngineConfig
from samebit.core.request import Request, SamplingParams
from samebit.engine.sizing import size_pools
from samebit.kernels.selection import select_kernels
from samebit.kernels.values import SINK_ROW
from samebit.models.base import load_model
from samebit.runner.runner import LocalRunner
from samebit.scheduler.scheduler import Scheduler
from samebit.state.manager import StateManager
from samebit.state.pools import StatePools
from tests.random_checkpoint import SMALL, write_checkpoint

PROMPT = random.Random(0).choices(range(256), k=19)
TAIL = random.Random(1).choices(range(256), k=3)
HISTORY = SMALL["sconv_kernel_size"] - 1
STREAMS = 3 * SMALL["num_hidden_layers"]
LAYERS = [(group, layer) for group, layers in enumerate((2, 1)) for layer in range(layers)]
CPU = torch.device("cpu")


class LossyKernels:
    """Kernels that leave out the writes that `skip` names: ("entry", stream, row), ("ring", stream), ("stamp", g, layer)."""

    def __init__(self, kernels) -> None:
        self._kernels = kernels
        self.pools: StatePools | None = None
        self.skip: tuple | None = None

    def __getattr__(self, name):
        return getattr(self._kernels, name)

    def short_conv(self, x, taps, rows, row_tags, ix, *others):
        return self._kernels.short_conv(x, taps, rows, row_tags, self._lossy(rows, ix), *others)

    def short_conv_norm(self, x, taps, rows, row_tags, ix, *others):
        return self._kernels.short_conv_norm(x, taps, rows, row_tags, self._lossy(rows, ix), *others)

    def _lossy(self, rows, ix):
        stream = next(i for i, pool in enumerate(self.pools.conv) if pool.rows is rows)
        match self.skip:
            case ("entry", lost, row) if lost == stream:
                dest = ix.entry_dest.clone()
                dest[:, row] = SINK_ROW
                return replace(ix, entry_dest=dest)
            case ("ring", lost) if lost == stream:
                return replace(ix, write_rows=torch.full_like(ix.write_rows, SINK_ROW))
        return ix

    def conv_heads(self, q, kv, taps, rows, row_tags, conv_ix, gains, eps, k_pages, v_pages, page_tags, kv_ix):
        pools = ((g, i, pool) for g, group in enumerate(self.pools.kv) for i, pool in enumerate(group))
        place = next((g, i) for g, i, pool in pools if pool.k is k_pages)
        if self.skip == ("stamp", *place):
            kv_ix = replace(kv_ix, stamp_pages=torch.zeros_like(kv_ix.stamp_pages))
        pages = k_pages, v_pages, page_tags, kv_ix
        return self._kernels.conv_heads(q, kv, taps, rows, row_tags, self._lossy(rows, conv_ix), gains, eps, *pages)


class Device:
    """A scheduler and the real runner over poisoned pools."""

    def __init__(self, kernels: LossyKernels, model, *, enable_caching: bool = True) -> None:
        config = EngineConfig(
            page_size=4, checkpoint_interval=8, max_num_seqs=2, num_pages=30, num_window_pages=30, num_checkpoints=12
        )
        geometry, max_length = size_pools(config, model.state_layout(), 64)
        self.pools = kernels.pools = StatePools(geometry, CPU, poison=True)
        kernels.skip = None
        self.kernels = kernels
        self.manager = StateManager(geometry, enable_caching=enable_caching, order_seed=0)
        self.scheduler = Scheduler(config, self.manager, max_length)
        self.runner = LocalRunner(model, kernels, self.pools, CPU)

    @property
    def counters(self):
        return self.scheduler.counters

    def ask(self, prompt: list[int], *, skip: tuple | None = None, skip_step: int | None = None) -> tuple[list, int]:
        """All bits of an answer, and the depth of its hit; `skip` holds in one step, or in all."""
        params = SamplingParams(max_tokens=3, temperature=0.0)
        self.scheduler.add(Request(request_id="r", prompt_token_ids=prompt, params=params, seed=0))
        bits, cached, step = [], 0, 0
        while self.scheduler.has_work:
            self.kernels.skip = skip if skip_step in (None, step) else None
            for progress in self.scheduler.commit(self.runner.launch(self.scheduler.plan())()):
                assert progress.error is None, progress.error
                bits += [(item.token_id, item.logprob.hex()) for item in progress.tokens]
                cached = progress.num_cached_tokens
            self.scheduler.check()
            step += 1
        return bits, cached

    def deepest(self):
        return max((c for c in self.manager.tree.checkpoints if c.boundary <= 16), key=lambda c: c.boundary)


@pytest.fixture(scope="module")
def parts(tmp_path_factory, kernel_kind):
    kernels = LossyKernels(select_kernels(kernel_kind, num_threads=1))
    return kernels, load_model(write_checkpoint(tmp_path_factory.mktemp("small")), kernels, CPU)


@pytest.fixture(scope="module")
def cold(parts):
    """Answers without a cache."""
    prompts = (PROMPT, PROMPT + TAIL)
    return [Device(*parts, enable_caching=False).ask(prompt)[0] for prompt in prompts]


@pytest.fixture
def device(parts):
    return Device(*parts)


def test_a_sound_device_publishes_and_hits(device, cold):
    assert device.ask(PROMPT) == (cold[0], 0)
    assert [c.boundary for c in device.manager.tree.checkpoints] == [8, 16, 20]
    assert device.ask(PROMPT + TAIL) == (cold[1], 16)
    assert (device.counters.num_refused_checkpoints, device.counters.num_damaged_resumes) == (0, 0)


@pytest.mark.parametrize("stream", range(STREAMS))
@pytest.mark.parametrize("row", range(HISTORY))
def test_a_checkpoint_row_that_no_kernel_wrote_is_refused(device, cold, stream, row):
    assert device.ask(PROMPT, skip=("entry", stream, row)) == (cold[0], 0)
    assert not device.manager.tree.checkpoints
    assert device.counters.num_refused_checkpoints == 3
    assert device.ask(PROMPT + TAIL) == (cold[1], 0)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_page_that_no_kernel_stamped_is_refused(device, cold, layer):
    assert device.ask(PROMPT, skip=("stamp", *layer)) == (cold[0], 0)
    assert not device.manager.tree.checkpoints
    assert device.counters.num_refused_checkpoints == 3
    assert device.ask(PROMPT + TAIL) == (cold[1], 0)


@pytest.mark.parametrize("stream", range(STREAMS))
def test_a_ring_row_that_no_kernel_wrote_is_seen_in_the_next_step(device, cold, stream):
    assert device.ask(PROMPT, skip=("ring", stream), skip_step=1) == (cold[0], 0)
    assert device.counters.num_damaged_resumes == 1


@pytest.mark.parametrize("stream", range(STREAMS))
@pytest.mark.parametrize("row", range(HISTORY))
def test_a_damaged_checkpoint_row_is_dropped_and_computed_cold(device, cold, stream, row):
    device.ask(PROMPT)
    damaged = device.deepest()
    place = device.pools.geometry.snapshot_base(damaged.snapshot) + row
    device.pools.conv[stream].rows[place] = torch.nan
    device.pools.conv[stream].row_tags[place] += 1
    assert device.ask(PROMPT + TAIL)[0] == cold[1]
    assert damaged not in device.manager.tree.checkpoints
    assert device.counters.num_damaged_resumes == 1
    assert device.ask(PROMPT + TAIL) == (cold[1], 20)
    assert device.counters.num_damaged_resumes == 1


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("index", [0, 2, 3])
def test_a_damaged_page_is_dropped_and_computed_cold(device, cold, layer, index):
    device.ask(PROMPT)
    damaged = device.deepest()
    group, place = layer
    if group in damaged.windows:
        held = {item.index: item.page for item in damaged.windows[group]}
    else:
        held = {i: node.page for i, node in enumerate([*damaged.node.lineage()][-2::-1])}
    is_seen = index in held
    assert is_seen or (group in damaged.windows and index == 0)
    if is_seen:
        pool = device.pools.kv[group][place]
        pool.k[held[index]] = torch.nan
        pool.page_tags[held[index]] += 1
    assert device.ask(PROMPT + TAIL)[0] == cold[1]
    assert device.counters.num_damaged_resumes == is_seen
    assert (damaged in device.manager.tree.checkpoints) != is_seen
    # Nothing was published over the damaged page: the next hit is sound.
    assert device.ask(PROMPT + TAIL) == (cold[1], 20)
    assert device.counters.num_damaged_resumes == is_seen
