"""A run is a script, and a script is the run again: the same answers, and the same difference if there was one."""

from __future__ import annotations

import re

import msgspec
import pytest

from samebit.audit.replay import (
    Abort,
    Add,
    Answer,
    Damage,
    DifferenceError,
    Drain,
    Evict,
    Script,
    Step,
    read_script,
    replay,
)
from samebit.core.errors import ConfigError, InvalidRequestError
from samebit.core.request import TokenLogprobs
from samebit.models.hash import HashModel
from tests.hash.fuzzer import LAYOUTS, SHARED, World

POOLS = {"max_num_seqs": 3, "num_checkpoints": 8, "num_pages": 30, "num_window_pages": 30, "checkpoint_interval": 8}


@pytest.fixture
def world():
    """A run with every kind of operation."""
    world = World(*LAYOUTS[0], **POOLS, schedule={"seed": 3, "preempt_percent": 20, "chunk_sizes": (5,)})
    params = {"max_tokens": 6, "temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1}
    world.add(SHARED[:20], n=2, params=params, seed=9)
    world.do(Step(3))
    world.add(SHARED[:14], params=params, salt="tenant", start=3)
    (gone,) = world.add(SHARED[:22], params=params)
    world.do(Step())
    world.do(Abort(gone))
    world.do(Drain())
    world.do(Damage(1, 2, 0))
    world.add(SHARED[:23], params={"max_tokens": 3, "stop": ["x", "yz"]})
    world.add(SHARED[:23], params={"max_tokens": 3})
    world.do(Drain())
    world.do(Evict())
    return world


@pytest.fixture
def path(world, tmp_path):
    path = tmp_path / "script.json"
    path.write_text(world.script.to_json())
    return path


def test_a_script_survives_its_file(world, path):
    script = read_script(path)
    assert (script.model, script.operations) == (world.script.model, world.script.operations)
    assert msgspec.json.encode(script.engine) == msgspec.json.encode(world.script.engine)
    assert path.read_text().count('    {"do":"') == len(world.script.operations) == 13


def test_a_replay_is_the_same_run(world, path):
    report = replay(path)
    assert report.difference is None
    assert report.num_operations == len(world.script.operations)
    assert report.num_steps == world.player.num_steps
    assert report.num_hits == world.player.num_hits > 0
    assert report.num_preemptions == world.engine.scheduler.counters.num_preemptions > 0
    assert report.num_answers == 5 == len(world.player.answers) - 1


def test_a_replay_finds_the_difference_that_the_run_found(world, tmp_path, monkeypatch):
    """Neighbours in a batch get each other's words; a row alone, and so the oracle, does not notice."""
    sound = HashModel._convolve

    def mixed_up(self, x, pool, index, sources):
        out = sound(self, x, pool, index, sources)
        return out.roll(0 if index.read_rows.shape[0] == 1 else 1)

    monkeypatch.setattr(HashModel, "_convolve", mixed_up)
    broken = World(*LAYOUTS[0], **POOLS)
    for first in range(2):
        broken.add(SHARED[first : first + 9], params={"max_tokens": 2, "temperature": 0.0})
    with pytest.raises((DifferenceError, AssertionError)) as failure:
        broken.do(Drain())
    path = tmp_path / "script.json"
    path.write_text(failure.value.__notes__[0])  # as a failing test shows it
    report = replay(path)
    assert report.difference is not None
    assert report.difference.startswith("operation 3: r0.0, step 1: token_ids[0]: got ")


def test_a_bundled_model_can_be_replayed(tmp_path):
    path = tmp_path / "script.json"
    operations = [Add(request_id="a", prompt=[5, 6, 7], params={"max_tokens": 3, "logprobs": 1}), Drain()]
    engine = {"num_threads": 1, "max_num_seqs": 2, "cache_bytes": 1 << 22, "max_model_len": 64}
    path.write_text(Script(engine=engine, operations=operations).to_json())
    report = replay(path)
    assert (report.difference, report.num_answers) == (None, 1)


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("{", ConfigError, "script.json"),
        ('{"operations": [{"do": "jump"}]}', ConfigError, "jump"),
        ('{"operations": [{"do": "step", "twice": 1}]}', ConfigError, "twice"),
        ('{"engine": {"speed": 3}}', ConfigError, "speed"),
        (
            '{"operations": [{"do": "add", "request_id": "a", "prompt": []}]}',
            InvalidRequestError,
            "no tokens",
        ),
    ],
)
def test_a_wrong_script_is_named(tmp_path, text, error, named):
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(error, match=named):
        replay(path)


def test_a_missing_script_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.json"):
        replay(tmp_path / "gone.json")


def token(logprob: float, top: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(1, logprob, 1, [1], [top])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"token_ids": [1, 9]}, r"token_ids\[1\]"),
        ({"token_ids": [1]}, "token_ids: got 1, wanted 2"),
        ({"token_ids": [1, 2, 3]}, "token_ids: got 3, wanted 2"),
        ({"logprobs": [token(-0.0)]}, r"logprobs\[0\]"),
        ({"logprobs": [token(0.0, top=-1.0000000000000002)]}, r"logprobs\[0\]"),
        ({"prompt_logprobs": []}, "prompt_logprobs: got 0"),
        ({"text": "aB"}, "text: got 'aB'"),
        ({"finish_reason": "stop"}, "finish_reason"),
    ],
)
def test_an_answer_that_differs_in_one_bit_is_told(changed, named):
    parts = {
        "token_ids": [1, 2],
        "logprobs": [token(0.0)],
        "prompt_logprobs": [token(-2.0)],
        "text": "ab",
        "finish_reason": "length",
    }
    wanted = Answer(**parts)
    assert Answer(**parts).difference(wanted) is None
    assert Answer(token_ids=[1]).difference(wanted) is None
    difference = Answer(**{**parts, **changed}).difference(wanted)
    assert difference is not None
    assert re.search(named, difference)


def test_a_request_that_never_ends_is_told(world, monkeypatch):
    world.add(SHARED[:3], params={"max_tokens": 2})
    monkeypatch.setattr(world.engine, "step", list)
    with pytest.raises(DifferenceError, match="has not ended after"):
        world.do(Drain())
