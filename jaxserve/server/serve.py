"""Start of the server: its engine, its socket, and what signals do."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import stat
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from jaxserve.errors import ConfigError
from jaxserve.server.app import App
from jaxserve.server.connection import Connection

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.server.config import ServerConfig

KEEP_ALIVE_S = 5


class _Server(uvicorn.Server):
    """Server that drains at a first signal, while it says that it is not ready, and stops at a second."""

    def __init__(self, config: uvicorn.Config, app: App, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._app, self._on_start = app, on_start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None  # kept from the garbage collector

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        # What starting leaves lives as long as the server. A full collection would look through all of it, for up to
        # 0.2 s in which no stream gets a token.
        gc.collect()
        gc.freeze()
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections."""
        await super().shutdown(sockets)
        gc.unfreeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal, on the main thread and anywhere in its code."""
        if self._app.service.is_draining or self._loop is None:
            self.force_exit = self.should_exit = True
            return
        self._app.service.is_draining = True
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._app.drain()
        self.should_exit = True


def listen(config: ServerConfig) -> socket.socket:
    """Return a socket at the address of the options; ConfigError if it is taken."""
    if config.uds is not None:
        return _listen_at_path(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the server must get the address {config.host} and port {config.port}, but: {error.strerror}; "
            "choose another --port"
        ) from error
    sock.set_inheritable(False)
    return sock


def _listen_at_path(path: str) -> socket.socket:
    """Return a Unix domain socket; a file that a server has left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the server must get the Unix socket {path}, but: {error.strerror or error}; choose another --uds"
        ) from error
    sock.set_inheritable(False)
    return sock


def _is_left_behind(path: str) -> bool:
    """Return whether there is a socket at a path at which nothing listens."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def serve(
    engine: Engine, config: ServerConfig, sock: socket.socket, on_start: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until a signal comes.

    Args:
        engine: engine that nothing else drives.
        config: options.
        sock: socket from `listen`.
        on_start: called with the URL when requests are taken.
    """
    new_server(App(engine, config), config, sock, on_start).run(sockets=[sock])


def new_server(app: App, config: ServerConfig, sock: socket.socket, on_start: Callable[[str], None]) -> uvicorn.Server:
    """Return the server of an application, to be run on a thread; see `serve`."""
    url = _url(sock)
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

    def tell() -> None:
        app.diary.note_start(app.service.engine, url, app.service.model_names)
        on_start(url)

    return _Server(options, app, tell)


def _url(sock: socket.socket) -> str:
    """Return the address of a socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
