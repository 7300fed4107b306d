"""Connection: uvicorn's HTTP with additions to ASGI: writes that no task waits for, and an immediate end.

A reply part that goes through ASGI's `send` wakes its request's task first. That costs several times as much as the
part itself; so the callback that has all streams' news writes them to the connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from jaxserve.server.http import Scope

MAX_PIPELINED = 8  # requests that wait on a connection for the reply to an earlier one
MAX_PIPELINED_BYTES = 65536  # their bodies
HEADERS_TIMEOUT_S = 30.0  # time for a request's headers
MAX_HEAD_BYTES, MAX_HEADERS = 65536, 256

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: 37\r\n"
    b"connection: close\r\n\r\nheaders must have at most 65536 bytes"
)

_KEY = "jaxserve.connection"


class Connection(HttpToolsProtocol):
    """HTTP connection that writes reply parts immediately, and that ends if the client takes too long to send headers.

    Attributes:
        on_writable: function called when the client has read enough for more to be written.
    """

    on_writable: Callable[[], None] | None = None

    @staticmethod
    def from_scope(scope: Scope) -> Connection:
        """Return the connection on which a request arrived; the request's ASGI scope holds it under `state`."""
        connection: Connection = scope["state"][_KEY]
        return connection

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request's headers."""
        super().connection_made(transport)
        self._is_in_head, self._num_head_bytes = True, 0
        self._cycles: list[RequestResponseCycle] = []  # requests that may be unfinished
        self._deadline = self.loop.call_later(HEADERS_TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse the request with 431 if its headers are too large."""
        super().data_received(data)
        if not self._is_in_head and self.timeout_keep_alive_task is None and self.cycle.response_complete:
            # Bytes that begin no request, such as an empty line, have ended the wait for one: begin it again.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        """Begin to wait for a further request's headers."""
        super().on_message_begin()
        self._num_head_bytes = 0
        if not self._is_in_head:
            self._is_in_head = True
            self._deadline = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the requests still queued on the connection, and notify running handlers that the client has
        disconnected.
        """
        self._deadline.cancel()
        self.pipeline.clear()
        for cycle in self._cycles:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Start the task of a request whose headers are complete; abort if too many requests wait on the connection."""
        self._deadline.cancel()
        self._is_in_head = False
        self.scope["state"][_KEY] = self
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if self.pipeline:  # uvicorn reads no further then, and so would not see that the client goes
            self.flow.resume_reading()
            if len(self.pipeline) > MAX_PIPELINED:
                self.abort()

    def on_body(self, body: bytes) -> None:
        """Add a part to the current request's body; abort the connection if waiting requests' bodies are too large."""
        super().on_body(body)
        if self.pipeline and sum(len(cycle.body) for cycle, _ in self.pipeline) > MAX_PIPELINED_BYTES:
            self.abort()

    def resume_writing(self) -> None:
        """Call `on_writable`: the client has read most of the written data."""
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def write_chunk(self, data: bytes) -> bool:
        """Write a part of a chunked reply, after its head; return False if the client must read before the next part.

        A part that is written before that is buffered, and sent in order.
        """
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self.flow.write_paused

    def abort(self) -> None:
        """Drop the connection and its unsent data."""
        self.transport.abort()
