"""Reads the body of a request, up to a limit, and makes a checked model of it. Knows no endpoint."""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from samebit.server.errors import HttpError, invalid_body
from samebit.server.transport import ClientGoneError

_LARGE_BYTES = 64 << 10
# A client reads its answer only after it has sent everything, so a somewhat larger body is read and thrown away.
_DISCARD_FACTOR = 8

Model = TypeVar("Model", bound=BaseModel)


async def parse_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body as a `model`. Raises HttpError: 413 above `max_bytes`, 400 if it is not what it should be."""
    data = await _read(request, max_bytes)
    try:
        if len(data) < _LARGE_BYTES:
            return model.model_validate_json(data)
        # Other requests go on while a large one is parsed.
        return await asyncio.to_thread(model.model_validate_json, data)
    except ValidationError as error:
        raise invalid_body(error) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = HttpError(413, f"the body is too large: at most {max_bytes} bytes are allowed", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes * _DISCARD_FACTOR:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes * _DISCARD_FACTOR:
                raise too_large
            if size <= max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
    except ClientDisconnect:
        raise ClientGoneError from None
    if size > max_bytes:
        raise too_large
    return b"".join(chunks)
