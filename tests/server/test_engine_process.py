"""The engine process and its client, with an engine that needs no model."""

import asyncio
import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebit.core.config import EngineConfig
from samebit.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelError,
    OverloadedError,
    PromptTooLongError,
    SamebitError,
)
from samebit.core.request import EngineOutput, Request, SamplingParams
from samebit.engine import messages
from samebit.engine.client import AsyncEngineClient
from samebit.engine.launch import keys_in_environment
from samebit.engine.streams import merge
from tests.server.fakes import ENDLESS, FAIL, KILL, answer_ids


def request(name, first=1, max_tokens=5):
    return Request(
        request_id=name,
        prompt_token_ids=[first, 2, 3],
        params=SamplingParams(max_tokens=max_tokens),
        seed=7,
    )


async def answer(client, *requests):
    with client.submit(requests) as stream:
        return merge([output async for output in stream])


async def until(condition):
    while not condition():  # noqa: ASYNC110 - the condition is the engine's, in another process
        await asyncio.sleep(0.01)


def test_an_answer_arrives_whole(run):
    async def story(client, metrics):
        return await answer(client, request("a"))

    output = run(story)
    assert output.token_ids == answer_ids(request("a"), 5)
    assert output.finish_reason == "length"


def test_a_group_of_requests_shares_a_stream(run):
    async def story(client, metrics):
        with client.submit([request(name, first=n) for n, name in enumerate("abcdefgh")]) as stream:
            seen = {}
            async for output in stream:
                seen.setdefault(output.request_id, []).append(output)
            return {name: merge(outputs).token_ids for name, outputs in seen.items()}

    expected = {n: answer_ids(request(n, first=i), 5) for i, n in enumerate("abcdefgh")}
    assert run(story) == expected


def test_a_reader_that_pauses_holds_up_nobody_and_misses_nothing(run):
    async def story(client, metrics):
        with client.submit([request("slow", max_tokens=300)]) as slow:
            first = await anext(slow)
            await answer(client, request("quick"))
            await until(lambda: client.num_open == 0)
            return first, [output async for output in slow]

    first, rest = run(story)
    assert len(rest) == 1, "what was not read is one output"
    assert first.token_ids + rest[0].token_ids == answer_ids(request("slow"), 300)


def test_closing_a_stream_aborts_its_requests(run):
    async def story(client, metrics):
        with client.submit([request("a", ENDLESS), request("b", ENDLESS)]) as stream:
            await anext(stream)
            assert client.num_open == 2
        assert client.num_open == 0
        await until(lambda: client.stats.get("num_aborted") == 2)
        await until(lambda: client.stats["num_running"] == 0)
        return metrics.render().decode()

    assert 'samebit:num_aborted_requests_total{model_name="nano"} 2.0' in run(story)


