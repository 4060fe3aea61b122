"""The promise on the bundled trained model, at its real page size, window and vocabulary."""

from __future__ import annotations

import pytest

from samebit.core.config import EngineConfig, Schedule
from samebit.engine.engine import Engine
from tests.driving import make_request, run, run_alone

POOLS = {"num_pages": 400, "num_window_pages": 400, "num_checkpoints": 64}
CODE = '''def merge(left, right):
    """Merge two sorted lists into one."""
    merged = []
    while left and right:
        merged.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return merged + left + right


class Cache:
    def __init__(self, size):
        self.size = size
        self.items = {}

    def get(self, key):
'''


@pytest.fixture(scope="module")
def make_nano():
    def make(**settings):
        return Engine(EngineConfig(**{"num_threads": 1, "poison": True, **POOLS, **settings}))

    return make


@pytest.fixture(scope="module")
def solo(make_nano):
    return make_nano(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def text(solo):
    return solo.tokenizer.encode(CODE * 4, allow_special=False)


def requests_over(text):
    """Greedy and sampled requests whose prompts share a beginning and end at every kind of residue."""
    return [
        make_request(
            str(number),
            text[:length],
            seed=number << 40,
            temperature=(0.0, 0.8, 1.3)[number % 3],
            top_p=(1.0, 0.9)[number % 2],
            max_tokens=8 + number,
            prompt_logprobs=5 if number == 3 else None,
        )
        for number, length in enumerate((1, 3, 15, 16, 17, 96, 127, 128, 129, 131, 200, 257))
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_threads": 2},
        {"schedule": Schedule(chunk_sizes=(7,)), "max_num_batched_tokens": 64},
        {"schedule": Schedule(seed=3, preempt_percent=25, shuffle_rows=True, pad_rows=2, pad_tokens=9)},
        {"num_pages": 40, "num_window_pages": 24, "num_checkpoints": 4, "page_size": 16, "checkpoint_interval": 16},
    ],
    ids=["two threads", "chunks of seven", "preempted and shuffled", "small pools"],
)
def test_a_batch_and_its_repetition_equal_solo_runs(make_nano, solo, text, settings):
    engine = make_nano(**settings)
    requests = requests_over(text)
    for arrivals in ([0] * len(requests), list(range(len(requests)))):
        results = run(engine, requests, arrivals)
        for request in requests:
            assert results[request.request_id] == run_alone(solo, request)
    assert any(result.num_cached_tokens for result in results.values())
    assert engine.scheduler.counters.num_refused_checkpoints == 0


@pytest.mark.parametrize("length", [15, 16, 17, 31, 47, 63, 126, 127, 128, 129, 130, 143, 144, 145, 255, 256, 257])
def test_hits_around_page_and_window_equal_cold_runs(make_nano, solo, text, length):
    engine = make_nano(checkpoint_interval=64)
    run_alone(engine, make_request("first", text[:length], max_tokens=1))
    for tail in range(1, 5):
        request = make_request("second", [*text[:length], *range(300, 300 + tail)], max_tokens=3, temperature=0.9)
        result = run_alone(engine, request)
        assert result == run_alone(solo, request)
        assert result.num_cached_tokens >= length // 16 * 16
