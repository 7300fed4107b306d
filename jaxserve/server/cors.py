"""CORS: pages of other origins that may call the server from a browser. Without the option there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.server.http import header_value

if TYPE_CHECKING:
    from jaxserve.server.http import Headers

_EXPOSED = b"retry-after, retry-after-ms, x-ignored-params, x-degraded, endpoint-load-metrics"
_MAX_AGE_S = b"600"


class Origins:
    """Origins whose pages may read replies.

    Args:
        allowed: origins such as `https://chat.example.org`; "*" allows all.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = {origin.rstrip("/").encode() for origin in allowed}

    def headers(self, request: Headers) -> list[tuple[bytes, bytes]]:
        """Return the reply headers that let a page of the request's origin read the reply; none if it may not."""
        origin = header_value(request, b"origin")
        shown = b"*" if b"*" in self._allowed else origin
        if shown not in self._allowed:
            return []
        return [
            (b"access-control-allow-origin", shown),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def refuses(self, method: str, request: Headers) -> bool:
        """Return whether the request is a cross-site POST (by Sec-Fetch-Site) from an origin that is not allowed.

        Browsers send simple requests without a preflight. The page could not read the reply, but the server would do
        the work.
        """
        is_foreign = method == "POST" and header_value(request, b"sec-fetch-site") == b"cross-site"
        return is_foreign and not self.headers(request)

    def preflight(self, method: str, request: Headers) -> list[tuple[bytes, bytes]]:
        """Return the reply headers for a CORS preflight request from an allowed origin; empty for any other request.

        A preflight carries no API key; the request after it does.
        """
        headers = self.headers(request)
        if method != "OPTIONS" or not headers or not header_value(request, b"access-control-request-method"):
            return []
        wanted = header_value(request, b"access-control-request-headers")
        return [
            *headers,
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", wanted or b"authorization, content-type"),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
