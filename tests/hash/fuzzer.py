"""Random operations on a real engine with the hash model, recorded as a script that can be replayed.

Each answer is compared with the cold interpreter's as it comes, each checkpoint with what a cold run leaves in memory.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from samebit.audit.replay import Abort, Add, Damage, Drain, Evict, Operation, Player, Script, Step
from samebit.core.request import Request
from samebit.engine.engine import Engine
from samebit.models.hash import HashConfig
from samebit.state.nodes import Checkpoint
from tests.driving import watch_steps
from tests.forced_drafts import ForcedDrafts
from tests.hash.oracle import Oracle, check_bytes, drawing_kernels, expected_drafts

VOCAB = 61
MAX_LENGTH = 40
PAGE = 4
SHARED = random.Random(7).choices(range(VOCAB), k=MAX_LENGTH)

# Mixers and K: one layer of each kind; no full attention; nothing else; three groups, one window below a page; conv and
# full layers in turn; two windows; a history longer than a page.
LAYOUTS = [
    (["conv", "conv", 6, "conv", "conv", "conv", "conv", "full", "conv", "conv"], 4),
    (["conv", 6, "conv", 6, "conv"], 4),
    (["full", "full"], 2),
    (["conv", 3, "conv", "full", 9, "conv", 3], 3),
    (["conv", "full", "conv", "conv", "full"], 3),
    ([5, "conv", 8], 2),
    (["conv", 6, "full"], 6),
]
# The smallest hold one request and little else.
POOLS = [
    {"max_num_seqs": 4, "num_checkpoints": 16, "num_pages": 60, "num_window_pages": 60},
    {"max_num_seqs": 3, "num_checkpoints": 3, "num_pages": 12, "num_window_pages": 12},
    {"max_num_seqs": 2, "num_checkpoints": 1, "num_pages": 10, "num_window_pages": 5},
    {"max_num_seqs": 8, "num_checkpoints": 5, "num_pages": 18, "num_window_pages": 18},
]
SCHEDULES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "chunk_sizes": st.sampled_from([(), (), (1,), (7,), (3, 5, 2), (4,), (8, 1)]),
        "preempt_percent": st.sampled_from([0, 0, 10, 40]),
        "max_rows": st.sampled_from([0, 0, 1, 2]),
        "pad_tokens": st.sampled_from([0, 0, 1, 5]),
        "pad_rows": st.sampled_from([0, 0, 1, 3]),
        "shuffle_rows": st.booleans(),
        "spoil_percent": st.sampled_from([0, 0, 30, 100]),
    }
)
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9),
        "temperature": st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    },
    optional={
        "ignore_eos": st.just(True),
        "top_k": st.sampled_from([1, 5]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.05, 0.5]),
        "logprobs": st.sampled_from([0, 3]),
        "prompt_logprobs": st.sampled_from([0, 2]),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=30),
        "min_tokens": st.just(1),
        "presence_penalty": st.sampled_from([-2.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.3, 1.1]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -0.5, 3.0, 100.0]), max_size=4
        ),
    },
)
REQUESTS = {
    "params": SAMPLING,
    "seed": st.integers(0, 3),
    "salt": st.sampled_from(["", "", "", "", "one", "two"]),
    "start": st.integers(1, 12),
}


class World:
    """A recorded engine. Owner of the script; `new_checkpoints` are compared with the interpreter after each step."""

    def __init__(
        self, mixers: list, kernel_size: int, *, kernels: str = "auto", accepts: Sequence[int] = (), **settings
    ) -> None:
        self.config = HashConfig(mixers=tuple(mixers), kernel_size=kernel_size, vocab_size=VOCAB, max_length=4096)
        engine = {
            "page_size": PAGE,
            "max_model_len": MAX_LENGTH,
            "num_threads": 1,
            "poison": True,
            "kernels": kernels,
            **settings,
        }
        self.script = Script(model=self.config, engine=engine)
        with tempfile.TemporaryDirectory() as folder:
            self.engine = Engine(self.script.config(Path(folder)), self._forced_drafts if accepts else None)
        self._accepts = accepts
        device = settings.get("device", "cpu")
        self._oracle = Oracle(self.config, drawing_kernels(kernels, device), self.engine.info.max_length, device)
        self.player = Player(self.engine, self._oracle, self._after_step)
        self._record_steps()
        self.num_drafts_checked = 0
        self._num_added = 0
        self._seen: set[Checkpoint] = set()

    def do(self, operation: Operation) -> None:
        """Record an operation, then apply it; the script of a failure is shown with it."""
        self.script.operations.append(operation)
        try:
            self.player.apply(operation)
        except Exception as error:
            error.add_note(self.script.to_json())
            raise

    def add(self, prompt: list[int], *, n: int = 1, start: int = 1, params: dict, **options) -> list[str]:
        """Queue n samples of a prompt; returns their ids."""
        names = [f"r{self._num_added}.{i}" for i in range(n)]
        self._num_added += 1
        room = MAX_LENGTH - params["max_tokens"]
        for i, name in enumerate(names):
            given = {"prompt_logprobs_start": start, "eos_token_ids": (3,), **options}
            self.do(Add(request_id=name, prompt=prompt[:room], sample_index=i, params=params, **given))
        return names

    def check_hits(self) -> None:
        """What came from the cache is the beginning of another request of the same tenant."""
        added = [operation for operation in self.script.operations if isinstance(operation, Add)]
        texts = {a.request_id: [*a.prompt, *self.player.answers[a.request_id].token_ids] for a in added}
        for mine in added:
            count = self.player.num_cached.get(mine.request_id, 0)
            others = [texts[a.request_id] for a in added if a is not mine and a.salt == mine.salt]
            assert not count or mine.prompt[:count] in [text[:count] for text in others], mine

    def check_cache(self) -> None:
        """What is published has not changed since."""
        if not self.player.num_damages:
            for checkpoint in self.engine.manager.tree.checkpoints:
                check_bytes(self.engine, self.config, checkpoint)

    def check_empty(self) -> None:
        """Dropping the cache leaves every id free."""
        manager = self.engine.manager
        self.do(Evict())
        for pool in (*manager.pages, manager.snapshots, manager.slots):
            assert pool.num_free == pool.total, pool.name
        counters = self.engine.scheduler.counters
        if not self.player.num_damages:
            assert counters.num_refused_checkpoints == counters.num_damaged_resumes == 0

    def _forced_drafts(self, request: Request) -> ForcedDrafts:
        return ForcedDrafts(request, self._accepts, functools.cache(lambda: self._answer_and_on(request)), VOCAB)

    def _answer_and_on(self, request: Request) -> list[int]:
        """What a request must get, and a few tokens that it would have got if it had not stopped."""
        wanted = self.player.wanted(request.request_id)
        whole = [*request.prompt_token_ids, *wanted.token_ids]
        if wanted.finish_reason != "stop" or len(whole) >= MAX_LENGTH:
            return wanted.token_ids
        params = replace(request.params, stop_token_ids=None, ignore_eos=True, min_tokens=0, max_tokens=4)
        params = replace(params, prompt_logprobs=None)
        beyond = self._oracle(replace(request, prompt_token_ids=whole, params=params))
        return [*wanted.token_ids, *beyond.token_ids]

    def _record_steps(self) -> None:
        def record(plan, output):
            self._last_step = plan, output

        watch_steps(self.engine, record)

    def _check_drafts(self) -> None:
        """Guesses of the device are a function of the request's tokens, whatever came before."""
        plan, output = self._last_step
        for draft, guesses in zip(plan.drafts, output.drafts, strict=True):
            sequence = self.engine.scheduler._sequences.get(plan.rows[draft.row].request_id)
            if sequence is None or sequence.drafts != guesses:
                continue  # ended, or preempted meanwhile
            wanted = expected_drafts(self._oracle, sequence.request, sequence.token_ids, draft.limit, len(guesses))
            assert guesses[: len(wanted)] == wanted, f"{sequence.request.request_id}: drafts"
            self.num_drafts_checked += len(wanted)

    def _after_step(self, engine: Engine) -> None:
        self._check_drafts()
        checkpoints = engine.manager.tree.checkpoints
        for checkpoint in checkpoints:
            if checkpoint not in self._seen:
                check_bytes(engine, self.config, checkpoint)
        self._seen = set(checkpoints)


