"""Ctrl-C, other breaks and other threads in the middle of a step: the engine is as good as before."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from samebit import LLM, SamplingParams
from samebit.core.config import EngineConfig
from samebit.core.errors import StepError
from samebit.engine.conversation import Conversation
from samebit.engine.interrupts import uninterrupted

SETTINGS = {"num_pages": 64, "num_window_pages": 64, "num_checkpoints": 8, "max_num_seqs": 8, "num_threads": 1}


@pytest.fixture(autouse=True)
def interruptible():
    """A test runner may have switched Ctrl-C off in its workers."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is put back"
    signal.signal(signal.SIGINT, before)


def interrupt_step(engine, number, monkeypatch):
    """Press Ctrl-C while step `number` from now is executed."""
    launch, left = engine._runner.launch, [number]

    def interrupted(plan):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", interrupted)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_interrupted_batch_leaves_nothing_behind(number, monkeypatch):
    llm = LLM("nano", **SETTINGS)
    prompts = ["import os\n" * 20, "class Node:\n"]
    params = SamplingParams(seed=3, max_tokens=12, logprobs=2)
    with monkeypatch.context() as patch:
        interrupt_step(llm._engine, number, patch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
    assert (llm._engine.scheduler.num_running, llm._engine.scheduler.num_waiting) == (0, 0)
    llm._engine.scheduler.check()
    again, fresh = llm.generate(prompts, params), LLM("nano", **SETTINGS).generate(prompts, params)
    assert [output.outputs for output in again] == [output.outputs for output in fresh]


@pytest.mark.parametrize("error", [SystemExit, TimeoutError, KeyboardInterrupt])
def test_a_step_that_is_torn_open_ends_its_requests_only(error, monkeypatch):
    llm = LLM("nano", **SETTINGS)
    params = SamplingParams(seed=3, max_tokens=8)
    before = llm.generate("import os\n", params)[0].outputs
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine._runner, "launch", lambda _: (_ for _ in ()).throw(error))
        with pytest.raises(StepError if issubclass(error, Exception) else error):
            llm.generate("import os\n", params)
    llm._engine.scheduler.check()
    assert llm.generate("import os\n", params)[0].outputs == before


def test_calls_from_several_threads_take_turns():
    llm = LLM("nano", **SETTINGS)
    params = SamplingParams(seed=3, max_tokens=8)
    prompts = [["a", "b"], ["c"], ["d", "e", "f"]]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda batch: llm.generate(batch, params), prompts))
    alone = [llm.generate(batch, params) for batch in prompts]
    assert [[one.outputs for one in batch] for batch in together] == [[one.outputs for one in batch] for batch in alone]


def test_a_conversation_goes_on_after_an_answer_was_broken_off(monkeypatch):
    conversation = Conversation(EngineConfig(**SETTINGS), seed=1)
    with monkeypatch.context() as patch:
        interrupt_step(conversation._engine, 3, patch)
        with pytest.raises(KeyboardInterrupt):
            "".join(conversation.say("Hello"))
    assert "".join(conversation.say("What is 2 plus 2?"))


def test_an_ignored_interrupt_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN
