"""The HTTP application: all routes, errors in one shape, and the document of both. Knows no handler's work."""

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from samebit.core.errors import SamebitError
from samebit.server.auth import KeyCheck
from samebit.server.errors import HttpError, error_response
from samebit.server.openapi import with_schemas
from samebit.server.origins import OriginCheck
from samebit.server.routes_openai import OpenAIRoutes
from samebit.server.routes_operations import OperationsRoutes, installed_version
from samebit.server.routes_ui import PageRoutes, page_files
from samebit.server.service import Service
from samebit.server.traces import TraceRequests
from samebit.server.transport import ClientGoneError

_CLIENT_CLOSED_REQUEST = 499


def create_app(service: Service) -> FastAPI:
    """The application around `service`."""
    app = FastAPI(title="samebit", version=installed_version(), docs_url=None, redoc_url=None)
    page = page_files() if service.has_page else {}
    for path, answer in page.items():
        app.add_api_route(path, answer, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    page_routes = PageRoutes(service).routes() if service.has_page else []
    for route in (*OpenAIRoutes(service).routes(), *OperationsRoutes(service).routes(), *page_routes):
        app.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            openapi_extra=route.description,
            response_model=None,
            responses={},
            response_class=Response,
        )
        if route.method == "GET":
            app.add_api_route(route.path, route.handler, methods=["HEAD"], response_model=None, include_in_schema=False)
    if service.record_span is not None:
        app.add_middleware(TraceRequests, record=service.record_span, model=service.translator.served_name)
    app.add_middleware(KeyCheck, keys=service.keys, open_paths=page)
    # The outermost: a browser asks whether it may ask before it sends a key.
    app.add_middleware(OriginCheck, origins=service.origins)
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
