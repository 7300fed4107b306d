"""A router on loopback, before stand-ins for replicas that can die at any byte."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from jaxserve.routing.app import App, run
from jaxserve.routing.config import RouterConfig
from jaxserve.server.sockets import listen

_ENDS = OSError, asyncio.IncompleteReadError, asyncio.CancelledError


@dataclass(eq=False)
class Replica:
    """A stand-in for a server: it answers each request alike, or passes requests to a real server.

    Attributes:
        backend: port of the real server; None without one.
        status: status of its replies; 503 if it takes no request.
        load: its reply to `/load`.
        cuts: sizes after which its next replies break off; nothing is cut when the list is empty.
        paths: paths of the requests that it got, but for `/ready` and `/load`.
        bodies: their bodies.
        is_full: True if it is ready and refuses all requests.
        is_hung: True if it accepts connections and answers nothing.
        stalls: sizes after which its next replies stop for good, while it answers `/ready` and `/load`.
        port: its port.
    """

    backend: int | None = None
    status: int = 200
    load: dict[str, Any] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    is_full: bool = False
    is_hung: bool = False
    stalls: list[int] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection."""
        with (
            contextlib.closing(writer),
            contextlib.suppress(*_ENDS),
        ):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ")[1].decode()
                sizes = [line[16:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
                body = await reader.readexactly(int(sizes[0]) if sizes else 0)
                is_poll = path in ("/ready", "/load")
                while self.is_hung:
                    await asyncio.sleep(0.01)
                if not is_poll:
                    self.paths.append(path)
                    self.bodies.append(body)
                left = self.cuts.pop(0) if self.cuts and not is_poll else 2**30
                stall = self.stalls.pop(0) if self.stalls and not is_poll else 2**30
                async with contextlib.aclosing(self._replies(path, head, body)) as parts:
                    async for data in parts:
                        writer.write(data[: min(left, stall)])
                        await writer.drain()
                        stall -= len(data)
                        while stall <= 0:
                            await asyncio.sleep(0.01)
                        left -= len(data)
                        if left <= 0:
                            writer.transport.abort()
                            return

    async def _replies(self, path: str, head: bytes, body: bytes) -> AsyncGenerator[bytes]:
        """Yield the bytes of a reply."""
        status = 503 if self.is_full and path not in ("/ready", "/load") else self.status
        if self.backend is None or path == "/load" or status != 200:
            content = httpx.Response(200, json=self.load).content if path == "/load" else b'{"answer": 1}'
            head = f"HTTP/1.1 {status} OK\r\nretry-after: 9\r\ncontent-length: {len(content)}\r\n\r\n".encode()
            yield head + content
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", self.backend)
        try:
            writer.write(head.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nconnection: close\r\n", 1) + body)
            while data := await reader.read(2**16):
                yield data
        finally:
            writer.close()


@dataclass
class Routed:
    """A router that runs.

    Attributes:
        app: its application.
        client: plain client.
        replicas: its replicas.
    """

    app: App
    client: httpx.Client
    replicas: list[Replica]


@contextlib.contextmanager
def routed(replicas: list[Replica], *, wait: bool = True, **options: Any) -> Iterator[Routed]:
    """Yield a router over stand-ins for replicas, once it has polled all of them."""
    started, found = threading.Event(), []

    async def main() -> None:
        servers = [await asyncio.start_server(replica.serve, "127.0.0.1", 0) for replica in replicas]
        for replica, server in zip(replicas, servers, strict=True):
            replica.port = server.sockets[0].getsockname()[1]
        config = RouterConfig(
            replicas=[replica.url for replica in replicas], port=0, **{"poll_interval_s": 0.02} | options
        )
        with listen(config) as sock:
            app, task, loop = App(config), asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None

            def on_start(url: str) -> None:
                found.extend((app, url, lambda: loop.call_soon_threadsafe(task.cancel)))
                started.set()

            try:
                await run(app, sock, on_start, asyncio.Event())
            finally:
                for server in servers:
                    server.close()

    def run_main() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(main())

    thread = threading.Thread(target=run_main)
    thread.start()
    assert started.wait(10)
    app, url, stop = found
    try:
        while wait and any(replica.problem == "it has not answered yet" for replica in app.replicas.all):
            threading.Event().wait(0.005)
        with httpx.Client(base_url=url, timeout=30) as client:
            yield Routed(app, client, replicas)
        for _ in range(1000):  # handlers end just after their replies
            if not any(replica.num_requests or replica.load for replica in app.replicas.all):
                break
            threading.Event().wait(0.005)
        assert all(replica.num_requests == replica.load == 0 for replica in app.replicas.all)
    finally:
        stop()
        thread.join(20)
    assert not thread.is_alive()
