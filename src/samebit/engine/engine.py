"""The engine: a scheduler, a runner and the text side of requests, driven one step at a time. Knows no process or HTTP."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import torch

from samebit.core.config import EngineConfig
from samebit.core.errors import InvalidRequestError
from samebit.core.plan import BatchPlan, StepOutput
from samebit.core.request import EngineInfo, EngineOutput, Request
from samebit.engine.cache_view import cache_view, place_of
from samebit.engine.device import (
    cache_budget,
    capture_graphs,
    device_memory,
    free_bytes,
    is_lost,
    make_runner,
    settled,
    tell_memory,
)
from samebit.engine.interrupts import uninterrupted
from samebit.engine.loading import NextWeights, check_room, load, load_again, with_draft_cost
from samebit.engine.memory import memory_of
from samebit.engine.messages import Admitted
from samebit.engine.model_source import resolve_model
from samebit.engine.output import OutputProcessor
from samebit.engine.profile import fingerprint, numerics_profile
from samebit.engine.shadow import ShadowAudit
from samebit.engine.sizing import size_pools
from samebit.engine.timeline import Timeline
from samebit.engine.tokenizer import Tokenizer
from samebit.engine.views import Look, View
from samebit.grammar.grammars import Grammars
from samebit.grammar.vocabulary import Vocabulary
from samebit.scheduler.scheduler import Scheduler
from samebit.scheduler.sequence import Progress
from samebit.speculative.drafter import Drafter
from samebit.speculative.host import HostDrafter
from samebit.speculative.load import host_drafter, num_host_drafts
from samebit.state.manager import StateManager
from samebit.state.pools import StatePools

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# Admissions that are kept until somebody asks for them.
_MAX_ADMITTED = 1 << 12


class _Launched(NamedTuple):
    """A step that the device has been given: what waits for its results, and when it was begun."""

    plan: BatchPlan
    read: Callable[[], StepOutput]
    began_s: float


class Engine:
    """Owner of a model, its state and its requests. Not thread-safe: one loop calls it.

    `drafter` guesses tokens instead of the one that the settings name. Raises ConfigError or ModelError (naming the
    setting, tensor or key) when the model cannot be served.
    """

    def __init__(self, config: EngineConfig, drafter: HostDrafter | None = None) -> None:
        config.validate()
        folder = resolve_model(config.model)
        config = settled(config, folder)
        device = torch.device(config.device)
        self.tokenizer = Tokenizer(folder)
        self._loaded = loaded = load(config, folder, device)
        config = with_draft_cost(config, loaded)
        self._config, self._device = config, device
        kernels, model = loaded.kernels, loaded.model
        guesser, max_drafts = _speculation(config, loaded.drafter)
        layout, self.drafter_part = loaded.layout()
        budget = cache_budget(config, loaded, max_drafts, device)
        geometry, max_length = size_pools(config, layout, model.max_length, max_drafts, budget, free_bytes(device))
        self.pools = StatePools(geometry, device, poison=config.poison)
        self.manager = StateManager(
            geometry,
            enable_caching=config.enable_prefix_caching,
            order_seed=config.schedule.seed if config.poison else None,
        )
        self.grammars = Grammars(vocabulary_of(self.tokenizer, model.vocab_size))
        self.scheduler = Scheduler(config, self.manager, max_length, drafter or guesser, self.grammars.matcher)
        self._runner = make_runner(config, loaded, self.pools, device)
        capture_graphs(config, self._runner, loaded, geometry)
        self._outputs = OutputProcessor(self.tokenizer)
        self._totals = {
            "generation_tokens": 0,
            "failed_steps": 0,
            "num_weight_updates": 0,
            "num_steps": 0,
            "step_s": 0.0,
            "waited_s": 0.0,
        }
        self._launched = deque[_Launched]()
        self._audit = ShadowAudit(config, self.scheduler)
        self.timeline = Timeline()
        self._arrived_s: dict[str, float] = {}
        self._admitted = deque[Admitted](maxlen=_MAX_ADMITTED)
        profile = numerics_profile(config, kernels)
        self.info = EngineInfo(
            model=config.model,
            max_length=max_length,
            vocab_size=model.vocab_size,
            system_fingerprint=fingerprint(folder, profile),
            num_speculative_tokens=max_drafts,
            profile=profile,
            memory={"parameters": model.num_parameters, **memory_of(geometry), **device_memory(device)},
        )
        tell_memory(self.info.memory, device)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do for requests."""
        scheduler = self.scheduler
        return scheduler.num_running + scheduler.num_waiting > 0 if self._audit.is_running else scheduler.has_work

    @property
    def has_audits(self) -> bool:
        """Whether `step` has anything to do for the shadow audit."""
        return self._audit.has_work

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequestError names what is wrong with it, and then nothing has changed."""
        request.params.validate()
        vocab_size = self.info.vocab_size
        params = request.params
        named = (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias))
        for param, ids in (("prompt", request.prompt_token_ids), *named):
            for token_id in ids or ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(f"token id {token_id}: must be 0 .. {vocab_size - 1}", param=param)
        self.scheduler.add(request)
        self._outputs.open(request)
        self._audit.opened(request)
        self._arrived_s[request.request_id] = time.monotonic()
        self.timeline.arrived(request, self._arrived_s[request.request_id])

    def is_prepared(self, request: Request) -> bool:
        """Whether `prepare` has nothing to do for `request`."""
        return self.grammars.is_ready(request)

    def prepare(self, request: Request) -> None:
        """Compile the grammar that `request` asks for, so that `add` need not; in any thread. Raises as `add` does."""
        request.params.validate()
        self.grammars.prepare(request)

    def abort(self, request_id: str) -> bool:
        """End a request without further output; False if it is not open."""
        self._outputs.close(request_id)
        self._audit.ended(request_id)
        self._arrived_s.pop(request_id, None)
        self.timeline.ended(request_id, "abort", time.monotonic())
        return self.scheduler.finish(request_id, "abort")

    def step(self) -> list[EngineOutput]:
        """Plan, execute and commit one step. A step that fails ends its own requests with an error, and no others.

        Ctrl-C waits until the step is complete: half a step would leave requests and pools that do not agree.
        """
        with uninterrupted():
            return self._step()

    def take_admitted(self) -> list[Admitted]:
        """Requests that were first admitted since the last call."""
        admitted = list(self._admitted)
        self._admitted.clear()
        return admitted

    def take_compile_times(self) -> list[float]:
        """Seconds that the compilation of grammars took since the last call."""
        return self.grammars.take_compile_times()

    def take_eviction_times(self) -> list[float]:
        """Seconds that it took each time to make room in the prefix cache since the last call."""
        return self.manager.evicted.take_times()

    def flush_cache(self) -> None:
        """Empty the prefix cache, but for what a running request is about to resume from."""
        self.manager.drop_all_checkpoints()

    def load_weights(self, model: str) -> NextWeights:
        """Another checkpoint, ready to be served; changes nothing, and may run beside `step` in a thread of its own.

        It waits in host memory. Raises ConfigError or ModelError if it cannot take the old one's place.
        """
        folder = resolve_model(model)
        check_room(folder, free_bytes(torch.device("cpu")))
        exchange = load_again(self._config, folder, self._loaded)
        profile = numerics_profile(self._config, self._loaded.kernels)
        return NextWeights(model, exchange, fingerprint(folder, profile), profile)

    def use_weights(self, weights: NextWeights) -> EngineInfo:
        """Serve these from now on; nothing is hit that was computed with those of before. No request may be open.

        They are copied to where the old ones are, so that recorded steps stay valid. The tokenizer and all settings stay.
        """
        assert not self.has_work, "weights do not change under a request"
        self._audit.drop_all()
        while self.scheduler.has_work:
            self.step()
        if not weights.exchange.make():
            self._runner.forget()
            capture_graphs(self._config, self._runner, self._loaded, self.pools.geometry)
        self.manager.begin_epoch()
        self.info = msgspec.structs.replace(
            self.info, model=weights.model, system_fingerprint=weights.fingerprint, profile=weights.profile
        )
        self._totals["num_weight_updates"] += 1
        return self.info

    def _step(self) -> list[EngineOutput]:
        began_s = time.monotonic()
        outputs = self._one_step()
        self._totals["num_steps"] += 1
        self._totals["step_s"] += time.monotonic() - began_s
        return outputs

    def _one_step(self) -> list[EngineOutput]:
        """Launch a step if none is in flight, and the next one behind it if that can be; then take in the results of the older."""
        self._audit.begin()
        if not self.scheduler.has_work:
            return []  # what there was to do was a second run, and that has been given up
        if not self._launched:
            plan = self.scheduler.plan()
            try:
                self._launch(plan)
            except BaseException as error:  # noqa: BLE001 - a step is a boundary: its requests end with what went wrong
                return self._failed(plan, error)
        problem = None
        ahead = self.scheduler.plan_ahead() if self._config.async_scheduling else None
        if ahead is not None:
            try:
                self._launch(ahead)
            except BaseException as error:  # noqa: BLE001 - as above; but the older step is still good
                _log.error("step %d, planned ahead, failed", ahead.step, exc_info=error)
                problem = error
        launched = self._launched.popleft()
        try:
            output = self._waited(launched.read)
        except BaseException as error:  # noqa: BLE001 - as above
            return self._failed(launched.plan, error)
        gained = self.scheduler.commit(output)
        self.timeline.step(launched.plan.rows, output.accepted, launched.began_s, time.monotonic())
        outputs = [self._deliver(progress) for progress in self._audit.sift(gained)]
        if ahead is not None and problem is not None:
            outputs += self._failed(ahead, problem)
        return outputs

    def _launch(self, plan: BatchPlan) -> None:
        began_s = time.monotonic()
        self._note_admitted(began_s)
        self._audit.make_way()
        launch = partial(self._runner.launch, plan)
        # A CPU runs a step while it is launched.
        read = self._waited(launch) if self._device.type == "cpu" else launch()
        self._launched.append(_Launched(plan, read, began_s))

    def _waited(self, call: Callable[[], _T]) -> _T:
        """What `call` gives; the time until then is the device's."""
        began_s = time.monotonic()
        try:
            return call()
        finally:
            self._totals["waited_s"] += time.monotonic() - began_s

    def _failed(self, plan: BatchPlan, error: BaseException) -> list[EngineOutput]:
        """End all requests of the steps in flight, the first of which `plan` is."""
        _log.error("step %d failed (%d rows)", plan.step, len(plan.rows), exc_info=error)
        self._launched.clear()
        self._totals["failed_steps"] += 1
        message = f"step {plan.step} failed: {type(error).__name__}: {error}"
        failed = [self._deliver(progress) for progress in self._audit.sift(self.scheduler.fail(message))]
        if not isinstance(error, Exception) or is_lost(self._device):
            raise error  # the whole program is to end, or to go on elsewhere
        return failed

    def look(self, look: Look) -> View:
        """What `look` asks to see, as of now."""
        if look.subject == "requests":
            return self.timeline.view(look)
        return cache_view(self.manager, look, self.timeline.place(look), self._config.checkpoint_interval)

    def stats(self) -> dict[str, float]:
        """Gauges and totals: requests, use of every pool from 0 to 1, tokens, cache and audit counters."""
        manager = self.manager
        usage = {
            f"usage_{group.window or 'full'}": pool.num_used / pool.total
            for group, pool in zip(manager.geometry.layout.groups, manager.pages, strict=True)
        }
        return {
            "num_running": self.scheduler.num_running,
            "num_waiting": self.scheduler.num_waiting,
            **usage,
            "usage_checkpoints": manager.snapshots.num_used / manager.snapshots.total,
            "evicted_tokens": manager.num_evicted_tokens,
            **self.scheduler.counters.totals(),
            **self.grammars.counts.totals(),
            **self._audit.totals(),
            **self._totals,
            "host_s": self._totals["step_s"] - self._totals["waited_s"],
        }

    def _note_admitted(self, now_s: float) -> None:
        """Note how long the requests waited whose first step begins, and where they attached to the prefix cache."""
        for admission in self.scheduler.take_admitted():
            name = admission.request_id
            self._admitted.append(Admitted(name, now_s, now_s - self._arrived_s.pop(name, now_s)))
            self.timeline.admitted(name, place_of(admission, self.manager.geometry.page_size), now_s)

    def _deliver(self, progress: Progress) -> EngineOutput:
        output = self._outputs.process(progress)
        self._audit.delivered(progress, len(output.token_ids), is_over=output.finish_reason is not None)
        if output.finish_reason is not None and progress.finish_reason is None:
            self.scheduler.finish(output.request_id, output.finish_reason)
        if output.finish_reason is not None:
            self.timeline.ended(output.request_id, output.finish_reason, time.monotonic())
        self._totals["generation_tokens"] += len(output.token_ids)
        return output


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The first `size` tokens of a tokenizer, as grammars know them."""
    special = {name: token_id for name, token_id in tokenizer.special_tokens().items() if token_id < size}
    return Vocabulary(size, tokenizer.token_bytes, special, partial(tokenizer.encode, allow_special=False))


def _speculation(config: EngineConfig, drafter: Drafter | None) -> tuple[HostDrafter | None, int]:
    """Who guesses on the host, if it is not the device, and the most guesses a step."""
    wanted = config.speculative_config
    if drafter is not None:
        return None, drafter.max_drafts
    return (None, 0) if wanted is None else (host_drafter(wanted), num_host_drafts(wanted))
