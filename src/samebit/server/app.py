"""The HTTP application: OpenAI's endpoints and a few for operators.

Knows the engine's client only. Does not know sockets, signals or processes.
"""

import asyncio
import importlib.metadata
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from samebit.core.config import EngineConfig
from samebit.core.errors import SamebitError
from samebit.core.request import EngineOutput
from samebit.engine.client import AsyncEngineClient, OutputStream
from samebit.engine.metrics import ServerMetrics
from samebit.server.answers import Answer
from samebit.server.errors import DrainingError, HttpError, error_response
from samebit.server.openapi import operation, with_schemas
from samebit.server.request_models import ChatBody, CompletionBody
from samebit.server.response_models import (
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    ServerInfo,
    Status,
    Version,
)
from samebit.server.translate import Job, Translator
from samebit.server.transport import ClientGoneError, EventStream, parse_body, unless_gone

_CLIENT_CLOSED_REQUEST = 499


class Traffic:
    """Counts the requests whose answers are in progress. Owned by the server's run, which decides when to drain."""

    def __init__(self) -> None:
        self.num_open = 0
        self.is_draining = False
        self.idle = asyncio.Event()
        """Set while no answer is in progress."""
        self.idle.set()

    def open(self) -> None:
        """An answer begins."""
        self.num_open += 1
        self.idle.clear()

    def close(self) -> None:
        """An answer has ended, one way or another."""
        self.num_open -= 1
        if not self.num_open:
            self.idle.set()


class Service:
    """Owner of nothing; brings together what the handlers need."""

    def __init__(
        self,
        client: AsyncEngineClient,
        translator: Translator,
        metrics: ServerMetrics,
        traffic: Traffic,
        config: EngineConfig,
        *,
        started: int,
        max_body_bytes: int,
    ) -> None:
        self._client = client
        self._translator = translator
        self._metrics = metrics
        self._traffic = traffic
        self._config = config
        self._started = started
        self._max_body_bytes = max_body_bytes

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        self._check_open()
        body = await parse_body(request, ChatBody, self._max_body_bytes)
        return await self._answer(request, await self._translator.chat(body), is_chat=True)

    async def complete(self, request: Request) -> Response:
        """Continue one or more prompts."""
        self._check_open()
        body = await parse_body(request, CompletionBody, self._max_body_bytes)
        # A million prompts are turned away before any of them is encoded.
        self._client.check_count(body.num_prompts * (body.n or 1))
        return await self._answer(request, await self._translator.complete(body), is_chat=False)

    async def models(self, request: Request) -> Response:
        """List the model."""
        return _json(ModelList(data=[self._card()]))

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        self._translator.check_model(request.path_params["name"])
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """Whether the engine is alive. Never waits for it."""
        return _json(Status("engine dead"), 503) if self._client.is_dead else _json(Status("ok"))

    async def ready(self, request: Request) -> Response:
        """Whether new requests are welcome."""
        if self._traffic.is_draining:
            return _json(Status("shutting down"), 503)
        return await self.health(request)

    async def version(self, request: Request) -> Response:
        """The installed version."""
        return _json(Version(_version()))

    async def server_info(self, request: Request) -> Response:
        """Model, numerics profile, settings and the engine's latest numbers."""
        return _json(
            ServerInfo(
                version=_version(),
                model=self._config.model,
                served_model_name=self._translator.served_name,
                engine=self._client.info,
                config=self._config,
                generation_defaults=self._translator.defaults,
                stats=self._client.stats,
            )
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._translator.served_name, created=self._started, max_model_len=self._client.info.max_length
        )

    def _check_open(self) -> None:
        if self._traffic.is_draining:
            raise DrainingError("the server is shutting down")

    async def _answer(self, request: Request, job: Job, *, is_chat: bool) -> Response:
        self._check_open()
        answer = Answer(
            job,
            self._translator.tokenizer,
            is_chat=is_chat,
            model=self._translator.served_name,
            fingerprint=self._client.info.system_fingerprint,
        )
        stream = self._client.submit(job.requests)
        self._traffic.open()
        keeps_open = False
        try:
            if not job.is_stream:
                return _json_bytes(await unless_gone(request.receive, answer.whole(stream)))
            # Not until the first output is it known that the engine took the request: its refusal is still a 400.
            first = await unless_gone(request.receive, _first(stream))
            keeps_open = True
            return EventStream(answer.events(first, stream), lambda: self._end(stream))
        finally:
            if not keeps_open:
                self._end(stream)

    def _end(self, stream: OutputStream) -> None:
        stream.close()
        self._traffic.close()


def create_app(service: Service) -> FastAPI:
    """The application around `service`."""
    app = FastAPI(title="samebit", version=_version(), docs_url=None, redoc_url=None)
    routes: list[tuple[str, str, Callable[[Request], Coroutine[Any, Any, Response]], dict[str, Any]]] = [
        ("POST", "/v1/chat/completions", service.chat, operation(ChatCompletion, ChatBody)),
        ("POST", "/v1/completions", service.complete, operation(Completion, CompletionBody)),
        ("GET", "/v1/models", service.models, operation(ModelList)),
        ("GET", "/v1/models/{name:path}", service.model, operation(ModelCard)),
        ("GET", "/health", service.health, operation(Status)),
        ("GET", "/ready", service.ready, operation(Status)),
        ("GET", "/version", service.version, operation(Version)),
        ("GET", "/server_info", service.server_info, operation(ServerInfo)),
        ("GET", "/metrics", service.metrics, operation(None)),
    ]  # Any: ASGI's coroutines and OpenAPI's JSON
    for method, path, handler, description in routes:
        app.add_api_route(
            path,
            handler,
            methods=[method],
            openapi_extra=description,
            response_model=None,
            responses={},
            response_class=Response,
        )
    for kind in (SamebitError, HTTPException, ClientGoneError, Exception):
        app.add_exception_handler(kind, _on_error)
    document = with_schemas(get_openapi(title=app.title, version=app.version, routes=app.routes))
    app.openapi = lambda: document  # type: ignore[method-assign]  # FastAPI's documented way
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    if isinstance(error, HTTPException):
        method_and_path = f"{request.method} {request.url.path}"
        text = {404: f"{method_and_path}: no such path", 405: f"{method_and_path}: method not allowed"}
        response = error_response(HttpError(error.status_code, text.get(error.status_code, error.detail)))
        response.headers.update(error.headers or {})
        return response
    return error_response(error)


async def _first(stream: OutputStream) -> EngineOutput:
    return await anext(stream)


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return _json_bytes(msgspec.json.encode(value), status)


def _json_bytes(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _version() -> str:
    return importlib.metadata.version("samebit")
