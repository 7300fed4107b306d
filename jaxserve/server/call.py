"""Call: one HTTP request, as handlers see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from jaxserve.server import http
from jaxserve.server.connection import Connection
from jaxserve.server.http import ClientGoneError
from jaxserve.server.json_body import SHORT_BODY_BYTES, parse_json

if TYPE_CHECKING:
    from jaxserve.errors import RequestError
    from jaxserve.server.config import ServerConfig
    from jaxserve.server.http import Json, Receive, Scope, Send


Result = TypeVar("Result")


class Call:
    """One HTTP request.

    Args:
        scope: scope of ASGI.
        receive: function that returns the next part of the request.
        send: function that sends a part of the reply.
        config: options of the server.

    Attributes:
        path: path of the URL.
        tenant: name of the key's owner; empty without keys.
        is_begun: True once the reply has begun.
        header_makers: functions that return headers of the reply beside the handler's own, called when it begins.
        error_events: function from an error to the events that end a streamed reply; None before it is known.
        sending_since_s: time since when the client has taken nothing of a part of the reply; None between two parts.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: ServerConfig) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.headers: http.Headers = scope["headers"]
        self.tenant = ""
        self.is_begun = False
        self.header_makers: list[Callable[[], http.Headers]] = []
        self.error_events: Callable[[RequestError], Iterable[bytes]] | None = None
        self.sending_since_s: float | None = None
        self._task = asyncio.current_task()
        self._is_cut_off = False
        self._num_body_bytes = 0
        self._connection = Connection.of(scope)
        self._receive, self._send, self._config = receive, send, config

    async def json(self) -> Json:
        """Return the object in the body."""
        config = self._config
        body = await http.read_body(self._receive, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        self._num_body_bytes = len(body)
        return await self.beside_the_loop(partial(parse_json, body, config.max_json_depth))

    async def beside_the_loop(self, work: Callable[[], Result], *, needs_time: bool = False) -> Result:
        """Return the result of reading the body, on another thread if that takes time.

        Args:
            work: function that reads it.
            needs_time: True if it takes time, however short the body is.
        """
        if needs_time or self._num_body_bytes > SHORT_BODY_BYTES:
            return await asyncio.get_running_loop().run_in_executor(None, work)
        return work()

    async def send(self, message: http.Message) -> None:
        """Send a part of the reply; ClientGoneError if the client is cut off."""
        if not self.is_begun:
            message["headers"] = [*message["headers"], *(header for make in self.header_makers for header in make())]
        self.is_begun = True
        self.sending_since_s = time.monotonic()
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._is_cut_off:
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
            if self._is_cut_off:
                raise ClientGoneError from None
            raise
        finally:
            self._connection.on_writable = None

    def cut_off(self) -> None:
        """End the reply to a client that takes nothing, and drop what it was to be sent."""
        assert self._task is not None, "a request has a task"
        self._is_cut_off = True
        self._connection.abort()
        self._task.cancel()

    async def wait_until_gone(self) -> None:
        """Wait for the client to go."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
