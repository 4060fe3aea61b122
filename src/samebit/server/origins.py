"""Which web pages may ask: those of this server, and those whose origins are allowed. Knows headers, no endpoint.

A browser sends what any page on the web asks for to a server on its reader's own machine, and tells in `Origin` whose page it was. A page
whose name has been pointed at this machine (DNS rebinding) has a `Host` that nobody gave this server.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samebit.core.errors import ConfigError
from samebit.server.errors import HttpError, error_response

_ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+|null|\*")
_READING = ("GET", "HEAD")
_PREFLIGHT_S = "600"


@dataclass(frozen=True, slots=True)
class Origins:
    """`allowed`: origins besides the server's own, "*" for all.

    `hosts`: what the server is called, besides the names of the loopback; "*" or None: anything.
    """

    allowed: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what no browser would send as an origin."""
        for origin in self.allowed:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins: {origin!r} is not of the form https://name:port, null or *")

    def allows(self, origin: str) -> bool:
        """Whether pages of `origin` may ask for anything."""
        return _ANY in self.allowed or origin.lower() in self.allowed

    def knows(self, host: str | None) -> bool:
        """Whether `host`, a Host header, is a name of this server. Without the header no browser asks."""
        if host is None or self.hosts is None or _ANY in self.hosts:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self.hosts or _is_loopback(name)


class OriginCheck:
    """Turns away what pages of other origins ask for, but for reading, which their browsers keep from them."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or a preflight, or hand on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin, host, method = headers.get("origin"), headers.get("host"), scope["method"]
        if not self._origins.knows(host):
            text = f"Host: {(host or '')[:100]!r} is not a name of this server (--allowed-hosts)"
            await _refuse(text, "host_not_allowed", scope, receive, send)
        elif origin is None or _is_own(origin, host):
            await self._app(scope, receive, send)
        elif self._origins.allows(origin):
            await self._answer(origin, headers, scope, receive, send)
        elif method in _READING:
            await self._app(scope, receive, send)
        else:
            text = f"Origin: pages of {origin[:100]!r} may not use this server (--allowed-origins)"
            await _refuse(text, "origin_not_allowed", scope, receive, send)

    async def _answer(self, origin: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer so that the page gets to see it."""
        told = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": "Retry-After", "Vary": "Origin"}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            told |= {
                "Access-Control-Allow-Methods": "GET, HEAD, POST",
                "Access-Control-Allow-Headers": headers.get("access-control-request-headers", ""),
                "Access-Control-Max-Age": _PREFLIGHT_S,
            }
            await Response(status_code=204, headers=told)(scope, receive, send)
            return
        await self._app(scope, receive, _telling(told, send))


def _telling(told: Mapping[str, str], send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            MutableHeaders(scope=message).update(told)
        await send(message)

    return send_with_headers


async def _refuse(text: str, code: str, scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(HttpError(403, text, code=code))
    response.headers["Connection"] = "close"  # the body is not read
    await response(scope, receive, send)


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page of `origin` came from where it asks. A proxy may have taken the TLS away, so the scheme does not count."""
    return host is not None and origin.partition("://")[2].lower() == host.lower()


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
