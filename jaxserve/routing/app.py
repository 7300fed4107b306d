"""App: the router's HTTP server."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, web

from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import CHAT, COMPLETIONS, SCORING_PATHS
from jaxserve.openai.interfaces import INVOCATIONS
from jaxserve.openai.messages import COUNT_TOKENS, MESSAGES
from jaxserve.openai.pooling import TASKS
from jaxserve.openai.responses import INPUT_TOKENS, RESPONSES
from jaxserve.routing.counts import Counts
from jaxserve.routing.exchange import Exchange, error_reply
from jaxserve.routing.replicas import Replicas
from jaxserve.server.sockets import url_of

if TYPE_CHECKING:
    import socket

    from jaxserve.routing.config import RouterConfig

logger = logging.getLogger(__name__)

_ROUTED = {
    *(("POST", path) for path in (COMPLETIONS, CHAT, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS, INVOCATIONS)),
    *(("POST", path) for path in ("/tokenize", "/detokenize", *TASKS, *SCORING_PATHS)),
    *(("GET", path) for path in ("/", "/v1/models", "/version")),
}
_STATEFUL = ("/v1/files", "/v1/batches", "/v1/sessions", "/slots", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class App:
    """The router: a handler for an aiohttp server.

    Args:
        config: options of the router.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.replicas = Replicas(config)
        self.counts = Counts(self.replicas)
        self._own = {"/health": self._health, "/ready": self._health, "/load": self._load, "/metrics": self._metrics}

    def server(self) -> web.Server:
        """Return the aiohttp server; to be called on the event loop.

        It has no `web.Application`, whose tables of paths take time in each request.
        """
        options: dict[str, Any] = {"loop": asyncio.get_running_loop(), "client_max_size": self._config.max_body_bytes}
        new_request = partial(web.BaseRequest, **options)
        return web.Server(self.serve, request_factory=new_request, handler_cancellation=True, access_log=None)

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request, by a replica unless it is about the router."""
        path = request.rel_url.raw_path
        try:
            method = "GET" if request.method == "HEAD" else request.method
            if method == "GET" and (own := self._own.get(path)) is not None:
                return own()
            if (method, path) not in _ROUTED and not (method == "GET" and path.startswith("/v1/models/")):
                raise _not_routed(request.method, path)
            body = await _body(request) if method == "POST" else b""
            return await Exchange(request, body, self.replicas, self._config, self.counts).serve()
        except web.HTTPRequestEntityTooLarge:
            message = f"a body must have at most {self._config.max_body_bytes} bytes"
            return error_reply(path, BadRequestError(message, None, "body_too_large", 413))
        except BadRequestError as error:
            return error_reply(path, error)
        except (ConnectionError, asyncio.CancelledError):  # the client has gone
            raise
        except Exception:
            logger.exception("a request has failed")
            message = "the router has failed; its log says why"
            return error_reply(path, BadRequestError(message, None, "internal_error", 500))

    def _health(self) -> web.Response:
        """Reply with the replicas' problems: status 200 if any replica is ready, else 503."""
        problems = {replica.url: replica.problem or "ok" for replica in self.replicas.all}
        is_ready = self.replicas.num_ready > 0
        content = {"status": "ok" if is_ready else "no server is ready", "replicas": problems}
        return web.json_response(content, status=200 if is_ready else 503)

    def _load(self) -> web.Response:
        """Reply with the number of unfinished requests."""
        return web.json_response({"server_load": sum(replica.num_requests for replica in self.replicas.all)})

    def _metrics(self) -> web.Response:
        """Reply with all metrics in Prometheus' text format."""
        return web.Response(
            body=self.counts.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )


def _not_routed(method: str, path: str) -> BadRequestError:
    """Return the error for a path that the router does not serve."""
    if path.startswith(_STATEFUL):
        message = f"{path} belongs to one server, which keeps its files; call that server, not the router"
        return BadRequestError(message, None, "not_found", 404)
    if methods := sorted(known for known, each in _ROUTED if each == path):
        message = f"{path} must be called with {' or '.join(methods)}, got {method}"
        return BadRequestError(message, None, "method_not_allowed", 405)
    return BadRequestError(f"there is no {path} here", None, "not_found", 404)


async def _body(request: web.BaseRequest) -> bytes:
    """Return a request's body, which some clients send only after an interim reply."""
    if request.headers.get("expect", "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the reply has not begun
    return await request.read()


def serve(config: RouterConfig, sock: socket.socket, on_start: Callable[[str], None] = lambda url: None) -> None:
    """Route requests until a signal comes; open replies then have half a minute.

    Args:
        config: options.
        sock: socket from `sockets.listen`.
        on_start: called with the URL when requests are taken.
    """

    async def run_until_signal() -> None:
        stopped = asyncio.Event()
        if sys.platform != "win32":  # there, Ctrl-C cancels the task
            for each in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(each, stopped.set)
        await run(App(config), sock, on_start, stopped)

    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(run_until_signal())


async def run(app: App, sock: socket.socket, on_start: Callable[[str], None], stopped: asyncio.Event) -> None:
    """Serve an app until `stopped` is set or the task is cancelled."""
    runner = web.ServerRunner(app.server(), shutdown_timeout=30.0)
    await runner.setup()
    app.replicas.start()
    try:
        await web.SockSite(runner, sock, backlog=2048).start()
        on_start(url_of(sock))
        await stopped.wait()
    finally:
        await runner.cleanup()
        await app.replicas.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - not on Windows

    return uvloop.new_event_loop()
