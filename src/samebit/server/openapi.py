"""The OpenAPI document of the endpoints, from the models that check and make their bodies. Knows no handler."""

import re
from typing import Any

import msgspec
from pydantic import BaseModel

from samebit.engine.views import CacheView, RequestsView
from samebit.server import operations_models, response_models, ui_models
from samebit.server.body import NEUTRAL
from samebit.server.operations_models import AbortBody, WeightsBody
from samebit.server.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from samebit.server.response_models import ErrorBody
from samebit.server.responses_body import ResponsesBody
from samebit.server.responses_models import ResponseObject
from samebit.server.ui_models import LookBody

_REF = "#/components/schemas/{name}"
_REQUEST_MODELS: tuple[type[BaseModel], ...] = (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LookBody,
    ResponsesBody,
    TokenizeBody,
    WeightsBody,
)
_RESPONSE_MODELS = (
    operations_models.Aborted,
    operations_models.Loads,
    operations_models.ModelInfo,
    operations_models.Success,
    operations_models.UpdatedWeights,
    response_models.ChatCompletion,
    response_models.ChatCompletionChunk,
    response_models.Completion,
    response_models.Detokenized,
    response_models.ErrorBody,
    response_models.ModelCard,
    response_models.ModelList,
    response_models.ServerInfo,
    response_models.Status,
    response_models.Tokenized,
    response_models.Version,
    ui_models.Dashboard,
    ui_models.Trace,
    CacheView,
    RequestsView,
    ResponseObject,
)
_ERRORS = {
    "400": "The request is wrong: `param` names the field",
    "401": "An API key is needed",
    "403": "The admin key is needed, or a page of another origin asked",
    "404": "No such model or path",
    "413": "The body is too large",
    "415": "The body is not called JSON",
    "500": "The engine could not complete the request",
    "503": "Overloaded or shutting down: try again after `Retry-After` seconds",
}
_SSE = {"type": "object", "properties": {"data": {"type": "string"}, "event": {"type": "string"}}, "required": ["data"]}
_GET_ERRORS = ("401", "403", "404", "500", "503")


def operation(
    answer: type[msgspec.Struct] | None, body: type[BaseModel] | None = None, *, is_streamed: bool = False
) -> dict[str, Any]:
    """What the document says of one endpoint. `answer` None: plain text. `is_streamed`: it can also be events.

    Any, here and below: OpenAPI is JSON.
    """
    content: dict[str, Any] = (
        {"text/plain": {"schema": {"type": "string"}}} if answer is None else _content(answer.__name__)
    )
    if is_streamed:
        content["text/event-stream"] = {"schema": _SSE}
    codes = _ERRORS if body is not None else _GET_ERRORS
    errors = {code: {"description": _ERRORS[code], "content": _content(ErrorBody.__name__)} for code in codes}
    described: dict[str, Any] = {"responses": {"200": {"description": "OK", "content": content}, **errors}}
    if body is not None:
        described["requestBody"] = {"required": True, "content": _content(body.__name__)}
    return described


def with_schemas(document: dict[str, Any]) -> dict[str, Any]:
    """`document` with the schemas that its operations refer to."""
    _, schemas = msgspec.json.schema_components(_RESPONSE_MODELS, ref_template=_REF)
    for model in _REQUEST_MODELS:
        schema = model.model_json_schema(ref_template=_REF.replace("{name}", "{model}"))
        for name, part in {**schema.pop("$defs", {}), model.__name__: schema}.items():
            schemas[name] = _with_neutral_values(part)
    paths = {path: _with_parameters(path, operations) for path, operations in document["paths"].items()}
    return {**document, "paths": paths, "components": {"schemas": schemas}}


def _with_neutral_values(schema: dict[str, Any]) -> dict[str, Any]:
    """A body's schema in which fields that may only ask for nothing say so."""
    fields = schema.get("properties", {})
    told = {name: {"enum": list(NEUTRAL[name])} for name in fields if name in NEUTRAL}
    return {**schema, "properties": {**fields, **told}} if told else schema


def _with_parameters(path: str, operations: dict[str, Any]) -> dict[str, Any]:
    """The operations of a path with the parameters in it."""
    names = re.findall(r"{(\w+)}", path)
    given = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    return {method: {**said, "parameters": given} for method, said in operations.items()} if given else operations


def _content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
