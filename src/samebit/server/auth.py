"""Who may ask: API keys, and one for administration. Knows headers and paths, no endpoint's work."""

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from samebit.core.errors import ConfigError
from samebit.server.errors import HttpError, error_response

# What load balancers ask who have no key; neither tells more than yes or no.
_OPEN_PATHS = ("/health", "/ready")
_IS_ADMIN = "is_admin"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that are accepted. With `api` empty, endpoints that change nothing for others are open to everyone.

    Without `admin` the other ones are open where there is no key at all and `is_local`: only this machine can connect.
    """

    api: tuple[str, ...] = ()
    admin: str | None = None
    is_local: bool = True

    def allows(self, key: str | None) -> tuple[bool, bool]:
        """Whether a request with `key` is answered, and whether it may administrate.

        Every key is compared, each in constant time, so that how long it takes tells nothing about any of them.
        """
        given = (key or "").encode()
        is_admin = self.admin is not None and hmac.compare_digest(given, self.admin.encode())
        matches = [hmac.compare_digest(given, known.encode()) for known in self.api]
        if not self.api and self.admin is None:
            return True, self.is_local
        return is_admin or any(matches) or not self.api, is_admin


def read_keys(path: Path) -> list[str]:
    """One key a line; blank lines and those that begin with # are left out. Raises ConfigError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file={str(path)!r}: cannot be read: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file={str(path)!r}: has no key")
    return keys


class KeyCheck:
    """Turns away what has no key, before its body is read; but for `open_paths`, which hold nothing of anyone."""

    def __init__(self, app: ASGIApp, keys: Keys, open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset((*_OPEN_PATHS, *open_paths))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or hand on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_allowed, is_admin = self._keys.allows(_bearer(Headers(scope=scope).get("authorization")))
        if not is_allowed and scope["path"] not in self._open_paths:
            response = error_response(HttpError(401, "a valid API key is needed", code="invalid_api_key"))
            response.headers["WWW-Authenticate"] = "Bearer"
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app({**scope, _IS_ADMIN: is_admin}, receive, send)


def is_admin(request: Request) -> bool:
    """Whether the request may administrate."""
    return bool(request.scope[_IS_ADMIN])


def check_admin(request: Request) -> None:
    """Raise HttpError 403 unless the request may administrate."""
    if not is_admin(request):
        raise HttpError(403, "this needs the admin key (--admin-api-key)", code="admin_key_needed")


def _bearer(header: str | None) -> str | None:
    kind, _, key = (header or "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None
