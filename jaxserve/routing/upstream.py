"""Upstream: HTTP/1.1 connections to a server, with replies that are read as they come.

aiohttp's client takes half of a router's time per request. This one has only what the router needs: requests with a
whole body, no redirects, cookies, proxies or compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterable
from typing import cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

_MAX_BUFFERED = 2**18  # bytes of a reply after which its connection is read no further until they are taken
_MAX_HEADERS = 2**17  # bytes, and what comes at once with the last of them
_BODILESS = (204, 304)
_ENCODING = "utf-8", "surrogateescape"  # aiohttp's for headers


class ConnectError(OSError):
    """A server that could not be reached."""


class BrokenReplyError(OSError):
    """A reply that has broken off, or is no HTTP."""


class Upstream:
    """Connections to one server.

    Args:
        url: the server's URL, or `unix:PATH`.
        connect_timeout_s: maximum time to connect.
        idle_s: time after which an unused connection is closed, shorter than the server's.
    """

    def __init__(self, url: str, connect_timeout_s: float, idle_s: float) -> None:
        parts = urlsplit(url)
        self._path = parts.path if parts.scheme == "unix" else None
        self._host, self._ssl = parts.hostname or "", ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._name = (parts.netloc or "localhost").encode()
        self._connect_timeout_s, self._idle_s = connect_timeout_s, idle_s
        self._idle: list[tuple[_Connection, float]] = []
        self._open = set[_Connection]()

    def request(
        self, method: str, path: str, headers: Iterable[tuple[str, str]] = (), body: bytes | None = None
    ) -> Reply:
        """Return a context that sends a request and yields its reply; `path` is percent-encoded."""
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), path.encode(*_ENCODING), self._name)]
        lines += [f"{name}: {value}\r\n".encode(*_ENCODING) for name, value in headers]
        if body is not None:
            lines.append(b"content-length: %d\r\n" % len(body))
        lines += [b"\r\n", body or b""]
        return Reply(self, b"".join(lines), is_head=method == "HEAD")

    async def connection(self) -> _Connection:
        """Return a connection that nobody uses.

        Raises:
            ConnectError: the server cannot be reached.
        """
        oldest_s = time.monotonic() - self._idle_s
        while self._idle:
            found, since_s = self._idle.pop()
            if since_s > oldest_s and found.is_reusable:  # else more has come than the reply
                return found
            self._open.discard(found)
            found.close()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                found = await self._connect()
        except TimeoutError as error:
            raise ConnectError(f"no connection within {self._connect_timeout_s} s") from error
        except OSError as error:
            raise ConnectError(str(error)) from error
        self._open.add(found)
        return found

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._path is not None:
            _, connection = await loop.create_unix_connection(_Connection, self._path)
        else:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return connection

    def release(self, connection: _Connection) -> None:
        """Take a connection back, to be used again if its reply is complete."""
        if connection.is_reusable:
            self._idle.append((connection, time.monotonic()))
        else:
            self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """Close all connections; open replies break off."""
        for each in self._open:
            each.close()
        self._open.clear()
        self._idle.clear()


class Reply:
    """A request and its reply, as a context.

    Args:
        upstream: the server's connections.
        data: bytes of the request.
        is_head: True if the reply has no body, whatever its headers say.

    Attributes:
        status: status.
        headers: headers.
    """

    def __init__(self, upstream: Upstream, data: bytes, *, is_head: bool) -> None:
        self._upstream, self._data, self._is_head = upstream, data, is_head
        self.status, self.headers = 0, CIMultiDict[str]()

    async def __aenter__(self) -> Reply:
        """Send the request, and wait for the head of its reply."""
        self._connection = connection = await self._upstream.connection()
        try:
            connection.send(self._data, is_head=self._is_head)
            while not connection.has_head:
                await connection.changed()
        except BaseException:
            self._upstream.release(connection)
            raise
        self.status, self.headers = connection.status, connection.headers
        return self

    async def __aexit__(self, *_: object) -> None:
        self._upstream.release(self._connection)

    @property
    def content_type(self) -> str:
        """Media type, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def has_part(self) -> bool:
        """True if a part of the body can be read without waiting."""
        return bool(self._connection.parts)

    @property
    def at_end(self) -> bool:
        """True if all of the body has been read."""
        return self._connection.is_complete and not self._connection.parts

    async def read_any(self) -> bytes:
        """Return the next bytes of the body as soon as there are some; none at its end."""
        connection = self._connection
        while not connection.parts:
            if connection.is_complete:
                return b""
            await connection.changed()
        return connection.take()

    async def read(self) -> bytes:
        """Return the rest of the body."""
        parts = list[bytes]()
        while data := await self.read_any():
            parts.append(data)
        return b"".join(parts)


