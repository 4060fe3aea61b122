"""A lean HTTP client for load: one connection a request, events handed on as soon as they are read. Knows no API beyond JSON."""

from __future__ import annotations

import asyncio
import contextlib
import http
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from samebit.core.errors import ConfigError

_READ_BYTES = 1 << 16
_MOST_CHARS = 200


class FailedError(Exception):
    """A request failed, for a reason in one line."""


class HttpClient:
    """Sends JSON to paths below `base_url`, which may end in /v1 or not. Raises ConfigError for a bad URL or header."""

    def __init__(self, base_url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"base_url={base_url!r}: must be http://host:port or https://...")
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._host, self._path = parts.hostname, urlsplit(self.url).path
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        sent = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "samebit-bench", "Connection": "close"}
        sent |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        sent |= headers or {}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        if not self._head.isascii() or self._head.count("\n") != len(sent):
            raise ConfigError("api_key, header: must be plain ASCII in one line")

    async def get(self, path: str) -> Any:  # Any: JSON
        """The JSON at `path`. Raises FailedError where there is none."""
        async with contextlib.aclosing(self._body("GET", path, b"")) as parts:
            data = b"".join([part async for part in parts])
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise FailedError(f"GET {path}: not JSON") from error

    async def events(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event that answers `body`. Raises FailedError for any other answer."""
        rest = b""
        async with contextlib.aclosing(self._body("POST", path, body)) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()

    async def _body(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The parts of an answer with status 200 as they arrive."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        async with self._connected() as (reader, writer):
            writer.write(head.encode() + b"\r\n" + body)
            answer = _Answer()
            while not answer.is_complete and (data := await reader.read(_READ_BYTES)):
                answer.feed(data)
                if answer.status == http.HTTPStatus.OK:
                    for part in answer.take():
                        yield part
        if answer.status != http.HTTPStatus.OK:
            raise FailedError(answer.complaint())

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except ConnectionRefusedError as error:
            raise FailedError("connection refused") from error
        except OSError as error:
            raise FailedError(f"no connection: {error.strerror or error}") from error
        try:
            yield reader, writer
        except httptools.HttpParserError as error:
            raise FailedError(f"not HTTP: {error}") from error
        except OSError as error:
            raise FailedError(f"connection lost: {error.strerror or error}") from error
        finally:
            writer.close()


class _Answer:
    """What has been read of one answer."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def take(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return parts

    def complaint(self) -> str:
        """Status and message of an answer that is not what was asked for."""
        if not self.status:
            return "the connection was closed without an answer"
        data = b"".join(self._parts)
        try:
            found = msgspec.json.decode(data)
            error = found.get("error", found)
            text = str(error.get("message") or error.get("detail") if isinstance(error, dict) else error)
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            text = data.decode(errors="replace")
        return f"HTTP {self.status}: {' '.join(text.split())[:_MOST_CHARS]}"

    # What the parser calls.

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True
