"""Server start, and its end by signals."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from jaxserve.server.app import App
from jaxserve.server.connection import Connection
from jaxserve.server.http import KEEP_ALIVE_S
from jaxserve.server.sockets import url_of

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.server.config import ServerConfig

# By default each thread that computes keeps the lock of Python for 5 ms before the loop gets it, which needs it several
# times to answer a request.
SWITCH_INTERVAL_S = 5e-4


class _Server(uvicorn.Server):
    """Server that drains at a first signal, no longer ready, and stops at a second."""

    def __init__(self, config: uvicorn.Config, app: App, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._on_start = app, on_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None  # kept from the garbage collector
        self._switch_interval_s = sys.getswitchinterval()
        self._has_frozen = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, with settings of the interpreter that keep pauses of the loop short."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # Objects from the start live as long as the server. A full collection would visit all of them for up to 0.2 s,
        # and no stream gets a token meanwhile.
        if not gc.get_freeze_count():  # else the process has done it, and its objects could not be told from these
            gc.collect()
            gc.freeze()
            self._has_frozen = True
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections, and restore the interpreter's settings."""
        await super().shutdown(sockets)
        sys.setswitchinterval(self._switch_interval_s)
        if self._has_frozen:
            gc.unfreeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at a first signal, and stop at a second; called anywhere in the main thread's code."""
        if self._app.service.is_draining or self._loop is None:
            self.force_exit = self.should_exit = True
            return
        self._app.service.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        """Start the task that drains the app; on the loop."""
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        """Drain the app, then let the server exit."""
        await self._app.drain()
        self.should_exit = True


def serve(
    engine: Engine, config: ServerConfig, sock: socket.socket, on_start: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until a signal comes.

    Args:
        engine: engine that nothing else drives.
        config: options.
        sock: socket from `sockets.listen`.
        on_start: called with the URL when requests are taken.
    """
    new_server(App(engine, config), config, sock, on_start).run(sockets=[sock])


def new_server(app: App, config: ServerConfig, sock: socket.socket, on_start: Callable[[str], None]) -> uvicorn.Server:
    """Return the uvicorn server that runs an app at a socket; `on_start` is called with the URL. See `serve`."""
    url = url_of(sock)
    options = uvicorn.Config(
        app,
        http=Connection,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        lifespan="on",
        log_level=config.uvicorn_log_level,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        backlog=2048,
    )

    def notify() -> None:
        app.diary.note_start(app.service.engine, url, app.service.model_names)
        on_start(url)

    return _Server(options, app, notify)
