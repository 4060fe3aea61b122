"""Endpoints for operators: is it alive, what is it, how is it doing. Knows the service only."""

import importlib.metadata

from starlette.requests import Request
from starlette.responses import Response

from samebit.server.openapi import operation
from samebit.server.response_models import ServerInfo, Status, Version
from samebit.server.service import Route, Service, json_answer


class OperationsRoutes:
    """Handlers around a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._client, self._translator = service.client, service.translator

    def routes(self) -> list[Route]:
        """All endpoints of this module."""
        return [
            Route("GET", "/health", self.health, operation(Status)),
            Route("GET", "/ready", self.ready, operation(Status)),
            Route("GET", "/version", self.version, operation(Version)),
            Route("GET", "/server_info", self.server_info, operation(ServerInfo)),
            Route("GET", "/metrics", self.metrics, operation(None)),
        ]

    async def health(self, request: Request) -> Response:
        """Whether the engine is alive. Never waits for it."""
        return json_answer(Status("engine dead"), 503) if self._client.is_dead else json_answer(Status("ok"))

    async def ready(self, request: Request) -> Response:
        """Whether new requests are welcome."""
        if self._service.traffic.is_draining:
            return json_answer(Status("shutting down"), 503)
        return await self.health(request)

    async def version(self, request: Request) -> Response:
        """The installed version."""
        return json_answer(Version(installed_version()))

    async def server_info(self, request: Request) -> Response:
        """Model, numerics profile, settings and the engine's latest numbers."""
        return json_answer(
            ServerInfo(
                version=installed_version(),
                model=self._service.config.model,
                served_model_name=self._translator.served_name,
                engine=self._client.info,
                config=self._service.config,
                generation_defaults=self._translator.defaults,
                stats=self._client.stats,
            )
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def installed_version() -> str:
    """The version of this installation."""
    return importlib.metadata.version("samebit")
