"""App: the ASGI application, from a request's bytes to its reply's."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.errors import RequestError, brief
from jaxserve.openai.errors import BadRequestError, as_bad_request
from jaxserve.openai.format import CHAT, COMPLETIONS, SCORING_PATHS
from jaxserve.openai.interfaces import INVOCATIONS, error_body_at, error_status_at
from jaxserve.openai.messages import COUNT_TOKENS, MESSAGES
from jaxserve.openai.pooling import TASKS
from jaxserve.openai.responses import INPUT_TOKENS, RESPONSES
from jaxserve.server import http
from jaxserve.server.adapters import LOAD, UNLOAD
from jaxserve.server.admission import RefusedError
from jaxserve.server.auth import given_key
from jaxserve.server.call import Call
from jaxserve.server.connection import MAX_HEAD_BYTES, MAX_HEADERS
from jaxserve.server.cors import Origins
from jaxserve.server.diary import Diary
from jaxserve.server.generation import Generation
from jaxserve.server.http import ClientGoneError
from jaxserve.server.info import POOLING_PATHS, Info
from jaxserve.server.orca import REQUEST_HEADER, load_header
from jaxserve.server.service import Service
from jaxserve.server.sessions import SessionCalls

if TYPE_CHECKING:
    from jaxserve.assembly.engine import Engine
    from jaxserve.server.batches.api import Batches
    from jaxserve.server.config import ServerConfig
    from jaxserve.server.http import Receive, Scope, Send

logger = logging.getLogger(__name__)

_OPEN_PATHS = {"/", "/health", "/ready", "/ping"}  # the page shows nothing without a key

ADMIN_PATHS = (LOAD, UNLOAD)  # these need the operator's key

_WHY_NOT = {
    f"{RESPONSES}/": "responses are not stored",
    "/v1/files": "files and batches need --batch-dir",
    "/v1/batches": "files and batches need --batch-dir",
    **dict.fromkeys(ADMIN_PATHS, "adapters are loaded with --lora-root and --admin-key"),
}

Handler = Callable[[Call], Awaitable[None]]


class App:
    """ASGI application over one engine.

    Args:
        engine: engine that nothing else drives.
        config: options of the server.

    Attributes:
        service: the engine and the state of the server.
        diary: log of the server.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.service = Service(engine, config)
        self._keys = self.service.keys
        self._origins = Origins(config.allowed_origins)
        self._calls: set[Call] = set()
        self.diary = Diary(logs_access=config.access_log)
        self._num_cut = 0
        self._watch: asyncio.Task[None] | None = None
        generation, info = Generation(self.service), Info(self.service)
        self._model = info.model
        self._sessions = SessionCalls(self.service)
        self._batches: Batches | None = None
        if config.batch_dir is not None:
            from jaxserve.server.batches.api import Batches  # noqa: PLC0415 - fcntl, which not every system has

            self._batches = Batches(self.service, config.batch_dir)
        self._handlers: dict[tuple[str, str], Handler] = {
            ("POST", COMPLETIONS): generation.serve,
            ("POST", CHAT): generation.serve,
            ("POST", RESPONSES): generation.serve,
            ("POST", INPUT_TOKENS): info.count,
            ("POST", MESSAGES): generation.serve,
            ("POST", COUNT_TOKENS): info.count,
            ("POST", INVOCATIONS): generation.serve,
            ("POST", "/tokenize"): info.tokenize,
            ("POST", "/detokenize"): info.detokenize,
            **{("POST", path): info.pool for path in POOLING_PATHS},
            **{("POST", path): generation.serve for path in (*TASKS, *SCORING_PATHS) if engine.arch.pooler is not None},
            ("GET", "/"): info.page,
            ("GET", "/v1/models"): info.models,
            ("GET", "/health"): info.health,
            **{(method, "/ping"): info.health for method in ("GET", "POST")},
            ("GET", "/ready"): info.ready,
            ("GET", "/load"): info.load,
            ("GET", "/version"): info.version,
            ("GET", "/metrics"): info.metrics,
        }
        if config.lora_root is not None:
            self._handlers |= {
                ("POST", LOAD): self.service.adapters.load,
                ("POST", UNLOAD): self.service.adapters.unload,
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request, or the server's lifespan; see the ASGI specification."""
        if scope["type"] == "lifespan":
            try:
                await self._live(receive, send)
            except asyncio.CancelledError:  # a second signal ends the loop without a shutdown
                await asyncio.sleep(0)  # open requests are counted first
                self.diary.note_end(self._num_cut)
            return
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1000})
            return
        call = Call(scope, receive, send, self.service.config, self.service.workers)
        self._calls.add(call)
        try:
            await self._serve(call)
        except ClientGoneError:
            pass
        except asyncio.CancelledError:
            if not (call.is_gone or self.service.is_draining):
                raise
            if not call.is_gone:  # a second signal came
                self._num_cut += 1
                call.abort()
                await asyncio.sleep(0)  # the connection is notified
        except RequestError as error:
            await self._send_error(call, as_bad_request(error))
        except Exception:
            logger.exception("a request has failed")
            message = "the server has failed; its log says why"
            await self._send_error(call, BadRequestError(message, None, "internal_error", 500))
        finally:
            self._calls.discard(call)
            self.diary.note_end_of(call)

    async def _serve(self, call: Call) -> None:
        """Check a request's headers, origin and key, and await its handler.

        Raises:
            RequestError: it is refused, or there is no handler for its path and method.
        """
        num_bytes = sum(len(name) + len(value) for name, value in call.headers)
        if len(call.headers) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
            message = f"a request must have at most {MAX_HEADERS} headers of {MAX_HEAD_BYTES} bytes in all"
            raise BadRequestError(message, None, "headers_too_large", 431)
        if allowed := self._origins.preflight(call.method, call.headers):
            await http.send_bytes(call.send, 204, b"", headers=allowed)
            return
        if self._origins.refuses(call.method, call.headers):
            message = "pages of other sites may not call the server unless --allowed-origins names theirs"
            raise BadRequestError(message, None, "origin_not_allowed", 403)
        call.header_makers.append(partial(self._origins.headers, call.headers))
        is_open = call.path in _OPEN_PATHS or (self.service.config.public_metrics and call.path == "/metrics")
        if call.path in ADMIN_PATHS:
            if not self._is_admin(call):
                raise self._unauthorized(call)
        elif self._keys and not is_open:  # checked first, so that replies do not reveal which paths exist
            tenant = self._keys.tenant(call.headers)
            if tenant is None:
                raise self._unauthorized(call)
            call.tenant = tenant
        if http.header_value(call.headers, REQUEST_HEADER):
            call.header_makers.append(partial(self._load_header, call.headers))
        method = "GET" if call.method == "HEAD" else call.method
        handler = self._handlers.get((method, call.path))
        if handler is None and method == "GET" and call.path.startswith("/v1/models/"):
            handler = self._model
        handler = handler or self._sessions.handler(method, call.path)
        if handler is None and self._batches is not None:
            handler = self._batches.handler(method, call.path)
        if handler is None:
            if methods := self._methods(call.path):
                message = f"{call.path} must be called with {' or '.join(methods)}, got {call.method}"
                raise BadRequestError(message, None, "method_not_allowed", 405)
            why = next((f"; {why}" for path, why in _WHY_NOT.items() if call.path.startswith(path)), "")
            raise BadRequestError(f"there is no {brief(call.path)} here{why}", None, "not_found", 404)
        await handler(call)

    def _is_admin(self, call: Call) -> bool:
        """Return whether a request has the operator's key."""
        expected = (self.service.config.admin_key or "").encode()
        return bool(expected) and hmac.compare_digest(given_key(call.headers), expected)

    def _unauthorized(self, call: Call) -> BadRequestError:
        """Return the error (401) for a request without a known key, which names the header that its client sends."""
        is_anthropic = call.path.startswith(MESSAGES) or http.header_value(call.headers, b"anthropic-version")
        where = "x-api-key: KEY" if is_anthropic else "Authorization: Bearer KEY"
        if given_key(call.headers):
            message = f"incorrect API key provided, as {where}: the server knows no such key; ask the operator for one"
        else:
            message = f"an API key must be given, as {where}, and none was; ask the operator for one"
        return BadRequestError(message, None, "invalid_api_key", 401)

    def _load_header(self, headers: http.Headers) -> http.Headers:
        """Return the header with the engine's load, in the format that the request asks for."""
        service = self.service
        return load_header(headers, service.engine.occupancy, service.observer.estimated_wait_s())

    async def _send_error(self, call: Call, error: BadRequestError) -> None:
        """Answer a request with an error: as a reply, or as the last events of a stream that has begun."""
        self.diary.note_refusal(error.status_code, error.code)
        with suppress(ClientGoneError):
            if not call.is_begun:
                headers: list[tuple[bytes, bytes]] = []
                if error.status_code in (429, 503):
                    headers += self._retry_after(error)
                elif error.status_code == 401:
                    headers.append((b"www-authenticate", b"Bearer"))
                elif error.status_code == 405:
                    headers.append((b"allow", ", ".join(self._methods(call.path)).encode()))
                status = error_status_at(call.path, error)
                await http.send_json(call.send, error_body_at(call.path, error), status, headers)
                return
            is_cut = call.can_move and error.status_code in (500, 503)
            if is_cut or call.error_events is None:  # or a whole reply that cannot be finished
                call.abort()
                return
            body = b"".join(call.error_events(error))
            await call.send({"type": "http.response.body", "body": body, "more_body": False})

    def _methods(self, path: str) -> list[str]:
        """Return the HTTP methods that a path may be called with."""
        methods = [method for method, known in self._handlers if known == path]
        methods += self._sessions.methods(path)
        return sorted([*methods, *(self._batches.methods(path) if self._batches is not None else ())])

    def _retry_after(self, error: BadRequestError) -> list[tuple[bytes, bytes]]:
        """Return the headers with the time after which to retry, in seconds and, for OpenAI's clients, milliseconds."""
        wait_s = error.retry_after_s if isinstance(error, RefusedError) else self.service.observer.estimated_wait_s()
        if wait_s == math.inf:
            return []
        whole, exact = max(1, math.ceil(wait_s)), max(1, math.ceil(wait_s * 1e3))
        return [(b"retry-after", str(whole).encode()), (b"retry-after-ms", str(exact).encode())]

    # The life of the server

    async def _live(self, receive: Receive, send: Send) -> None:
        """Start and stop the service when ASGI's lifespan messages come."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.service.start()
                if self._batches is not None:
                    self._batches.start()
                self._watch = asyncio.create_task(self._cut_off_stalled())
                await send({"type": "lifespan.startup.complete"})
            else:
                if self._watch is not None:
                    self._watch.cancel()
                if self._batches is not None:
                    await asyncio.to_thread(self._batches.stop)
                self.service.close()
                self.diary.note_end(self._num_cut)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _cut_off_stalled(self) -> None:
        """Check about once a second for clients that have stopped reading, and cut off replies after `send_timeout_s`.

        One check of all calls costs less than a timer for each part of each reply.
        """
        while True:
            await asyncio.sleep(min(1.0, self.service.config.send_timeout_s / 4))
            self.diary.log_refusals()
            self._cut_off_those_before(time.monotonic() - self.service.config.send_timeout_s)

    def _cut_off_those_before(self, before_s: float) -> None:
        """Cut off clients that have taken nothing since then; a function, so that no name holds the last call."""
        for call in self._calls:
            if call.sending_since_s is not None and call.sending_since_s < before_s:
                call.sending_since_s = None
                call.cut_off()

    async def drain(self) -> None:
        """Refuse new requests, wait for open replies, and end those that are open after `shutdown_timeout_s`."""
        self.service.is_draining = True
        self.diary.note_stop(len(self.service.streams), self.service.config.shutdown_timeout_s)
        self.service.admission.drain()
        until_s = time.monotonic() + self.service.config.shutdown_timeout_s
        while len(self.service.streams) and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        self._num_cut = len(self.service.streams)
        self.service.streams.end_all()
        while len(self.service.streams) and time.monotonic() < until_s + 5:
            await asyncio.sleep(0.02)
