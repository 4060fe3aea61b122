"""Errors as HTTP answers, always in OpenAI's shape. Knows classes and status codes."""

import http
import re
from dataclasses import dataclass

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from samebit.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    SamebitError,
)
from samebit.server.response_models import ErrorBody, ErrorDetail
from samebit.server.tool_models import UNKNOWN_TYPE

_RETRY_AFTER_S = "1"
_MAX_MESSAGE_CHARS = 1000
_FORMAT_KIND = re.compile(r"^(response_format|text\.format)\.(?:text|json_object|json_schema)(?=\.)")
_MAX_LEVELS = 200  # pydantic's


class HttpError(SamebitError):
    """A request that fails for a reason of HTTP's own, such as an unknown path or a body that is too large."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class DrainingError(OverloadedError):
    """The server finishes what it has and takes nothing new."""


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: type[SamebitError]
    status: int
    code: str | None


# The first rule that fits counts.
_RULES = (
    _Rule(PromptTooLongError, 400, "context_length_exceeded"),
    _Rule(InvalidRequestError, 400, "invalid_value"),
    _Rule(DrainingError, 503, "shutting_down"),
    _Rule(OverloadedError, 503, "overloaded"),
    _Rule(EngineDeadError, 503, "engine_dead"),
)


def error_response(error: Exception) -> Response:
    """The answer to a request that ended with `error`; of an error not of ours only the fact is told."""
    status, body = describe(error)
    headers = {"Retry-After": _RETRY_AFTER_S} if isinstance(error, OverloadedError | EngineDeadError) else {}
    if status in (http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, http.HTTPStatus.UNSUPPORTED_MEDIA_TYPE):
        headers["Connection"] = "close"
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def describe(error: Exception) -> tuple[int, ErrorBody]:
    """Status code and body for `error`."""
    if isinstance(error, HttpError):
        return error.status, _body(str(error), error.status, error.param, error.code)
    for rule in _RULES:
        if isinstance(error, rule.kind):
            param = error.param if isinstance(error, InvalidRequestError) else None
            text = f"{param}: {error}" if param and param not in str(error) else str(error)
            return rule.status, _body(text, rule.status, param, rule.code)
    if isinstance(error, SamebitError):
        return 500, _body(str(error), 500, None, "engine_error")
    return 500, _body("internal error; the log has more", 500, None, "internal_error")


def invalid_body(error: ValidationError) -> HttpError:
    """The first fault that pydantic found, without the value: it may be a prompt."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # Which kind of format it is is no level of the body.
    param = _FORMAT_KIND.sub(r"\1", ".".join(map(str, fault["loc"]))) or None
    if fault["type"] == UNKNOWN_TYPE:
        param = f"{param}.type"
    if fault["type"] == "json_invalid" and "recursion limit" in fault["msg"]:
        text = f"the body is nested too deeply, at most {_MAX_LEVELS} levels are allowed: {fault['msg']}"
        return HttpError(400, text, code="invalid_json")
    if fault["type"] == "json_invalid":
        return HttpError(400, f"the body is not valid JSON: {fault['msg']}", code="invalid_json")
    text = "required field" if fault["type"] == "missing" else fault["msg"]
    return HttpError(400, f"{param}: {text}" if param else text, param=param, code=fault["type"])


def _body(message: str, status: int, param: str | None, code: str | None) -> ErrorBody:
    # An echoed value may hold half a surrogate pair, which no JSON can carry.
    message = message[:_MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
    kind = "invalid_request_error" if status < http.HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return ErrorBody(ErrorDetail(message, kind, param, code))
