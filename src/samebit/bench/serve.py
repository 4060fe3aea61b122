"""`samebit bench serve`: a sweep of runs against a server that speaks OpenAI's API. Knows no flags; loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from samebit.bench.api import BACKENDS, Api, Call
from samebit.bench.datasets import Conversation, Workload, conversations, rng_for
from samebit.bench.environment import machine
from samebit.bench.http import FailedError, HttpClient
from samebit.bench.load import Load, arrival_times
from samebit.bench.record import Record, Run, command_line, without_credentials
from samebit.bench.rows import Row
from samebit.bench.summary import METRICS, PERCENTILES, summarize
from samebit.bench.texts import Cost, code, counted, estimated, take, words
from samebit.core.errors import ConfigError
from samebit.engine.model_source import resolve_model
from samebit.engine.tokenizer import Tokenizer

_CALIBRATION_TOKENS = (100, 600)
_CALIBRATION_PAIRS = 3
_TOLD_OF_SERVER = ("version", "model", "served_model_name", "system_fingerprint", "profile")

OnRun = Callable[[str, int], Callable[[Row], None]]
"""Told of a run and how many requests it has; gives back who is told of each request that ended."""


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to send where; the fields are the command line's flags. Every rate is run with every concurrency."""

    base_url: str
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    label: str = ""
    request_rate: tuple[float, ...] = (float("inf"),)
    burstiness: float = 1.0
    max_concurrency: tuple[int | None, ...] = (None,)
    num_warmups: int = 0
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra_body: dict[str, Any] = {}  # Any: JSON
    timeout: float = 600.0
    goodput: dict[str, float] = {}
    percentile_metrics: tuple[str, ...] = METRICS
    metric_percentiles: tuple[float, ...] = PERCENTILES
    save_detailed: bool = False

    def validate(self) -> None:
        """Raise ConfigError if a field is out of its range."""
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend={self.backend!r}: must be one of {', '.join(BACKENDS)}")
        for name, value in (("burstiness", self.burstiness), *(("request_rate", rate) for rate in self.request_rate)):
            if not value > 0:
                raise ConfigError(f"{name}={value!r}: must be more than 0, or inf")
        for limit in self.max_concurrency:
            if limit is not None and limit < 1:
                raise ConfigError(f"max_concurrency={limit!r}: must be at least 1")


class Secrets(msgspec.Struct, frozen=True):
    """What is sent and never recorded."""

    api_key: str | None = None
    headers: dict[str, str] = {}


def bench_server(settings: ServeSettings, workload: Workload, secrets: Secrets, on_run: OnRun) -> Record:
    """All runs, or those until an interrupt. Raises ConfigError when the server does not answer a first request."""
    settings.validate()
    workload.validate()
    cost = counted(Tokenizer(resolve_model(settings.tokenizer))) if settings.tokenizer is not None else None
    client = HttpClient(settings.base_url, secrets.api_key, secrets.headers)
    # Not uvloop: its clock ticks in milliseconds.
    return asyncio.run(_bench(client, settings, workload, cost, on_run))


async def _bench(
    client: HttpClient, settings: ServeSettings, workload: Workload, cost: Cost | None, on_run: OnRun
) -> Record:
    environment = machine()
    points = list(itertools.product(settings.request_rate, settings.max_concurrency))
    scale: float | None = None
    try:
        async with asyncio.timeout(settings.timeout):
            api = _api(client, settings.model or await _first_model(client), settings)
            if cost is None:
                scale = await tokens_per_unit(api, code if workload.dataset_name == "code" else words)
                cost = estimated(scale)
            plans = [conversations(workload, cost, run) for run in range(len(points))]
            longest = max(
                (one for plan in plans for one in plan), key=lambda one: one.num_tokens + one.turns[-1].max_tokens
            )
            await _warm_up(api, longest, cost, settings.num_warmups)
        server = await _of_server(client)
    except FailedError as error:
        raise ConfigError(f"{client.url}: {error}") from error
    except TimeoutError as error:
        raise ConfigError(f"{client.url}: no answer within {settings.timeout:g} s") from error
    runs: list[Run] = []
    for number, ((rate, limit), plan) in enumerate(zip(points, plans, strict=True)):
        arrivals = arrival_times(rng_for(workload, number, "arrivals"), len(plan), rate, settings.burstiness)
        runs.append(await _run(api, plan, arrivals, settings, {"request_rate": rate, "max_concurrency": limit}, on_run))
        if not runs[-1].is_complete:
            break
    told = {**msgspec.to_builtins(workload), **msgspec.to_builtins(settings)}
    return Record(
        kind="serve",
        label=settings.label or api.model,
        command=command_line(),
        seed=workload.seed,
        settings={
            **told,
            "base_url": without_credentials(settings.base_url),
            "model": api.model,
            "tokens_per_estimated_token": scale,
        },
        environment=environment,
        server=server,
        is_complete=all(run.is_complete for run in runs),
        runs=runs,
    )