class EngineMachine(RuleBasedStateMachine):
    """Operations that hypothesis chooses."""

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        pools=st.sampled_from(POOLS),
        schedule=SCHEDULES,
        budget=st.sampled_from([8, 8, 16, 64]),
        interval=st.sampled_from([8, 8, 4, 16]),
        caching=st.sampled_from([True] * 5 + [False]),
        kernels=st.sampled_from(["auto", "auto", "torch"]),
        graph=st.sampled_from(["eager", "eager", "trace"]),
        is_async=st.booleans(),
        accepts=st.sampled_from([(), (), (0,), (9,), (1, 0, 2), (3, 9, 0), (2, 7, 1, 0)]),
        max_drafts=st.sampled_from([1, 3, 7]),
        method=st.sampled_from([None, "ngram", "mtp"]),
        token_cost=st.sampled_from([0.0, 0.0, 0.2]),
    )
    def set_up(
        self,
        layout,
        pools,
        schedule,
        budget,
        interval,
        caching,
        kernels,
        graph,
        is_async,
        accepts,
        max_drafts,
        method,
        token_cost,
    ):
        speculation = {"method": method, "num_speculative_tokens": max_drafts, "token_cost": token_cost}
        self.world = World(
            *layout,
            **pools,
            schedule=schedule,
            max_num_batched_tokens=budget,
            checkpoint_interval=interval,
            enable_prefix_caching=caching,
            kernels=kernels,
            graph=graph,
            accepts=accepts if method == "ngram" else (),
            speculative_config=speculation if method else None,
            async_scheduling=is_async,
        )

    @rule(shared=st.integers(0, 24), own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), **REQUESTS)
    def fork(self, shared, own, **request):
        """A prompt that leaves the shared text somewhere."""
        self.world.add(SHARED[:shared] + own, **request)

    @rule(length=st.integers(4, 24), place=st.integers(0, 23), token=st.integers(0, VOCAB - 1), **REQUESTS)
    def change_a_token(self, length, place, token, **request):
        """The shared text but for one token."""
        prompt = SHARED[:length]
        prompt[place % length] = token
        self.world.add(prompt, **request)

    @rule(n=st.integers(2, 6), length=st.integers(1, 24), **REQUESTS)
    def samples(self, n, length, **request):
        """Several samples of one prompt, all at once."""
        self.world.add(SHARED[:length], n=n, **request)

    @precondition(lambda self: self.world.player.answers)
    @rule(data=st.data(), own=st.lists(st.integers(0, VOCAB - 1), max_size=4), **REQUESTS)
    def continue_conversation(self, data, own, **request):
        """A next turn: what was answered so far is part of the prompt."""
        added = [operation for operation in self.world.script.operations if isinstance(operation, Add)]
        first = data.draw(st.sampled_from(added[-4:]))
        answer = self.world.player.answers[first.request_id]
        self.world.add([*first.prompt, *answer.token_ids, *own], **request)

    @rule(times=st.integers(1, 6))
    def step(self, times):
        self.world.do(Step(times))

    @precondition(lambda self: self.world.player.live)
    @rule(data=st.data())
    def abort(self, data):
        self.world.do(Abort(data.draw(st.sampled_from(self.world.player.live))))

    @rule()
    def evict(self):
        self.world.do(Evict())

    @precondition(lambda self: self.world.engine.manager.tree.checkpoints)
    @rule(which=st.integers(0, 15), stream=st.integers(0, 7), row=st.integers(0, 5))
    def damage(self, which, stream, row):
        """A conv row of a checkpoint is lost: whoever resumes there must notice."""
        self.world.do(Damage(which, stream, row))

    @rule()
    def drain(self):
        self.world.do(Drain())
        self.world.check_cache()
        self.world.check_hits()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.do(Drain())
            self.world.check_hits()
            self.world.check_empty()