def test_a_cancelled_reader_aborts_its_request(run):
    async def story(client, metrics):
        task = asyncio.create_task(answer(client, request("a", ENDLESS)))
        await until(lambda: client.num_open == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.num_open == 0

    run(story)


def test_a_refused_request_raises_what_the_engine_raised(run):
    async def story(client, metrics):
        long = Request(request_id="a", prompt_token_ids=[1] * 5000, params=SamplingParams(), seed=1)
        with pytest.raises(InvalidRequestError, match="too long") as caught:
            await answer(client, long)
        assert caught.value.param == "prompt"
        assert client.num_open == 0
        return await answer(client, request("b"))

    assert run(story).finish_reason == "length"


def test_a_failed_step_ends_its_request_and_no_other(run):
    async def story(client, metrics):
        good = asyncio.create_task(answer(client, request("good", max_tokens=50)))
        bad = await answer(client, request("bad", FAIL))
        return bad, await good

    bad, good = run(story)
    assert (bad.finish_reason, bad.error) == ("error", "step 1 failed: fake")
    assert good.token_ids == answer_ids(request("good"), 50)


def test_no_request_outlives_a_killed_engine(run):
    async def story(client, metrics):
        waiting = [asyncio.create_task(answer(client, request(n, ENDLESS))) for n in "abcdefgh"]
        await until(lambda: client.stats.get("num_running") == 4)
        os.kill(child_pid(), signal.SIGKILL)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 8
        assert client.is_dead
        with pytest.raises(EngineDeadError, match="engine process"):
            await answer(client, request("late"))
        return str(await client.wait_dead())

    assert "signal 9" in run(story)


def test_an_engine_that_leaves_without_a_word_ends_its_requests(run):
    async def story(client, metrics):
        with pytest.raises(EngineDeadError, match="status 9"):
            await answer(client, request("killer", KILL))

    run(story)


def child_pid():
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = [pid for pid in children if b"samebit.engine.process" in cmdline(pid)]
    assert len(found) == 1
    return int(found[0])


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_more_requests_than_fit_are_refused_until_some_have_finished(run):
    async def story(client, metrics):
        with client.submit([request(name, ENDLESS) for name in "abc"]):
            with pytest.raises(OverloadedError, match="3 requests are open of at most 4"):
                client.submit([request("d"), request("e")])
            with pytest.raises(OverloadedError, match=r"5 samples in all .*: at most 4"):
                client.submit([request(str(n)) for n in range(5)])
            assert client.num_open == 3
        await answer(client, request("f"))
        return metrics.render().decode()

    assert 'admission_rejections_total{model_name="nano",reason="queue_full"} 2.0' in run(story, max_open=4)


def test_an_engine_that_cannot_start_says_why(run):
    async def story(client, metrics):
        raise AssertionError("never ready")

    with pytest.raises(ModelError, match="cursed"):
        run(story, config=EngineConfig(seed=666))


def test_the_socket_is_in_a_private_folder_that_is_gone_once_both_have_it(run, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes = []
    connect = AsyncEngineClient.connect
    monkeypatch.setattr(
        AsyncEngineClient,
        "connect",
        lambda client, folder: modes.append(stat.S_IMODE(folder.stat().st_mode)) or connect(client, folder),
    )

    async def story(client, metrics):
        assert modes == [0o700]
        return list(tmp_path.iterdir()), await answer(client, request("a"))

    left, output = run(story)
    assert left == []
    assert output.finish_reason == "length"


def test_metrics_have_the_names_that_dashboards_know(run):
    async def story(client, metrics):
        await answer(client, request("a"))
        await until(lambda: client.stats.get("num_running") == 0)
        return metrics.render().decode()

    text = run(story)
    for line in (
        'samebit:num_running_reqs{model_name="nano"} 0.0',
        'samebit:num_queue_reqs{model_name="nano"} 0.0',
        'samebit:token_usage{model_name="nano"} 0.5',
        'samebit:conv_usage{model_name="nano"} 0.125',
        'samebit:prompt_tokens_total{model_name="nano"} 3.0',
        'samebit:cached_tokens_total{model_name="nano"} 2.0',
        'samebit:generation_tokens_total{model_name="nano"} 5.0',
        'samebit:num_requests_total{finished_reason="length",model_name="nano"} 1.0',
        'samebit:num_preemptions_total{model_name="nano"} 3.0',
        'samebit:time_to_first_token_seconds_count{model_name="nano"} 1.0',
        'samebit:inter_token_latency_seconds_count{model_name="nano"} 4.0',
        'samebit:e2e_request_latency_seconds_count{model_name="nano"} 1.0',
    ):
        assert line in text


def test_an_engine_that_dies_is_started_again_and_then_serves(run):
    async def story(client, metrics):
        for number in range(2):
            open_request = asyncio.create_task(answer(client, request(f"open{number}", ENDLESS)))
            await until(lambda: client.stats.get("num_running") == 1)
            os.kill(child_pid(), signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="signal 9"):
                await open_request
            assert client.is_dead
            with pytest.raises(EngineDeadError, match="signal 9"):
                await answer(client, request("between"))
            assert client.num_open == 0
            await until(lambda: not client.is_dead)
            assert (await answer(client, request(f"later{number}"))).finish_reason == "length"
        os.kill(child_pid(), signal.SIGKILL)
        return str(await client.wait_dead()), metrics.render().decode()

    said = []
    reason, text = run(story, max_restarts=2, say=said.append)
    assert said == ["the engine process was killed by signal 9; starting it again"] * 2
    assert reason.endswith("killed by signal 9; it was started again 2 times in ten minutes, which is the limit")
    assert 'samebit:engine_losses_total{model_name="nano"} 3.0' in text
    assert 'samebit:num_requests_total{finished_reason="error",model_name="nano"} 2.0' in text


def test_a_dead_engine_answers_no_call(run):
    async def story(client, metrics):
        with client.submit([request("a", ENDLESS)]):
            update = asyncio.create_task(client.update_weights("other"))
            await until(lambda: client.stats.get("num_running") == 1)
            os.kill(child_pid(), signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await update
        with pytest.raises(EngineDeadError):
            await client.flush_cache()
        assert not client.is_updating

    run(story)


def test_the_cache_is_emptied_on_request(run):
    async def story(client, metrics):
        await client.flush_cache()
        await answer(client, request("a"))
        await until(lambda: client.stats.get("num_flushes") == 1)

    run(story)


def test_an_answer_that_is_cancelled_ends_for_its_reader(run):
    async def story(client, metrics):
        with (
            client.submit([request("a-0", ENDLESS), request("a-1", ENDLESS)]) as stream,
            client.submit([request("b-0", ENDLESS)]) as other,
        ):
            await anext(stream)
            assert client.cancel("a") == 2
            assert client.cancel("a") == 0
            outputs = [output async for output in stream]
            assert client.num_open == 1
            assert client.cancel(None) == 1
            outputs += [output async for output in other]
            await until(lambda: client.stats.get("num_aborted") == 3)
            assert all(record.ended_s >= record.arrived_s for record in (*stream.records, *other.records))
        return {output.request_id: output.finish_reason for output in outputs}

    assert run(story) == {"a-0": "abort", "a-1": "abort", "b-0": "abort"}


def test_prompts_that_are_too_long_together_are_refused(run):
    async def story(client, metrics):
        with client.submit([request(name, ENDLESS) for name in "ab"]):
            with pytest.raises(OverloadedError, match="6 tokens, these 3: at most 8"):
                client.submit([request("c")])
            with pytest.raises(OverloadedError, match="9 tokens in all prompts: at most 8"):
                client.submit([request(name) for name in "cde"])
        return await answer(client, request("f"))

    assert run(story, max_open_tokens=8).finish_reason == "length"


def test_keys_do_not_reach_the_engine_process(run, monkeypatch):
    monkeypatch.setenv("SAMEBIT_API_KEY", "one two")
    monkeypatch.setenv("SAMEBIT_ADMIN_API_KEY", "three")
    assert keys_in_environment() == (["one", "two"], "three")

    async def story(client, metrics):
        return environment_of(child_pid())

    environment = run(story)
    assert b"PYTHONPATH=" in environment
    assert b"SAMEBIT" not in environment


texts = st.text(max_size=3)
outputs = st.builds(
    EngineOutput,
    request_id=st.just("a"),
    text=texts,
    token_ids=st.lists(st.integers(0, 9), max_size=3),
    finish_reason=st.none(),
)


@given(st.lists(outputs, min_size=1, max_size=6), st.integers(0, 6))
def test_merging_in_parts_is_merging_at_once(parts, cut):
    head, tail = parts[:cut], parts[cut:]
    if head and tail:
        assert merge([merge(head), merge(tail)]) == merge(parts)
    whole = merge(parts)
    assert whole.text == "".join(part.text for part in parts)
    assert whole.token_ids == [token for part in parts for token in part.token_ids]


@pytest.mark.parametrize(
    "error",
    [
        PromptTooLongError("too long", param="prompt"),
        ModelError("no such tensor"),
        EngineDeadError("gone"),
    ],
)
def test_an_error_crosses_the_processes_unchanged(error):
    back = messages.error_of(messages.problem_of(error))
    assert (type(back), str(back)) == (type(error), str(error))
    assert getattr(back, "param", None) == getattr(error, "param", None)


def test_a_foreign_error_arrives_as_ours():
    back = messages.error_of(messages.problem_of(KeyError("x")))
    assert type(back) is SamebitError
    assert "KeyError" in str(back)
