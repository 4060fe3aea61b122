"""Answers that are held to a grammar, with guesses and without: they match, and guesses leave every bit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from samebit.core.config import EngineConfig, Schedule, SpeculativeConfig
from samebit.core.request import Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.engine import Engine
from tests.driving import run, run_alone
from tests.mutants.worlds import ROOMY
from tests.random_checkpoint import VOCAB, write_checkpoint

END = VOCAB - 1
PATTERNS = ("(ab|ba){4,9}", "[a-c]{6}(xy)*z", "(a?b){3,12}")
WISHES = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"min_tokens": 12, "logit_bias": {END: 20.0}},
    {"temperature": 2.0, "presence_penalty": 1.0, "logit_bias": {97: 3.0}},
)


def check_grammars() -> None:
    """Patterns under n-gram guesses, some of them spoilt, beside answers that are free."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"model": str(write_checkpoint(Path(folder))), "num_threads": 1, "page_size": 4, "max_model_len": 96}
        solo = Engine(EngineConfig(**settings, **ROOMY, enable_prefix_caching=False))
        guesses = SpeculativeConfig(method="ngram", prompt_lookup_min=1, token_cost=0.0)
        schedule = Schedule(spoil_percent=20, preempt_percent=5, chunk_sizes=(7, 3), shuffle_rows=True)
        engine = Engine(EngineConfig(**settings, **ROOMY, speculative_config=guesses, schedule=schedule))
        requests = [_request(place, pattern, wish) for place, (pattern, wish) in enumerate(_asked())]
        results = run(engine, requests)
        for request in requests:
            result, wanted = results[request.request_id], request.params.structured_outputs
            assert result.error is None, result.error
            assert result == run_alone(solo, request), "guesses changed an answer"
            if wanted is not None and result.finish_reason == "stop":
                assert re.fullmatch(wanted.regex or "", result.text), "an answer does not match"
            # Behind a "z" there is nothing but the end.
            if wanted is not None and request.params.min_tokens and not result.text.endswith("z"):
                assert len(result.token_ids) > request.params.min_tokens, "an answer ends early"
        assert sum(result.finish_reason == "stop" for result in results.values()) > len(requests) // 2, (
            "few answers end"
        )
        assert engine.scheduler.counters.num_accepted_tokens > 50, "few guesses are accepted"


def _asked() -> list[tuple[str | None, dict]]:
    return [(pattern, wish) for pattern in (*PATTERNS, None) for wish in WISHES for _ in range(2)]


def _request(place: int, pattern: str | None, wish: dict) -> Request:
    wanted = None if pattern is None else StructuredOutputsParams(regex=pattern)
    return Request(
        request_id=str(place),
        prompt_token_ids=list(b"abba baba abab xyz"[: 9 + place % 9]),
        params=SamplingParams(max_tokens=40, logprobs=2, structured_outputs=wanted, **wish),
        seed=place,
        eos_token_ids=(END,),
    )
