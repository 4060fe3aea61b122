"""Drives an engine through requests that arrive at given steps and collects every bit of what comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from samebit.core.plan import BatchPlan, StepOutput
from samebit.core.request import EngineOutput, Request, SamplingParams
from samebit.engine.engine import Engine


@dataclass
class Result:
    """All that one request produced; two results are equal when every bit is."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple] = field(default_factory=list)
    prompt_logprobs: list[tuple] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: object = None
    error: str | None = None
    num_cached_tokens: int = field(default=0, compare=False)
    num_preemptions: int = field(default=0, compare=False)

    def add(self, output: EngineOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += [_bits(item) for item in output.logprobs]
        self.prompt_logprobs += [_bits(item) for item in output.prompt_logprobs]
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error = output.error
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions


def watch_steps(engine: Engine, tell: Callable[[BatchPlan, StepOutput], None]) -> None:
    """Call `tell` with each plan and its output, before the output is taken in."""
    runner = engine._runner
    launch = runner.launch

    def watched(plan: BatchPlan) -> Callable[[], StepOutput]:
        read = launch(plan)

        def told() -> StepOutput:
            output = read()
            tell(plan, output)
            return output

        return told

    runner.launch = watched


def run_after_the_body(monkeypatch) -> list[object]:
    """Have what steps run beside draws come after these, not before, as on a CPU; one item for each such piece of work."""
    calls = []

    @contextmanager
    def beside(work, device):
        yield
        calls.append(device)
        work()

    monkeypatch.setattr("samebit.runner.step.beside", beside)
    return calls


def _bits(item) -> tuple:
    # float.hex shows every bit and, unlike ==, tells -0.0 from 0.0 and NaN from nothing.
    return (
        item.token_id,
        item.logprob.hex(),
        item.rank,
        tuple(item.top_ids),
        tuple(value.hex() for value in item.top_logprobs),
    )


def make_request(request_id: str, prompt: list[int], seed: int = 0, salt: str = "", **params) -> Request:
    """A request that reports logprobs; `params` are SamplingParams fields."""
    settings = {"max_tokens": 12, "logprobs": 3, **params}
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**settings),
        seed=seed,
        cache_salt=salt,
    )


def run(engine: Engine, requests: list[Request], arrivals: list[int] | None = None) -> dict[str, Result]:
    """Submit request i at step `arrivals[i]` (default: all at once) and step until all have ended; ids are checked."""
    waiting = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), strict=True))
    results = {request.request_id: Result() for request in requests}
    step = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][0] <= step or not engine.has_work):
            engine.add(requests[waiting.pop(0)[1]])
        for output in engine.step():
            results[output.request_id].add(output)
        engine.scheduler.check()
        step += 1
    return results


def run_alone(engine: Engine, request: Request) -> Result:
    """One request with nothing beside it."""
    return run(engine, [request])[request.request_id]
