"""Other weights in an engine process: when they are loaded, when they are served, and what requests notice. With a fake engine."""

import asyncio
import os
import signal

import pytest

from samebit.core.errors import EngineDeadError, ModelError, OverloadedError
from tests.server.fakes import ENDLESS, answer_ids
from tests.server.test_engine_process import answer, child_pid, request, until


def test_an_engine_that_is_started_again_has_the_weights_of_the_last_update(run):
    async def story(client, metrics):
        await client.update_weights("other")
        os.kill(child_pid(), signal.SIGKILL)
        await until(lambda: client.is_dead)
        await until(lambda: not client.is_dead)
        return client.info.model

    assert run(story, max_restarts=1) == "other"


def test_weights_are_loaded_when_no_request_is_open_and_none_comes_between(run):
    async def story(client, metrics):
        first = asyncio.create_task(answer(client, request("first", max_tokens=40)))
        await until(lambda: client.num_open == 1)
        update = asyncio.create_task(client.update_weights("other"))
        await until(lambda: client.is_updating)
        with pytest.raises(OverloadedError, match="weights"):
            client.submit([request("second")])
        with pytest.raises(OverloadedError, match="weights"):
            await client.update_weights("third")
        assert (await first).token_ids == answer_ids(request("first"), 40)
        assert await update == 0
        assert (await answer(client, request("third"))).finish_reason == "length"
        return client.info

    info = run(story)
    assert (info.model, info.system_fingerprint) == ("other", "fp_other")


@pytest.mark.parametrize("is_aborting", [False, True])
def test_weights_that_cannot_be_loaded_leave_the_old_ones_and_every_request(run, tmp_path, is_aborting):
    async def story(client, metrics):
        path = tmp_path / "later cursed"
        with client.submit([request("open", ENDLESS)]) as stream:
            await anext(stream)
            update = asyncio.create_task(client.update_weights(str(path), is_aborting=is_aborting))
            await asyncio.sleep(0)
            assert (await answer(client, request("new"))).finish_reason == "length", "requests are taken meanwhile"
            with pytest.raises(OverloadedError, match="weights"):
                await client.update_weights("third")
            path.touch()
            with pytest.raises(ModelError, match="cursed"):
                await update
            assert client.num_open == 1
            assert (await anext(stream)).finish_reason is None
        assert not client.is_updating
        assert (client.info.model, client.info.system_fingerprint) == ("nano", "fp_fake")
        return await answer(client, request("a"))

    assert run(story).finish_reason == "length"


def test_weights_that_an_engine_of_before_has_loaded_are_not_served(run):
    async def story(client, metrics):
        with client.submit([request("a", ENDLESS)]):
            update = asyncio.create_task(client.update_weights("other"))
            await until(lambda: client.is_updating)
            os.kill(child_pid(), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await update
        await until(lambda: not client.is_dead)
        assert not client.is_updating
        assert client.info.model == "nano"

    run(story, max_restarts=1)
