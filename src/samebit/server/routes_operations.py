"""Endpoints for operators: is it alive, what is it, how is it doing; and what changes it. Knows the service only."""

import asyncio
import datetime as dt
import importlib.metadata
import secrets
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from samebit.core.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelError
from samebit.core.request import MAX_PRIORITY, SamplingParams
from samebit.core.request import Request as EngineRequest
from samebit.engine.streams import OutputStream
from samebit.server.auth import check_admin
from samebit.server.errors import HttpError
from samebit.server.openapi import operation
from samebit.server.operations_models import (
    AbortBody,
    Aborted,
    Load,
    Loads,
    ModelInfo,
    Success,
    TotalLoad,
    UpdatedWeights,
    WeightsBody,
)
from samebit.server.response_models import ServerInfo, Status, Version
from samebit.server.service import Route, Service, json_answer
from samebit.server.transport import parse_body, unless_gone

_PROBE_S = 20.0


class OperationsRoutes:
    """Handlers around a service. Owner of the name that whoever changed the weights last gave them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._client, self._translator = service.client, service.translator
        self._weight_version = "default"

    def routes(self) -> list[Route]:
        """All endpoints of this module."""
        return [
            Route("GET", "/health", self.health, operation(Status)),
            Route("GET", "/ready", self.ready, operation(Status)),
            Route("GET", "/health_generate", self.health_generate, operation(Status)),
            Route("GET", "/version", self.version, operation(Version)),
            Route("GET", "/server_info", self.server_info, operation(ServerInfo)),
            Route("GET", "/model_info", self.model_info, operation(ModelInfo)),
            Route("GET", "/v1/loads", self.loads, operation(Loads)),
            Route("GET", "/loads", self.loads, operation(Loads)),
            Route("GET", "/metrics", self.metrics, operation(None)),
            Route("POST", "/abort_request", self.abort, operation(Aborted, AbortBody)),
            Route("POST", "/flush_cache", self.flush_cache, operation(Success)),
            Route("POST", "/update_weights_from_disk", self.update_weights, operation(UpdatedWeights, WeightsBody)),
        ]

    async def health(self, request: Request) -> Response:
        """Whether the engine is alive. Never waits for it."""
        return json_answer(Status("engine dead"), 503) if self._client.is_dead else json_answer(Status("ok"))

    async def ready(self, request: Request) -> Response:
        """Whether new requests are welcome."""
        state = self._service.state
        return json_answer(Status(state), 200 if state == "ok" else 503)

    async def health_generate(self, request: Request) -> Response:
        """Whether the engine generates: it must draw a token, for this probe or for anyone.

        The probe counts for no limit and goes before all requests that wait; one that runs may be the first to get a token.
        """
        self._service.check_open()
        if self._client.is_updating:
            return json_answer(Status("loading weights"), 503)
        probe = EngineRequest(
            request_id=f"health-{secrets.token_hex(8)}",
            prompt_token_ids=[0],
            params=SamplingParams(max_tokens=1, temperature=0.0),
            seed=0,
            priority=MAX_PRIORITY,
        )
        with self._client.submit([probe], is_probe=True) as stream:
            drawing = asyncio.wait_for(self._until_drawn(stream), _PROBE_S)
            try:
                is_well = await unless_gone(request.receive, drawing)
            except TimeoutError:
                return json_answer(Status(f"no token within {_PROBE_S:g} s"), 503)
        return json_answer(Status("ok" if is_well else "no token"), 200 if is_well else 503)

    async def _until_drawn(self, probe: OutputStream) -> bool:
        """Whether the engine has drawn a token before the probe has failed."""
        own, anyone = asyncio.ensure_future(anext(probe)), asyncio.ensure_future(self._client.next_token())
        try:
            await asyncio.wait([own, anyone], return_when=asyncio.FIRST_COMPLETED)
            return anyone.done() or own.result().finish_reason in ("length", "stop")
        finally:
            own.cancel()
            anyone.cancel()

    async def version(self, request: Request) -> Response:
        """The installed version."""
        return json_answer(Version(installed_version()))

    async def server_info(self, request: Request) -> Response:
        """Model, numerics profile, settings and the engine's latest numbers."""
        return json_answer(
            ServerInfo(
                version=installed_version(),
                model=self._client.info.model,
                served_model_name=self._translator.served_name,
                engine=self._client.info,
                config=self._service.config,
                generation_defaults=self._translator.defaults,
                stats=self._client.stats,
            )
        )

    async def model_info(self, request: Request) -> Response:
        """What is served."""
        info = self._client.info
        return json_answer(
            ModelInfo(
                model_path=info.model,
                tokenizer_path=self._service.config.model,
                served_model_name=self._translator.served_name,
                is_generation=True,
                max_model_len=info.max_length,
                vocab_size=info.vocab_size,
                weight_version=self._weight_version,
                system_fingerprint=info.system_fingerprint,
            )
        )

    async def loads(self, request: Request) -> Response:
        """How busy the engine is, for routers."""
        load = self._load()
        return json_answer(
            Loads(
                timestamp=dt.datetime.now(dt.UTC).isoformat(),
                version=installed_version(),
                dp_rank_count=1,
                loads=[load],
                aggregate=TotalLoad(
                    total_running_reqs=load.num_running_reqs,
                    total_waiting_reqs=load.num_waiting_reqs,
                    total_reqs=load.num_total_reqs,
                    avg_token_usage=load.token_usage,
                    avg_throughput=load.gen_throughput,
                    avg_utilization=load.utilization,
                ),
            )
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def abort(self, request: Request) -> Response:
        """End the requests of an answer, whose id only its client knows, or all of them, which is for the operator."""
        body = await parse_body(request, AbortBody, self._service.max_body_bytes)
        if body.abort_all:
            check_admin(request)
        elif not body.rid:
            raise InvalidRequestError("rid: needed without abort_all", param="rid")
        return json_answer(Aborted(self._client.cancel(None if body.abort_all else body.rid)))

    async def flush_cache(self, request: Request) -> Response:
        """Empty the prefix cache."""
        check_admin(request)
        await self._client.flush_cache()
        return json_answer(Success(success=True, message="the prefix cache is empty"))

    async def update_weights(self, request: Request) -> Response:
        """Load the weights in a folder, and serve them when open requests have ended; goes on when the client leaves."""
        check_admin(request)
        self._service.check_open()
        body = await parse_body(request, WeightsBody, self._service.max_body_bytes)
        if not await asyncio.to_thread(_is_folder, body.model_path):
            raise InvalidRequestError(f"model_path={body.model_path!r}: is no folder", param="model_path")
        try:
            num_aborted = await self._client.update_weights(body.model_path, is_aborting=bool(body.abort_all_requests))
        except (ConfigError, ModelError) as error:
            raise HttpError(400, f"model_path: {error}", param="model_path", code="weights_refused") from error
        info = self._client.info
        self._weight_version = body.weight_version or info.system_fingerprint
        return json_answer(
            UpdatedWeights(
                success=True,
                message=f"{info.model} is served",
                weight_version=self._weight_version,
                system_fingerprint=info.system_fingerprint,
                num_aborted=num_aborted,
            )
        )

    def _load(self) -> Load:
        info, stats, rates = self._client.info, self._client.stats, self._service.metrics.load()
        if self._client.is_dead:
            raise EngineDeadError("the engine is not there")
        most = self._service.config.max_num_seqs
        num_open = self._client.num_open
        # The engine tells its numbers now and then; what is open is known here at any moment.
        num_running = min(int(stats.get("num_running", 0)), num_open)
        usage = max((value for name, value in stats.items() if name.startswith("usage_")), default=0.0)
        num_tokens = info.memory.get("pages_full", 0) * info.memory.get("page_size", 0)
        return Load(
            dp_rank=0,
            num_running_reqs=num_running,
            num_waiting_reqs=num_open - num_running,
            num_total_reqs=num_open,
            num_used_tokens=int(stats.get("usage_full", 0.0) * num_tokens),
            max_total_num_tokens=num_tokens,
            max_running_requests=most,
            token_usage=usage,
            utilization=num_running / most,
            **rates,
        )


def installed_version() -> str:
    """The version of this installation."""
    return importlib.metadata.version("samebit")


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False
