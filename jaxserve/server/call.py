"""Call: one HTTP request, as handlers see it."""

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
        header_makers: functions that return headers of the reply beside the handler's own, called when it begins.
        error_events: function from an error to the events that end a streamed reply; None before it is known.
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
        self.sending_since_s: float | None = None
        self._task = asyncio.current_task()
        self.is_gone = False
        self._num_body_bytes = 0
        self._host = (scope.get("client") or ("", 0))[0]
        self._connection = Connection.from_scope(scope)
        self.receive, self._send, self._config, self._workers = receive, send, config, workers

    async def json(self) -> Json:
        """Return the object in the body."""
        config = self._config
        body = await http.read_body(self.receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        self._num_body_bytes = len(body)
        parse = partial(parse_json, body, config.max_json_depth)
        return await self.in_workers(parse) if len(body) > SHORT_BODY_BYTES else parse()

    async def beside_the_loop(self, work: Callable[[], Result], *, needs_time: bool = False) -> Result:
        """Return the result of reading the body, on another thread if that takes time.

        Args:
            work: function that reads it.
            needs_time: True if it takes time, however short the body is.
        """
        if needs_time or self._num_body_bytes > SHORT_READ_BYTES:
            return await self.in_workers(work)
        return work()

    async def in_workers(self, work: Callable[[], Result]) -> Result:
        """Return the result of work that a thread does when it is the tenant's turn."""
        with self.watched():
            return await self._workers.run(self.owner, work, self._num_body_bytes)

    @property
    def owner(self) -> str:
        """Name of the tenant that work is done for: without keys, the address of the client."""
        return self.tenant or f"@{self._host}"

    async def send_json(self, content: Mapping[str, Any], status: int = 200, headers: Headers = ()) -> None:
        """Send a reply in JSON: a long one in pieces that are made on other threads as the client takes them.

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
        """Send a reply whose pieces are made on other threads as the client takes them."""
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
        """Yield pieces, which are made on other threads, some at a time."""
        async with aclosing(self._workers.parts(self.owner, pieces)) as parts:
            async for made, _ in parts:
                for piece in made:
                    yield piece

    @property
    def has_long_body(self) -> bool:
        """True if what repeats the body takes the loop too much time."""
        return self._num_body_bytes > SHORT_BODY_BYTES

    async def send(self, message: http.Message) -> None:
        """Send a part of the reply; ClientGoneError if the client is cut off."""
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
        """Write a part of a streamed reply at once; returns False if the client must take some first."""
        has_room = self._connection.write_chunk(data)
        if not has_room and self.sending_since_s is None:
            self.sending_since_s = time.monotonic()
        return has_room

    @contextmanager
    def writing(self, on_room: Callable[[], None]) -> Iterator[None]:
        """Let `on_room` be called whenever the client has taken what `write` had to wait for.

        Raises:
            ClientGoneError: the client is cut off.
        """

        def resume() -> None:
            self.sending_since_s = None
            on_room()

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
        """End the reply to a client that takes nothing, and drop what it was to be sent."""
        self._connection.abort()
        self._leave()

    def abort(self) -> None:
        """Drop the connection, as the reply cannot be finished."""
        self._connection.abort()

    def _leave(self) -> None:
        assert self._task is not None, "a request has a task"
        self.is_gone = True
        self._task.cancel()

    async def _wait_until_gone(self) -> None:
        """Wait for the client to go."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End the request if its client goes, within the context. The body must have been read."""
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
