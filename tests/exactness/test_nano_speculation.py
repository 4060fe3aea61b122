"""Speculation on the bundled model: any two circumstances together, and many seeds, leave every bit of an answer as it is."""

from __future__ import annotations

import itertools
import random

import pytest

from samebit.core.config import EngineConfig, Schedule, SpeculativeConfig
from samebit.engine.engine import Engine
from tests.driving import make_request, run
from tests.exactness.test_nano import CODE
from tests.speculative.fitted_drafters import fitted_drafters

POOLS = {"num_pages": 500, "num_window_pages": 500, "num_checkpoints": 64, "max_num_seqs": 16, "num_threads": 1}
FIRST = 160  # tokens that a warm run finds in the cache, whole pages of 16
FACTORS = {
    "method": ["ngram", "mtp", "dflash", "dspark"],
    "sampling": [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.5}],
    "residue": [None, *range(16)],
    "batch": [1, 16],
    "chunks": [(), (1,), (7,), (16, 5)],
    "graph": ["eager", "trace"],
    "token_cost": [0.0, 0.15],
}


def pairwise(factors: dict[str, list]) -> list[dict]:
    """Rows of values in which any two values of two factors meet at least once; greedy, from a seed."""
    rng = random.Random(0)
    wanted = {
        ((one, i), (other, j))
        for one, other in itertools.combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[other]))
    }
    rows = []
    while wanted:
        candidates = [{name: rng.randrange(len(values)) for name, values in factors.items()} for _ in range(60)]
        first = next(iter(sorted(wanted)))
        candidates = [candidate | dict(first) for candidate in candidates]
        row = max(candidates, key=lambda candidate: len(wanted & pairs_of(candidate)))
        wanted -= pairs_of(row)
        rows.append({name: factors[name][place] for name, place in row.items()})
    return rows


def pairs_of(row: dict[str, int]) -> set:
    return set(itertools.combinations(row.items(), 2))


ROWS = pairwise(FACTORS)


@pytest.fixture(scope="module")
def target(request) -> str:
    return str(request.config.getoption("--model"))


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory) -> dict[str, SpeculativeConfig]:
    """The methods that the model can have; block drafters have random weights where none are bundled with it."""
    return fitted_drafters(target, tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def cold(target):
    """The answer of an engine that has one request, no cache and no drafter; each is asked for once."""
    engine = Engine(EngineConfig(model=target, enable_prefix_caching=False, **POOLS))
    answers: dict = {}

    def answer(request):
        key = (tuple(request.prompt_token_ids), request.params, request.seed)
        if key not in answers:
            answers[key] = run(engine, [request])[request.request_id]
        return answers[key]

    return engine.tokenizer, answer


def check(row: dict, target: str, drafters, cold, seeds: range) -> None:
    if row["method"] not in drafters:
        pytest.skip(f"{target} has no draft heads")  # --model may name such a one; nano has them
    tokenizer, answer = cold
    text = tokenizer.encode(CODE * 4, allow_special=False)
    who = drafters[row["method"]]
    speculation = SpeculativeConfig(method=who.method, model=who.model, token_cost=row["token_cost"])
    schedule = Schedule(chunk_sizes=row["chunks"])
    engine = Engine(
        EngineConfig(model=target, speculative_config=speculation, graph=row["graph"], schedule=schedule, **POOLS)
    )
    if row["residue"] is not None:
        run(engine, [make_request("first", text[: FIRST + 1], max_tokens=1)])
    for start in range(0, len(seeds), row["batch"]):
        requests = [
            make_request(
                str(seed),
                text[: FIRST + 1 + (row["residue"] or 0) + number],
                seed=seed << 33,
                max_tokens=20,
                **row["sampling"],
            )
            for number, seed in enumerate(seeds[start : start + row["batch"]])
        ]
        results = run(engine, requests)
        for request in requests:
            assert results[request.request_id] == answer(request), request.seed
        if row["residue"] is not None:
            assert all(result.num_cached_tokens >= FIRST for result in results.values())
    # N-grams may find nothing, a crowd may pay for no guess, and in rows of one token there is no room for any.
    is_sure_to_guess = row["method"] != "ngram" and row["batch"] == 1 and row["chunks"] != (1,)
    assert engine.scheduler.counters.num_draft_tokens > 0 or not is_sure_to_guess
    assert engine.scheduler.counters.num_refused_checkpoints == engine.scheduler.counters.num_damaged_resumes == 0


@pytest.mark.parametrize("row", ROWS[:: len(ROWS) // 8], ids=str)
def test_speculation_changes_no_bit_in_some_circumstances(row, target, drafters, cold):
    check(row, target, drafters, cold, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_speculation_changes_no_bit_in_any_two_circumstances(row, target, drafters, cold):
    check(row, target, drafters, cold, range(100))


def test_any_two_circumstances_meet():
    seen = {pair for row in ROWS for pair in itertools.combinations(((k, str(v)) for k, v in row.items()), 2)}
    for one, other in itertools.combinations(FACTORS, 2):
        for value, partner in itertools.product(FACTORS[one], FACTORS[other]):
            assert ((one, str(value)), (other, str(partner))) in seen
