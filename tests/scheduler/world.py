"""A scheduler on the integer device, watched: every step checks tokens, writes, checkpoints, hits, ids and order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from samebit.core.config import EngineConfig, Schedule
from samebit.core.plan import BatchPlan, StepOutput
from samebit.core.request import Request, SamplingParams
from samebit.scheduler.scheduler import Scheduler
from samebit.scheduler.sequence import Progress
from samebit.state.layout import StateGeometry
from samebit.state.manager import StateManager
from samebit.state.nodes import Checkpoint
from tests.fakes import VOCAB, Answer, ColdModel, FakeRunner, answer, make_geometry
from tests.forced_drafts import ForcedDrafts

EOS = 3


@dataclass
class Watched:
    """A request, what it must get, and what it has got."""

    request: Request
    wanted: Answer
    outputs: list[tuple[int, float]] = field(default_factory=list)
    prompt: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [token for token, _ in self.outputs]


class World:
    """Owner of scheduler, manager and device. With `exact` off, faults are expected and device bytes are not compared."""

    def __init__(
        self,
        geometry: StateGeometry | None = None,
        *,
        interval: int = 8,
        budget: int = 16,
        schedule: Schedule | None = None,
        enable_caching: bool = True,
        order_seed: int | None = 0,
        accepts: Sequence[int] = (),
        on_device: bool = False,
        priority_aging_steps: int = 64,
        runs_ahead: bool = False,
    ) -> None:
        self.geometry = geometry or make_geometry()
        config = EngineConfig(
            page_size=self.geometry.page_size,
            checkpoint_interval=interval,
            max_num_seqs=self.geometry.num_slots,
            max_num_batched_tokens=budget,
            schedule=schedule or Schedule(),
            priority_aging_steps=priority_aging_steps,
        )
        self.manager = StateManager(self.geometry, enable_caching=enable_caching, order_seed=order_seed)
        self._accepts = accepts
        drafter = self._forced_drafts if accepts and not on_device else None
        self.scheduler = Scheduler(config, self.manager, self.geometry.max_length, drafter)
        self.runner = FakeRunner(self.geometry)
        if accepts and on_device:
            self._proposers: dict[str, ForcedDrafts] = {}
            self.runner.guess = self._guess
        self.plan: BatchPlan | None = None
        self._runs_ahead = runs_ahead
        self._launched: deque[StepOutput] = deque()
        self.requests: dict[str, Watched] = {}
        self.live: set[str] = set()
        self.reasons: dict[str, str | None] = {}
        self._seen: set[Checkpoint] = set()

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return self.manager.tree.checkpoints

    @property
    def counters(self):
        return self.scheduler.counters

    def add(
        self,
        prompt: list[int],
        *,
        salt: str = "",
        seed: int = 0,
        start: int = 1,
        priority: int = 0,
        effort_changed: bool = False,
        **params,
    ) -> Watched:
        """Submit a request; `params` are SamplingParams fields."""
        name = f"r{len(self.requests)}"
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **params}),
            seed=seed,
            eos_token_ids=(EOS,),
            cache_salt=salt,
            prompt_logprobs_start=start,
            priority=priority,
            effort_changed=effort_changed,
        )
        self.scheduler.add(request)
        watched = Watched(request, answer(self.geometry.layout, request, self.geometry.max_length))
        self.requests[name] = watched
        self.live.add(name)
        return watched

    def abort(self, watched: Watched) -> None:
        """End a request from outside, between steps or in one."""
        name = watched.request.request_id
        assert self.scheduler.finish(name, "abort") == (name in self.live)
        self.live.discard(name)

    def step(self, *, abort: Iterable[Watched] = ()) -> None:
        """One watched step; `abort` are requests to abort while it is in flight."""
        oldest = self.scheduler._running[0] if self.scheduler.num_running else None
        num_preemptions = oldest.num_preemptions if oldest else 0
        if not self._launched:
            self._execute(self.scheduler.plan())
        following = self.scheduler.plan_ahead() if self._runs_ahead else None
        if following is not None:
            self._execute(following)
        for watched in abort:
            self.abort(watched)
        for progress in self.scheduler.commit(self._launched.popleft()):
            self._take(progress)
        self.scheduler.check()
        assert oldest is None or oldest.num_preemptions == num_preemptions, "the oldest was preempted"
        for checkpoint in self.checkpoints:
            if checkpoint not in self._seen:
                self.check_bytes(checkpoint)
        self._seen = set(self.checkpoints)

    def _execute(self, plan: BatchPlan) -> None:
        self.plan = plan
        self._check_plan(plan)
        self._launched.append(self.runner.execute(plan))
        self._check_writes()

    def run(self, *, max_steps: int | None = None) -> None:
        """Step until nothing is left to do; everything must end within as many steps as there are tokens."""
        live = [self.requests[name].request for name in self.live]
        bound = sum(len(r.prompt_token_ids) + (r.params.max_tokens or self.geometry.max_length) + 6 for r in live) + 10
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps <= (max_steps or bound), "requests are starved"
        assert not self.live, "a request never ended"
        self.check_drained()

    def ask(self, prompt: list[int], **params) -> Watched:
        """Submit and run until idle."""
        watched = self.add(prompt, **params)
        self.run()
        return watched

    def check_drained(self) -> None:
        """Nothing is held but by the cache."""
        assert not self.manager.slots.num_used
        assert self.manager.snapshots.num_used == len(self.checkpoints)
        assert all(not checkpoint.pins for checkpoint in self.checkpoints)
        used = [set(pool.references()) for pool in self.manager.pages]
        assert used == self._cached_pages()

    def check_empty(self) -> None:
        """Dropping the cache leaves every id free."""
        self.manager.drop_all_checkpoints()
        for pool in (*self.manager.pages, self.manager.snapshots, self.manager.slots):
            assert pool.num_free == pool.total, pool.name
        assert not list(self.manager.tree.nodes())

    def check_bytes(self, checkpoint: Checkpoint) -> None:
        """The device holds exactly what a cold run of the checkpoint's key leaves there, in every component."""
        geometry, model = self.geometry, ColdModel(self.geometry.layout)
        path = [*checkpoint.node.lineage()][-2::-1]
        for token in (token for node in path for token in node.key):
            model.feed(token)
        assert model.num_tokens == checkpoint.boundary == len(path) * geometry.page_size
        history, size = geometry.layout.history, geometry.page_size
        for mixer, past in zip(model.mixers, model.past, strict=True):
            if mixer.stream >= 0:
                base = geometry.snapshot_base(checkpoint.snapshot)
                assert self.runner.rows[mixer.stream][base : base + history] == past[-history:], mixer
                continue
            pages = {i: node.page for i, node in enumerate(path)}
            if mixer.span is not None:
                pages = {held.index: held.page for held in checkpoint.windows[mixer.group]}
                first = max(0, checkpoint.boundary - mixer.span + 1) // size
                assert set(pages) >= set(range(first, len(path))), "the window is not covered"
            for index, page in pages.items():
                assert page is not None
                assert self.runner.kv[mixer.layer][page] == past[index * size : (index + 1) * size], mixer

    def _guess(self, request_id: str, num_known: int) -> list[int]:
        proposer = self._proposers.setdefault(request_id, self._forced_drafts(self.requests[request_id].request))
        return proposer.propose([0] * num_known, self.geometry.max_drafts)

    def _forced_drafts(self, request: Request) -> ForcedDrafts:
        def wanted() -> list[int]:
            return [token for token, _ in self.requests[request.request_id].wanted.outputs]

        return ForcedDrafts(request, self._accepts, wanted, VOCAB)

    def _take(self, progress: Progress) -> None:
        assert progress.request_id in self.live, "an ended request reports"
        watched = self.requests[progress.request_id]
        params = watched.request.params
        assert progress.error is None, progress.error
        watched.outputs += [(item.token_id, item.logprob) for item in progress.tokens]
        watched.prompt += [(item.token_id, item.logprob) for item in progress.prompt]
        assert all(len(item.top_ids) == (params.logprobs or 0) for item in progress.tokens)
        assert all(len(item.top_ids) == params.prompt_logprobs for item in progress.prompt)
        watched.num_cached_tokens = progress.num_cached_tokens
        watched.num_preemptions = progress.num_preemptions
        self.reasons[progress.request_id] = progress.cache_miss_reason
        wanted = watched.wanted
        assert watched.outputs == wanted.outputs[: len(watched.outputs)], "tokens differ from the oracle's"
        assert watched.prompt == wanted.prompt[: len(watched.prompt)], "prompt scores differ from the oracle's"
        if progress.tokens:
            assert watched.prompt == wanted.prompt, "a prompt token was not scored"
        if progress.finish_reason is not None:
            watched.finish_reason = progress.finish_reason
            assert watched.outputs == wanted.outputs
            assert watched.finish_reason == wanted.finish_reason
            self.live.discard(progress.request_id)

    def _check_plan(self, plan: BatchPlan) -> None:
        size = self.geometry.page_size
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows share a slot"
        assert all(row.slot for row in plan.rows), "a row has the inert slot"
        for row in plan.rows:
            if row.num_tokens and not row.token_ids:
                behind = row.start - self.runner.length[row.slot]
                most = self.geometry.max_drafts if self._launched else 0  # guesses that are not verified yet
                assert 0 <= behind <= most, "a row starts where its state does not end"
            if row.resume_snapshot:
                request = self.requests[row.request_id].request
                assert row.start % size == 0
                assert row.num_tokens >= 1, "a hit leaves at least one token to compute"
                assert any(c.snapshot == row.resume_snapshot and c.pins for c in self.checkpoints), "not pinned"
                assert self.manager.namespace(request.cache_salt) in self._namespaces(row.resume_snapshot)
        for entry in plan.entries:
            assert entry.boundary > 0
            assert entry.boundary % size == 0, "a boundary is a multiple of the page size"
        kept = [entry.snapshot for entry in plan.entries if entry.snapshot]
        assert len(set(kept)) == len(kept), "two entries share a snapshot"
        for group, page in plan.retired.pages:
            assert not any(d.group == group and d.page == page and d.stamp for d in plan.page_deltas)

    def _namespaces(self, snapshot: int) -> set[str]:
        node = next(c.node for c in self.checkpoints if c.snapshot == snapshot)
        root = [*node.lineage()][-1]
        return {name for name, each in self.manager.tree._roots.items() if each is root}

    def _check_writes(self) -> None:
        """No write to what the cache owns, nor to anything that not exactly one sequence holds."""
        cached = self._cached_pages()
        for group, page in self.runner.written_pages:
            assert page, "the sink page took a live token"
            assert page not in cached[group], "a published page was written"
            assert self.manager.pages[group].references()[page] == 1, "a shared or free page was written"
        owned = {checkpoint.snapshot for checkpoint in self.checkpoints}
        assert not (self.runner.written_snapshots & owned), "a published snapshot was written"

    def _cached_pages(self) -> list[set[int]]:
        pages: list[set[int]] = [set() for _ in self.geometry.layout.groups]
        for g, group in enumerate(self.geometry.layout.groups):
            if group.window is None:
                pages[g] = {node.page for node in self.manager.tree.nodes() if node.page is not None}
            else:
                pages[g] = {held.page for c in self.checkpoints for held in c.windows[g]}
        return pages
