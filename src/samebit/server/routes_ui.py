"""The page at `/`, and all that it shows as JSON under `/ui/api`. Knows the service only."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from samebit.engine.views import CacheView, Look, RequestsView, Subject, View
from samebit.server.auth import is_admin
from samebit.server.chrome_trace import chrome_trace
from samebit.server.looks import Looks
from samebit.server.openapi import operation
from samebit.server.routes_operations import installed_version
from samebit.server.service import Route, Service, json_answer
from samebit.server.transport import parse_body
from samebit.server.ui_models import Dashboard, Histogram, LookBody, Trace

_FOLDER = Path(__file__).parent / "ui"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page is made of its own files only, talks to its own server only, and is in nobody's frame.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

Handler = Callable[[Request], Awaitable[Response]]


def page_files() -> dict[str, Handler]:
    """What the page consists of, by path. It holds no data, so it needs no key."""
    files = {f"/ui/{path.name}": path for path in _FOLDER.iterdir() if path.suffix in _KINDS and path.stem != "index"}
    return {path: _file(source) for path, source in {"/": _FOLDER / "index.html", **files}.items()}


def _file(path: Path) -> Handler:
    body, kind = path.read_bytes(), _KINDS[path.suffix]

    async def answer(_: Request) -> Response:
        return Response(body, media_type=kind, headers=_HEADERS)

    return answer


class PageRoutes:
    """Handlers around a service. Owner of its looks at the engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._client = service.client
        self._looks = Looks(service.client)

    def routes(self) -> list[Route]:
        """All endpoints of this module."""
        return [
            Route("GET", "/ui/api/dashboard", self.dashboard, operation(Dashboard)),
            Route("POST", "/ui/api/cache", self.cache, operation(CacheView, LookBody)),
            Route("POST", "/ui/api/requests", self.requests, operation(RequestsView, LookBody)),
            Route("POST", "/ui/api/trace", self.trace, operation(Trace, LookBody)),
        ]

    async def dashboard(self, request: Request) -> Response:
        """The numbers of /metrics, and what they are numbers of."""
        info, translator, config = self._client.info, self._service.translator, self._service.config
        metrics, labelled, histograms = self._samples()
        return json_answer(
            Dashboard(
                model=translator.served_name,
                version=installed_version(),
                system_fingerprint=info.system_fingerprint,
                profile=info.profile,
                state=self._service.state,
                is_admin=is_admin(request),
                max_model_len=info.max_length,
                max_num_seqs=config.max_num_seqs,
                num_speculative_tokens=info.num_speculative_tokens,
                pools=info.memory,
                metrics=metrics,
                labelled=labelled,
                histograms=histograms,
            )
        )

    async def cache(self, request: Request) -> Response:
        """The prefix tree, and where a request attached to it."""
        view = await self._look(request, "cache")
        assert isinstance(view, CacheView), "the engine shows what it was asked for"
        decode = self._service.translator.tokenizer.decode
        spans = [
            replace(span, text=decode(span.token_ids, skip_special_tokens=False)) if span.token_ids else span
            for span in view.spans
        ]
        return json_answer(replace(view, spans=spans))

    async def requests(self, request: Request) -> Response:
        """How the latest requests came about, or those of one answer step by step."""
        return json_answer(await self._requests(request))

    async def trace(self, request: Request) -> Response:
        """The same as a trace for Chrome or Perfetto."""
        return json_answer(chrome_trace((await self._requests(request)).requests))

    async def _requests(self, request: Request) -> RequestsView:
        view = await self._look(request, "requests")
        assert isinstance(view, RequestsView), "the engine shows what it was asked for"
        return view

    async def _look(self, request: Request, subject: Subject) -> View:
        body = await parse_body(request, LookBody, self._service.max_body_bytes)
        look = Look(subject=subject, is_admin=is_admin(request), salt=body.cache_salt, name=body.name)
        return await self._looks.see(look)

    def _samples(self) -> tuple[dict[str, float], dict[str, dict[str, float]], dict[str, Histogram]]:
        """All samples of /metrics: without labels of their own, by the value of one, and histograms."""
        plain: dict[str, float] = {}
        labelled: dict[str, dict[str, float]] = {}
        histograms: dict[str, Histogram] = {}
        for family in self._service.metrics.registry.collect():
            if family.type == "histogram":
                values = {sample.name.removeprefix(family.name): sample.value for sample in family.samples}
                buckets = [
                    (None if sample.labels["le"] == "+Inf" else float(sample.labels["le"]), sample.value)
                    for sample in family.samples
                    if sample.name.endswith("_bucket")
                ]
                histograms[family.name] = Histogram(values["_count"], values["_sum"], buckets)
                continue
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                own = [value for name, value in sample.labels.items() if name != "model_name"]
                if own:
                    labelled.setdefault(sample.name, {})[own[0]] = sample.value
                else:
                    plain[sample.name] = sample.value
        return plain, labelled, histograms
