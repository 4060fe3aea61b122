"""Batches in OpenAI's JSON Lines format, answered by the server's own endpoints without a network.

Knows files and the application. What is done is written at once, so a batch that was broken off can go on.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import uvloop
from starlette.types import ASGIApp, Message

from samebit.core.config import EngineConfig
from samebit.core.errors import InvalidRequestError
from samebit.engine.client import AsyncEngineClient
from samebit.engine.launch import ENGINE_CLASS, start_engine
from samebit.engine.metrics import ServerMetrics
from samebit.engine.model_source import resolve_model
from samebit.server.app import create_app
from samebit.server.errors import error_response
from samebit.server.service import Service, Traffic
from samebit.server.translate import Translator

_log = logging.getLogger(__name__)

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

_NO_LIMIT = 1 << 60
_RESTARTS = 10
_LOOK_S = 0.1
_ID_BYTES = 12
_CLIENT_ERROR, _SERVER_ERROR = 400, 500
_UNAVAILABLE = 503


class BatchRequest(msgspec.Struct, frozen=True):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"

    @property
    def answer_id(self) -> str:
        """The `id` of its answer: a digest of all that was asked, so that an answer to something else is known."""
        asked = (self.custom_id, self.url, msgspec.json.decode(self.body))
        digest = hashlib.blake2b(msgspec.json.encode(asked, order="deterministic"), digest_size=_ID_BYTES)
        return f"batch_req_{digest.hexdigest()}"


class BatchAnswer(msgspec.Struct, frozen=True):
    """What the endpoint answered; an error has a body, too."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct, frozen=True):
    """A line of the output. Lines come as requests end, so `custom_id` tells which it belongs to."""

    id: str
    custom_id: str
    response: BatchAnswer
    error: None = None


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Requests that were answered, that got an error, and that had been done before."""

    num_answered: int
    num_failed: int
    num_done_before: int


def run_batch(
    config: EngineConfig,
    source: Path,
    target: Path,
    *,
    advance: Callable[[int, int], None],
    served_model_name: str | None = None,
    engine_class: str = ENGINE_CLASS,
) -> BatchCounts:
    """Answer the requests in `source` that `target` has no lasting answer to, and add the answers to `target`.

    An answer lasts unless its status is 500 or more. `advance` is told how many are done, of how many, whenever that
    changes. Raises InvalidRequestError with the number of a wrong line before anything is loaded, else as `start_engine`, and
    EngineDeadError when the engine dies again and again.
    """
    requests = read_requests(source)
    done = keep_done(target, {request.custom_id: request.answer_id for request in requests})
    left = [request for request in requests if request.custom_id not in done]
    advance(len(done), len(requests))
    num_failed, had_failed = 0, sum(status >= _CLIENT_ERROR for status in done.values())
    if left:
        with target.open("ab") as file, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            batch = _Batch(config, left, file, lambda count: advance(len(done) + count, len(requests)))
            num_failed = runner.run(batch.run(served_model_name or config.model, engine_class))
    return BatchCounts(len(left) - num_failed, num_failed + had_failed, len(done) - had_failed)


def read_requests(path: Path) -> list[BatchRequest]:
    """The lines of a file; empty ones are passed over. Raises InvalidRequestError with the number of a wrong one."""
    try:
        rows = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from error
    requests: dict[str, BatchRequest] = {}
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        where = f"{path}, line {number}"
        try:
            request = msgspec.json.decode(row, type=BatchRequest)
            is_stream = msgspec.json.decode(request.body, type=dict[str, object]).get("stream")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"{where}: {error}") from error
        if request.url not in URLS:
            raise InvalidRequestError(f"{where}: url={request.url!r}: must be one of {', '.join(URLS)}")
        if is_stream:
            raise InvalidRequestError(f"{where}: body.stream: an answer in a file is not streamed")
        if request.custom_id in requests:
            raise InvalidRequestError(f"{where}: custom_id={request.custom_id!r}: is there twice")
        requests[request.custom_id] = request
    return list(requests.values())


def keep_done(path: Path, wanted: Mapping[str, str]) -> dict[str, int]:
    """The status of the lasting answers in `path` to those of `wanted`, by name; it keeps only these lines. Creates the file.

    `wanted` has the id of each answer by the name of its request: an answer with another one is to a request that has changed since. A
    line that was cut off when the last run ended is no answer. Raises InvalidRequestError if the file cannot be written, or
    holds anything else, which would be lost.
    """
    kept: dict[str, bytes] = {}
    statuses: dict[str, int] = {}
    try:
        path.open("ab").close()
        whole, _, _cut_off = path.read_bytes().rpartition(b"\n")
        for number, row in enumerate(whole.splitlines(), start=1):
            try:
                result = msgspec.json.decode(row, type=BatchResult)
            except (msgspec.DecodeError, UnicodeDecodeError):
                result = None
            if result is None or result.custom_id not in wanted:
                raise InvalidRequestError(
                    f"{path}, line {number}: is no answer to a request of this batch; name another file"
                )
            if result.id == wanted[result.custom_id] and result.response.status_code < _SERVER_ERROR:
                kept[result.custom_id] = row + b"\n"
                statuses[result.custom_id] = result.response.status_code
        # Never a moment in which the answers are in no file.
        beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        beside.write_bytes(b"".join(kept.values()))
        os.replace(beside, path)  # noqa: PTH105 - as a move over the file, whatever it is
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from error
    return statuses


class _Batch:
    """Owner of one run: its requests, the file that answers go to, and how many there are."""

    def __init__(
        self, config: EngineConfig, requests: list[BatchRequest], file: BinaryIO, advance: Callable[[int], None]
    ) -> None:
        self._config = config
        self._requests = iter(requests)
        self._file = file
        self._advance = advance
        self._retrying = asyncio.Lock()
        self._num_ended = 0
        self._num_failed = 0

    async def run(self, served_name: str, engine_class: str) -> int:
        """Answer all; returns how many got an error."""
        config = self._config
        metrics = ServerMetrics(served_name)
        async with start_engine(
            config,
            metrics,
            max_open=_NO_LIMIT,
            max_open_tokens=_NO_LIMIT,
            max_restarts=_RESTARTS,
            engine_class=engine_class,
        ) as client:
            translator = Translator(resolve_model(config.model), client.info, served_name)
            service = Service(client, translator, metrics, Traffic(), config, int(time.time()), _NO_LIMIT)
            app = create_app(service)
            # Twice as many as run at once, so that none of them waits for this side.
            workers = [asyncio.create_task(self._work(app, client)) for _ in range(2 * config.max_num_seqs)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
        return self._num_failed

    async def _work(self, app: ASGIApp, client: AsyncEngineClient) -> None:
        for request in self._requests:
            status, body = await ask(app, request.url, bytes(request.body))
            if status == _UNAVAILABLE:
                # The engine died, and one of the requests in it may be why: each is tried again without the others.
                async with self._retrying:
                    await _until_alive(client)
                    status, body = await ask(app, request.url, bytes(request.body))
            name = request.answer_id
            result = BatchResult(name, request.custom_id, BatchAnswer(status, name, msgspec.Raw(body)))
            self._file.write(msgspec.json.encode(result) + b"\n")
            self._file.flush()
            self._num_ended += 1
            self._num_failed += status >= _CLIENT_ERROR
            self._advance(self._num_ended)


async def _until_alive(client: AsyncEngineClient) -> None:
    """Return when there is an engine again; raise what it died of if there will be none."""
    death = asyncio.create_task(client.wait_dead())
    try:
        while client.is_dead:
            await asyncio.wait([death], timeout=_LOOK_S)
            if death.done():
                raise death.result()
    finally:
        death.cancel()


async def ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of what `app` answers to a POST. Never raises but for what ends the program: a fault is an answer, too."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, chunks = 0, []

    async def receive() -> Message:
        for message in messages:
            return message
        await asyncio.Event().wait()  # nobody hangs up
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception as error:  # noqa: BLE001 - a request is a boundary, and the batch goes on with the others
        _log.exception("a request to %s failed", path)
        response = error_response(error)
        status, chunks = response.status_code, [bytes(response.body)]
    return status, b"".join(chunks)
