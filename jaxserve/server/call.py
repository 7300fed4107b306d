"""Call: one HTTP request, from which handlers read and to which they reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.server import http
from jaxserve.server.connection import Connection
from jaxserve.server.http import ClientGoneError
from jaxserve.server.json_body import SHORT_BODY_BYTES, parse_json
from jaxserve.server.json_pieces import is_short, json_pieces
from jaxserve.server.request_classes import tenant_salt

if TYPE_CHECKING:
    from jaxserve.errors import RequestError
    from jaxserve.server.config import ServerConfig
    from jaxserve.server.http import Headers, Json, Receive, Scope, Send
    from jaxserve.server.workers import Workers

SHORT_READ_BYTES = 4096  # body up to this size whose reading does not hold the loop
MAX_WHOLE_BYTES = 2**20  # reply up to this size that is made before it begins, so that its length is known

Result = TypeVar("Result")


class Call:
    """One HTTP request.

    Args:
        scope: scope of ASGI.
        receive: function that returns the next part of the request.
        send: function that sends a part of the reply.
        config: options of the server.
        workers: threads for work that would hold the loop.

    Attributes:
        path: path of the URL, without the prefix of a proxy.
        query: query of the URL.
        receive: function that returns the next part of the request.
        raw_path: path as it came, percent-encoded.
        client: address of the client.
        came_s: time when the request came.
        status: HTTP status of the reply, once it has begun.
        tenant: name of the key's owner; empty without keys.
        is_gone: True once the client has gone or is cut off.
        is_begun: True once the reply has begun.
        header_makers: functions that return further reply headers, called when the reply begins.
        error_events: function from an error to the events that end a streamed reply; None for other replies.
        can_move: True if another server can continue the stream, so that a failure here cuts it off without events.
        sending_since_s: time since when the client has taken nothing of a part of the reply; None between two parts.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServerConfig, workers: Workers) -> None:
        self.raw_path = scope["raw_path"].decode("ascii", "backslashreplace")
        self.path = _without_prefix(scope["path"], config.root_path)
        self.query: str = scope["query_string"].decode("ascii", "replace")
        self.method: str = scope["method"]
        self.headers: http.Headers = scope["headers"]
        self.tenant = ""
        self.is_begun = False
        self.status: int | None = None
        self.came_s = time.monotonic()
        self.client = ":".join(map(str, scope.get("client") or ("-",)))
        self.header_makers: list[Callable[[], http.Headers]] = []
        self.error_events: Callable[[RequestError], Iterable[bytes]] | None = None
        self.can_move = False
        self.sending_since_s: float | None = None
        self._task = asyncio.current_task()
        self.is_gone = False
        self._num_body_bytes = 0
        self._host = (scope.get("client") or ("", 0))[0]
        self._connection = Connection.from_scope(scope)
        self.receive, self._send, self._config, self._workers = receive, send, config, workers

    async def json(self) -> Json:
        """Read the body and return the JSON object in it; BadRequestError if there is none or it is too large."""
        config = self._config
        body = await http.read_body(self.receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        self._num_body_bytes = len(body)
        parse = partial(parse_json, body, config.max_json_depth)
        return await self.in_workers(parse) if len(body) > SHORT_BODY_BYTES else parse()

    async def read_off_loop(self, work: Callable[[], Result], *, needs_time: bool = False) -> Result:
        """Return the result of `work`, which reads the body: called here if that is short, else on another thread.

        Args:
            work: function to call.
            needs_time: True if it takes long, however short the body is.
        """
        if needs_time or self._num_body_bytes > SHORT_READ_BYTES:
            return await self.in_workers(work)
        return work()

    async def in_workers(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, called on a thread in the tenant's turn; stop waiting if the client leaves."""
        with self.watched():
            return await self._workers.run(self.owner, work, self._num_body_bytes)

    @property
    def owner(self) -> str:
        """Name of the tenant whose turn on threads the work takes: without keys, the client's address."""
        return self.tenant or f"@{self._host}"

    async def send_json(self, content: Mapping[str, Any], status: int = 200, headers: Headers = ()) -> None:
        """Send `content` as the whole reply: if it is long, in pieces that threads make while the client reads.

        Args:
            content: object of the reply, in which an iterator stands for a list.
            status: HTTP status.
            headers: further headers.
        """
        if is_short(content):
            await http.send_json(self.send, content, status, headers)
        else:
            await self.send_pieces(json_pieces(content), status, http.JSON_TYPE, headers)

    async def send_pieces(
        self, pieces: Iterator[bytes], status: int, content_type: bytes, headers: Headers = ()
    ) -> None:
        """Send a whole reply from an iterator of pieces, which threads make while the client reads."""
        waiting: list[bytes] = []
        num_bytes, own = 0, [(b"content-type", content_type), *headers]
        async with aclosing(self._workers.parts(self.owner, pieces)) as parts:
            async for made, has_more in parts:
                num_bytes += sum(map(len, made))
                waiting += made
                if not self.is_begun:
                    if has_more and num_bytes < MAX_WHOLE_BYTES:
                        continue
                    if not has_more:
                        own.append((b"content-length", str(num_bytes).encode()))
                    await self.send({"type": "http.response.start", "status": status, "headers": own})
                for piece in waiting:
                    await self.send({"type": "http.response.body", "body": piece, "more_body": True})
                waiting.clear()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def parts(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the pieces of an iterator, which threads advance."""
        async with aclosing(self._workers.parts(self.owner, pieces)) as parts:
            async for made, _ in parts:
                for piece in made:
                    yield piece

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the salt of prefix cache and named images, which hides a tenant's prompts from others."""
        return tenant_salt(self.tenant, cache_salt) if self.tenant else cache_salt

    def checked(self, check: Callable[[int], None]) -> Callable[[int], None]:
        """Return `check` with a further reason for an error: that the client has left. On any thread."""

        def check_both(given: int) -> None:
            if self.is_gone:
                raise ClientGoneError
            check(given)

        return check_both

    @property
    def has_long_body(self) -> bool:
        """True if the body is so long that a reply that repeats it must be made on a thread."""
        return self._num_body_bytes > SHORT_BODY_BYTES

    async def send(self, message: http.Message) -> None:
        """Send an ASGI message of the reply; ClientGoneError if the client is cut off meanwhile."""
        if not self.is_begun and "headers" in message:
            message["headers"] = [*message["headers"], *(header for make in self.header_makers for header in make())]
        self.is_begun = True
        self.status = message.get("status", self.status)
        self.sending_since_s = time.monotonic()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self.is_gone:
                raise ClientGoneError from None
            raise
        self.sending_since_s = None

    def write(self, data: bytes) -> bool:
        """Write a part of a streamed reply immediately; return False if the client must read before the next part."""
        may_continue = self._connection.write_chunk(data)
        if not may_continue and self.sending_since_s is None:
            self.sending_since_s = time.monotonic()
        return may_continue

    @contextmanager
    def writing(self, on_writable: Callable[[], None]) -> Iterator[None]:
        """Call `on_writable` within the context whenever `write` may continue after it has returned False.

        Raises:
            ClientGoneError: the client is cut off.
        """

        def resume() -> None:
            self.sending_since_s = None
            on_writable()

        self._connection.on_writable = resume
        try:
            yield
        except asyncio.CancelledError:
            if self.is_gone:
                raise ClientGoneError from None
            raise
        finally:
            self._connection.on_writable = None

    def cut_off(self) -> None:
        """Drop the connection and unsent data of a client that reads nothing, and cancel the request's task."""
        self._connection.abort()
        self._leave()

    def abort(self) -> None:
        """Drop the connection, as the reply cannot be finished."""
        self._connection.abort()

    def _leave(self) -> None:
        """Note that the client has gone, and cancel the request's task."""
        assert self._task is not None, "a request has a task"
        self.is_gone = True
        self._task.cancel()

    async def _wait_until_gone(self) -> None:
        """Return when the client has disconnected; to be called after the body has been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Cancel the request's task if its client disconnects within the context. The body must have been read."""
        gone = asyncio.ensure_future(self._wait_until_gone())
        gone.add_done_callback(lambda done: None if done.cancelled() else self._leave())
        try:
            yield
        finally:
            gone.cancel()


def _without_prefix(path: str, prefix: str) -> str:
    """Return a path without the prefix under which a proxy serves it, whether or not the proxy has removed that."""
    prefix = prefix.rstrip("/")
    return path.removeprefix(prefix) or "/" if prefix and (path == prefix or path.startswith(f"{prefix}/")) else path