def _api(client: HttpClient, model: str, settings: ServeSettings) -> Api:
    return Api(
        client,
        model,
        backend=settings.backend,
        endpoint=settings.endpoint,
        temperature=settings.temperature,
        ignore_eos=settings.ignore_eos,
        extra=settings.extra_body,
    )


async def _run(
    api: Api,
    plan: Sequence[Conversation],
    arrivals: Sequence[float],
    settings: ServeSettings,
    point: dict[str, Any],  # Any: numbers
    on_run: OnRun,
) -> Run:
    num_requests = sum(len(one.turns) for one in plan)
    limit = point["max_concurrency"]
    name = f"rate {point['request_rate']:g}" + (f", {limit} at once" if limit else "")
    load = Load(
        api.ask,
        plan,
        arrivals,
        max_concurrency=limit,
        timeout_s=settings.timeout,
        on_end=on_run(name, num_requests),
    )
    is_complete = await load.run()
    summary = summarize(
        load.rows,
        load.duration_s,
        num_planned=num_requests,
        goals=settings.goodput,
        metrics=settings.percentile_metrics,
        percentiles=settings.metric_percentiles,
    )
    rows = load.rows if settings.save_detailed else None
    return Run(settings=point, summary=summary, is_complete=is_complete, requests=rows)


async def tokens_per_unit(api: Api, pieces_of: Callable[[random.Random], Iterator[str]]) -> float:
    """The server's tokens for each that is estimated, from a few short prompts; 1 where it tells no usage. Raises FailedError."""
    few, many = _CALIBRATION_TOKENS
    num_tokens = 0
    for number in range(_CALIBRATION_PAIRS):
        # A difference: what a chat template adds is no part of the text.
        for length, sign in ((few, -1), (many, 1)):
            text = take(pieces_of(random.Random(f"calibration {number}")), length, estimated())
            told = await _prompt_tokens(api, text)
            if told is None:
                return 1.0
            num_tokens += sign * told
    return max(0.25, round(num_tokens / (_CALIBRATION_PAIRS * (many - few)), 3))


async def _prompt_tokens(api: Api, text: str) -> int | None:
    found = None
    async with contextlib.aclosing(api.ask(Call("", (text,), 1))) as pieces:
        async for piece in pieces:
            found = piece.num_input_tokens or found
    return found


async def _warm_up(api: Api, longest: Conversation, cost: Cost, num_warmups: int) -> None:
    """A request as long as the longest, of other words, and more of them if they are wanted. Raises FailedError."""
    for number in range(1 + num_warmups):
        text = take(words(random.Random(f"warm up {number}")), longest.num_tokens, cost)
        async with contextlib.aclosing(api.ask(Call("", (text,), longest.turns[-1].max_tokens))) as answer:
            async for piece in answer:
                if piece.has_tokens and number == 0:
                    break  # that it answers is all that the first was to show


async def _first_model(client: HttpClient) -> str:
    found = await client.get("/v1/models")
    try:
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise FailedError("GET /v1/models: names no model; give --model") from error


async def _of_server(client: HttpClient) -> dict[str, Any] | None:  # Any: JSON
    """What a server tells of itself without being asked twice; None if it tells nothing."""
    for path in ("/server_info", "/version"):
        with contextlib.suppress(FailedError, TimeoutError):
            async with asyncio.timeout(5.0):
                found = await client.get(path)
            if isinstance(found, dict):
                told = {**found, **found.get("engine", {})} if isinstance(found.get("engine", {}), dict) else found
                return {name: told[name] for name in _TOLD_OF_SERVER if name in told}
    return None
