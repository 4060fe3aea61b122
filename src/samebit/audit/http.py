"""A polite HTTP client for black-box audits: at most so many requests, at most so fast. Knows no API beyond JSON."""

from __future__ import annotations

import contextlib
import http.client
import shlex
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from samebit.core.errors import ConfigError

_BUSY = (429, 503)
_WAITS_S = (1.0, 2.0, 4.0)


class RefusedError(Exception):
    """The server did not answer as asked: `status` is that of HTTP, or 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class SpentError(Exception):
    """The requests that this audit may send are spent."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_requests` in all, `rate` of them a second at most, `timeout_s` for each answer."""

    max_requests: int = 400
    rate: float = 20.0
    timeout_s: float = 120.0


class HttpClient:
    """Sends JSON to paths below a base URL. Safe to use from several threads. Raises ConfigError for a bad URL."""

    def __init__(self, url: str, api_key: str | None, limits: Limits) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r}: must be http://host:port/v1 or https://...")
        self.url = url.rstrip("/")
        self.num_requests = 0
        self._parts = parts
        self._api_key = api_key
        self._limits = limits
        self._lock = threading.Lock()
        self._next_s = 0.0

    def get(self, path: str) -> Any:  # Any: JSON
        """The JSON that lies at `path`."""
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:  # Any: JSON
        """The JSON that answers `body`. A server that is busy is asked again a few times."""
        return self._send("POST", path, msgspec.json.encode(body))

    def events(self, path: str, body: dict[str, Any], *, most: int | None = None) -> list[Any]:  # Any: JSON
        """The events that answer `body`; after `most` of them the connection is closed, whatever else would come."""
        found: list[Any] = []
        with self._open("POST", path, msgspec.json.encode(body)) as response:
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                found.append(_decode(data))
                if most is not None and len(found) >= most:
                    break
        return found

    def curl(self, path: str, body: dict[str, Any]) -> str:  # Any: JSON
        """A shell line that sends the same; the key, if there is one, is left to the shell."""
        key = ' -H "Authorization: Bearer $API_KEY"' if self._api_key else ""
        data = shlex.quote(msgspec.json.encode(body).decode())
        return f"curl -sS {shlex.quote(self.url + path)} -H 'Content-Type: application/json'{key} -d {data}"

    def _send(self, method: str, path: str, data: bytes | None) -> Any:  # Any: JSON
        for wait_s in (*_WAITS_S, None):
            try:
                with self._open(method, path, data) as response:
                    return _decode(response.read())
            except RefusedError as error:
                if error.status not in _BUSY or wait_s is None:
                    raise
                time.sleep(wait_s)
        raise AssertionError("the last round returns or raises")

    @contextlib.contextmanager
    def _open(self, method: str, path: str, data: bytes | None) -> Iterator[http.client.HTTPResponse]:
        self._wait_turn()
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None, "checked when made"
        connection = kind(self._parts.hostname, self._parts.port, timeout=self._limits.timeout_s)
        headers = {"Content-Type": "application/json", "User-Agent": "samebit-audit"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
            # A response may own the socket, so that closing the connection alone would not break a stream off.
            with connection.getresponse() as response:
                if response.status != http.client.OK:
                    text = response.read(400).decode(errors="replace")
                    raise RefusedError(f"HTTP {response.status}: {text}{self._hint(response.status)}", response.status)
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _hint(self, status: int) -> str:
        """What to do about an answer without one; nothing if that is for the server to say."""
        if status != http.client.UNAUTHORIZED:
            return ""
        return (
            "; the server does not take this key (--api-key)"
            if self._api_key
            else "; the server needs a key: give it by --api-key"
        )

    def _wait_turn(self) -> None:
        with self._lock:
            if self.num_requests >= self._limits.max_requests:
                raise SpentError(f"all {self._limits.max_requests} requests are spent")
            self.num_requests += 1
            now = time.monotonic()
            turn = max(now, self._next_s)
            self._next_s = turn + 1 / self._limits.rate
        time.sleep(turn - now)


def _decode(data: bytes) -> Any:  # Any: JSON
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"not JSON: {data[:80]!r}") from error
