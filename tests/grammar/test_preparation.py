"""Grammars are compiled beside the steps of everybody else."""

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from samebit.core.config import EngineConfig
from samebit.core.errors import InvalidRequestError
from samebit.core.request import Request, SamplingParams
from samebit.core.structured import StructuredOutputsParams
from samebit.engine.engine import Engine
from samebit.engine.launch import start_engine
from samebit.engine.metrics import ServerMetrics
from samebit.engine.preparation import Preparation
from samebit.engine.streams import merge
from samebit.grammar.definition import Definition
from samebit.grammar.grammars import Grammars
from samebit.grammar.vocabulary import Vocabulary

ROOT = Path(__file__).parents[2]


def request(name, regex=None):
    wanted = None if regex is None else StructuredOutputsParams(regex=str(regex))
    params = SamplingParams(max_tokens=3, structured_outputs=wanted)
    return Request(request_id=name, prompt_token_ids=[1, 2, 3], params=params, seed=7)


@pytest.fixture
def run(monkeypatch):
    """Run `story(client, metrics)` with an engine that needs no model."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))

    def run(story):
        async def main():
            metrics, fake = ServerMetrics("nano"), "tests.server.fakes:FakeEngine"
            settings = EngineConfig(max_num_seqs=4)
            async with (
                asyncio.timeout(30),
                start_engine(settings, metrics, engine_class=fake, max_open=64) as client,
            ):
                return await story(client, metrics)

        return asyncio.run(main())

    return run


async def answer(client, one):
    with client.submit([one]) as stream:
        return merge([output async for output in stream])


def test_requests_go_on_while_a_grammar_is_compiled(run, tmp_path):
    ready = tmp_path / "ready"

    async def story(client, metrics):
        held = asyncio.create_task(answer(client, request("held", ready)))
        for number in range(5):
            assert (await answer(client, request(f"free {number}"))).finish_reason == "length"
        assert not held.done()
        ready.touch()
        assert len((await held).token_ids) == 3
        return metrics.render().decode()

    assert 'samebit:grammar_compilation_time_seconds_sum{model_name="nano"} 0.5' in run(story)


def test_a_grammar_that_is_known_does_not_wait_for_one_that_is_not(run, tmp_path):
    ready = tmp_path / "ready"

    async def story(client, metrics):
        held = asyncio.create_task(answer(client, request("held", ready)))
        known = await answer(client, request("known", "known"))
        assert not held.done()
        ready.touch()
        await held
        return known.token_ids

    assert len(run(story)) == 3


def test_an_engine_knows_which_grammars_it_has_compiled():
    engine = Engine(EngineConfig(model="nano", num_threads=1, num_pages=60, num_window_pages=60, max_num_seqs=2))
    plain, held = request("plain"), request("held", "[ab]+")
    assert engine.is_prepared(plain)
    assert not engine.is_prepared(held)
    engine.prepare(held)
    assert engine.is_prepared(held)


def test_what_is_no_grammar_is_refused_and_what_is_given_up_is_forgotten(run, tmp_path):
    ready = tmp_path / "ready"

    async def story(client, metrics):
        given_up = client.submit([request("given up", ready)])
        refused = asyncio.create_task(answer(client, request("refused", "bad")))
        given_up.close()
        ready.touch()
        with pytest.raises(InvalidRequestError, match="no regex") as error:
            await refused
        assert error.value.param == "response_format"
        return (await answer(client, request("later", ready))).token_ids

    assert len(run(story)) == 3


def test_a_request_is_ready_once_and_none_that_was_forgotten_is():
    preparation = Preparation(lambda _: None)
    for name in "abc":
        preparation.begin(request(name))
    preparation.forget(["b", "unknown"])
    found = []
    while preparation.is_busy:
        found += [one.request_id for one in preparation.take_ready()]
    assert sorted(found) == ["a", "c"]
    assert preparation.take_ready() == []
    preparation.close()


def test_threads_that_need_the_vocabulary_at_once_take_it_in_once():
    made = []

    class Slow(Vocabulary):
        def tokenizer(self):
            made.append(1)
            time.sleep(0.05)
            return super().tokenizer()

    texts = [b"a", b"b", b"<end>"]
    grammars = Grammars(
        Slow(3, texts.__getitem__, {"<end>": 2}, lambda text: [texts.index(bytes([c])) for c in text.encode()])
    )
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(grammars.prepare, [request(str(number), f"[ab]{{1,{number + 1}}}") for number in range(4)]))
    assert made == [1]


def test_the_text_of_a_grammar_is_made_once_a_request_and_not_kept_behind_its_start(monkeypatch):
    texts, made = [b"a", b"<end>"], []
    grammars = Grammars(Vocabulary(2, texts.__getitem__, {"<end>": 1}, lambda text: [0] * len(text)))
    text_of = Definition.text
    monkeypatch.setattr(Definition, "text", lambda definition: made.append(definition) or text_of(definition))
    for number in range(3):
        held = request(str(number), "a{3}")
        grammars.is_ready(held)
        grammars.prepare(held)
        assert grammars.is_ready(held)
        assert grammars.matcher(held) is not None
        assert len(made) == number + 1
    assert not grammars._defined
    for number in range(200):
        grammars.is_ready(request(str(number), "a{3}"))  # and then its client leaves
    assert len(grammars._defined) <= 64


def test_threads_that_compile_at_once_leave_the_stacks_of_others_as_they_were():
    usual, interval = threading.stack_size(), sys.getswitchinterval()
    texts = [b"a", b"<end>"]
    grammars = Grammars(Vocabulary(2, texts.__getitem__, {"<end>": 1}, lambda text: [0] * len(text)))
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(grammars.prepare, [request(str(number), f"a{{{number + 1}}}") for number in range(100)]))
    finally:
        sys.setswitchinterval(interval)
    found = threading.stack_size(usual)
    assert found == usual
