"""HTTP on ASGI: requests that are read within limits, and replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from jaxserve.openai.errors import BadRequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
KEEP_ALIVE_S = 5  # time after which idle connections are closed
Json = dict[str, Any]

JSON_TYPE, EVENTS_TYPE = b"application/json", b"text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """Loss of the client before the end of the reply."""


def header_value(headers: Headers, name: bytes) -> bytes:
    """Return the value of the first header with this name, in lower case; empty if there is none."""
    return next((value for key, value in headers if key == name), b"")


async def read_body(receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body of a request, which `receive` returns in parts.

    Args:
        receive: function that returns the next ASGI message.
        max_bytes: maximum size.
        timeout_s: maximum time until the last part.

    Raises:
        BadRequestError: it is too large (413) or too slow (408).
        ClientGoneError: the client has gone.
    """
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise BadRequestError(
                        f"a body must have at most {max_bytes} bytes; send less at once", None, "too_large", 413
                    )
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise BadRequestError(f"a body must arrive within {timeout_s:g} s", None, "timeout", 408) from None


async def send_bytes(
    send: Send, status: int, body: bytes, content_type: bytes = JSON_TYPE, headers: Headers = ()
) -> None:
    """Send a whole HTTP reply by ASGI's `send`."""
    own = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, content: Mapping[str, Any], status: int = 200, headers: Headers = ()) -> None:
    """Send a whole HTTP reply with `content` as JSON by ASGI's `send`."""
    await send_bytes(send, status, json.dumps(content, ensure_ascii=False).encode(errors="replace"), headers=headers)