class _Connection(asyncio.Protocol):
    """A connection, with one reply at a time.

    Attributes:
        has_head: True once the reply's status and headers have come.
        is_complete: True once all of its body has come.
        parts: parts of the body that nobody has taken.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._begin(is_head=False)

    def _begin(self, *, is_head: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._is_head, self._until_end, self._is_paused = is_head, False, False
        self.has_head = self.is_complete = self._keeps_alive = False
        self.status, self.headers = 0, CIMultiDict[str]()
        self._num_other_bytes = 0  # bytes after the head or the latest part of the body
        self.parts: list[bytes] = []
        self._num_bytes = 0

    @property
    def is_closing(self) -> bool:
        """True if no request can be sent."""
        return self._transport is None or self._transport.is_closing() or self._error is not None

    @property
    def is_reusable(self) -> bool:
        """True if the next request can be sent: not while reading is paused, as it would not continue."""
        return self.is_complete and self._keeps_alive and not self._is_paused and not self.is_closing

    def send(self, data: bytes, *, is_head: bool) -> None:
        """Send a request."""
        if self.is_closing or self._transport is None:
            raise BrokenReplyError("the connection was closed")
        self._begin(is_head=is_head)
        self._transport.write(data)

    async def changed(self) -> None:
        """Wait for something to come; BrokenReplyError if nothing more will."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not (self.parts or self.is_complete):
            raise self._error

    def take(self) -> bytes:
        """Return all parts that have come."""
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts, self._num_bytes = [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Calls of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self.is_complete or self._transport is None:  # more than the reply
            self._keeps_alive = False
            return
        try:
            self._num_other_bytes += len(data)
            self._parser.feed_data(data)
            if self._num_other_bytes > _MAX_HEADERS:  # the parser keeps a header until its end
                raise httptools.HttpParserError(f"headers have more than {_MAX_HEADERS} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.is_complete:
                self._error = BrokenReplyError(f"a reply is no HTTP: {error}")
                self.close()
            self._keeps_alive = False
        if self._num_bytes > _MAX_BUFFERED and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self.has_head and self._until_end:
            self.is_complete = True
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._error is None:
            self._error = BrokenReplyError(str(error or "the connection was closed"))
        self._wake()

    # Calls of the parser

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise ValueError("more than the reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # trailers are dropped
            self.headers.add(name.decode(*_ENCODING), value.decode(*_ENCODING))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self.has_head, self._keeps_alive = True, self._parser.should_keep_alive()
        self._num_other_bytes = 0
        if self._is_head or self.status in _BODILESS:
            self.is_complete, self._keeps_alive = True, self._keeps_alive and not self._is_head
        elif "content-length" not in self.headers and "transfer-encoding" not in self.headers:
            self._until_end, self._keeps_alive = True, False

    def on_body(self, body: bytes) -> None:
        if self.is_complete:  # the reply has none
            self._keeps_alive = False
            return
        self.parts.append(body)
        self._num_bytes += len(body)
        self._num_other_bytes = 0

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = True
