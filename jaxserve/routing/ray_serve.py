"""Ray Serve: the choice of a replica for each request, the number of replicas, and streams that survive them.

Ray places replicas, transports calls and reports deaths. `PrefixRouter` chooses by load and by cached prefixes, as
`jaxserve route` does; `WaitPolicy` adds a replica when requests would wait too long; `Front` continues the streams of
dead replicas on others, with the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

from ray import exceptions
from ray.serve import exceptions as serve_exceptions
from ray.serve.request_router import RequestRouter

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.interfaces import error_body_at, error_status_at
from jaxserve.openai.messages import MESSAGES
from jaxserve.openai.resumption import FIELD, HEADER, Delivered, ReplyIdentity, split_at_comments
from jaxserve.routing.exchange import HOP_HEADERS, prompt_prefix
from jaxserve.routing.replicas import LoadReport
from jaxserve.scheduling.router import ROW_CHARGE_TOKENS, Prefix, Router
from jaxserve.server import http
from jaxserve.server.config import ServerConfig

logger = logging.getLogger(__name__)

WAIT = "estimated_wait_s"  # the statistic by which Ray scales
_MAX_REPLICAS = 1024  # of a deployment
_MAX_REMEMBERED = 4096  # requests whose replicas are known if they must be asked for again
_EVENTS_TYPE = b"text/event-stream"
_DROPPED = frozenset(name.encode() for name in HOP_HEADERS)
_FAULTS = (exceptions.RayError, serve_exceptions.RayServeException)

Headers = Sequence[tuple[bytes, bytes]]


class Head(NamedTuple):
    """Head of a request to a replica, before its body.

    Attributes:
        method: HTTP method.
        path: path and query, percent-encoded.
        headers: headers that concern the server.
        attempt: number of earlier attempts to have the request served.
    """

    method: str
    path: str
    headers: Headers
    attempt: int = 0


class PrefixRouter(RequestRouter):
    """Ray's request router that chooses by the work in each replica, in seconds, and by cached prefixes."""

    def initialize_state(self, **_: Any) -> None:
        """Begin without replicas; Ray calls this."""
        self._router = Router(_MAX_REPLICAS)
        self._indices: dict[Any, int] = {}
        self._given: dict[str, tuple[Any, int]] = {}  # replica and load of each request in flight
        self._loads: dict[Any, int] = {}
        self._tried: dict[bytes, tuple[Any, ...]] = {}  # replicas of each of the latest requests, by its identity

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas, the best one first."""
        if not candidate_replicas:
            return []
        self._update(candidate_replicas)
        prefix, num_tokens = _prompt_of(pending_request)
        route = self._router.choose(prefix, num_tokens + ROW_CHARGE_TOKENS, only_open=True)
        assert route is not None, "there are candidates"
        by_load = sorted(candidate_replicas, key=lambda each: self._loads.get(each.replica_id, 0))
        best = [each for each in by_load if self._indices[each.replica_id] == route.replica]
        tried = self._tried.get(_identity(pending_request), ()) if _attempt(pending_request) else ()
        ranks = [best, [each for each in by_load if each not in best]]
        untried = [[each for each in rank if each.replica_id not in tried] for rank in ranks]
        return [*untried, [each for each in by_load if each.replica_id in tried]] if tried else ranks

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Count a request on its replica; Ray calls this."""
        prefix, num_tokens = _prompt_of(pending_request)
        load = num_tokens + ROW_CHARGE_TOKENS
        self._given[pending_request.metadata.internal_request_id] = replica_id, load
        self._loads[replica_id] = self._loads.get(replica_id, 0) + load
        if identity := _identity(pending_request):
            self._tried[identity] = (*self._tried.pop(identity, ()), replica_id)
            if len(self._tried) > _MAX_REMEMBERED:
                del self._tried[next(iter(self._tried))]
        if (index := self._indices.get(replica_id)) is not None:
            self._router.note(index, prefix)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Count a request no more; Ray calls this."""
        replica_id, load = self._given.pop(internal_request_id, (replica_id, 0))
        if replica_id in self._loads:  # else the replica has gone
            self._loads[replica_id] = max(self._loads[replica_id] - load, 0)

    def _update(self, replicas: Iterable[Any]) -> None:
        """Set the loads of replicas, and close all others."""
        live = {each.replica_id: each for each in replicas}
        for gone in self._indices.keys() - live.keys():
            index = self._indices[gone]
            self._router.close(index)
            if gone not in self.curr_replicas:  # its cache is lost, and its index free
                self._router.forget(index)
                del self._indices[gone]
                self._loads.pop(gone, None)
        if added := live.keys() - self._indices.keys():
            free = sorted({*range(_MAX_REPLICAS)} - {*self._indices.values()})
            self._indices |= dict(zip(added, free, strict=False))
        reports = {name: LoadReport.from_reply(each.routing_stats) for name, each in live.items()}
        known = [each.prompt_token_s for each in reports.values() if each.prompt_token_s is not None]
        for name, report in reports.items():
            load = max(self._loads.get(name, 0), report.num_tokens)
            self._router.set_load(self._indices[name], load, is_open=True)
            cost = report.prompt_token_s or (sum(known) / len(known) if known else 1.0)
            self._router.set_token_cost(self._indices[name], cost)


def _prompt_of(pending_request: Any) -> tuple[Prefix, int]:
    """Return the sampled prefixes of a pending request's prompt, and its estimated tokens."""
    if pending_request is None or len(pending_request.args) < 2:
        return Prefix((), ()), 0
    head, body = pending_request.args[:2]
    key = http.header_value(head.headers, b"authorization") or http.header_value(head.headers, b"x-api-key")
    return prompt_prefix(body, key)


def _identity(pending_request: Any) -> bytes:
    """Return what all attempts of a request have in common; empty if it has none."""
    if pending_request is None or len(pending_request.args) < 2:
        return b""
    return http.header_value(pending_request.args[0].headers, HEADER)


def _attempt(pending_request: Any) -> int:
    """Return the number of earlier attempts of a pending request."""
    return pending_request.args[0].attempt if _identity(pending_request) else 0


class WaitPolicy:
    """Ray's autoscaling policy by the time that a request would wait before it starts.

    Args:
        target_wait_s: mean wait above which replicas are added. They are removed one by one when the others would wait
            less than half of it.
    """

    def __init__(self, target_wait_s: float) -> None:
        self._target_s = target_wait_s

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        num, waits = ctx.target_num_replicas, [*(ctx.aggregated_metrics or {}).get(WAIT, {}).values()]
        if num == 0:
            return int(ctx.total_num_requests > 0), {}
        if not waits:
            return num, {}
        mean_s = sum(waits) / len(waits)
        if mean_s > self._target_s:
            return math.ceil(num * min(mean_s / self._target_s, 2.0)), {}
        if num > 1 and mean_s * num / (num - 1) < self._target_s / 2:
            return num - 1, {}
        return num, {}


class Front:
    """ASGI application before the replicas.

    Args:
        serve: function from a request's head and body to its reply's parts: status and headers, then bytes.
        config: options of the servers.
        max_deaths: number of replicas that may die while they serve a request.
        silence_timeout_s: time without a part of a reply after which its replica loses the request.
    """

    def __init__(
        self,
        serve: Callable[[Head, bytes], AsyncIterator[Any]],
        config: ServerConfig,
        max_deaths: int,
        silence_timeout_s: float,
    ) -> None:
        self._serve, self._config, self._max_deaths = serve, config, max_deaths
        self._silence_timeout_s = silence_timeout_s

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        """Serve one HTTP request, or the lifespan; see the ASGI specification."""
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1000})
            return
        path = _without_root(scope)
        try:
            timeout_s = self._config.body_timeout_s
            body = await http.read_body(receive, max_bytes=self._config.max_body_bytes, timeout_s=timeout_s)
            await _Relayed(self._serve, self._max_deaths, self._silence_timeout_s, scope, body, send).run()
        except (http.ClientGoneError, exceptions.TaskCancelledError):  # the client has gone
            pass
        except BadRequestError as error:
            headers = [(b"retry-after", b"1")] if error.status_code == 503 else []
            await http.send_json(send, error_body_at(path, error), error_status_at(path, error), headers)


class _SilentError(Exception):
    """A replica that has sent nothing for too long."""


async def _unless_silent(parts: AsyncIterator[Any], timeout_s: float) -> AsyncIterator[Any]:
    """Yield the parts of a reply; _SilentError if one does not come in time."""
    while True:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                part = await anext(parts)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if not limit.expired():
                raise
            raise _SilentError from None
        yield part


class _Relayed:
    """A request and its reply, over as many replicas as it takes; see `Exchange`."""

    def __init__(
        self,
        serve: Callable[[Head, bytes], AsyncIterator[Any]],
        max_deaths: int,
        silence_timeout_s: float,
        scope: http.Scope,
        body: bytes,
        send: http.Send,
    ) -> None:
        self._serve, self._max_deaths, self._body, self._send = serve, max_deaths, body, send
        self._silence_timeout_s = silence_timeout_s
        self._path = _without_root(scope)
        identity = ReplyIdentity(secrets.token_hex(16), int(time.time()), secrets.randbits(62))
        headers = [(name, value) for name, value in scope["headers"] if name not in _DROPPED and name != HEADER]
        query = scope.get("query_string") or b""
        root = quote(scope.get("root_path", "")).encode()
        path = (scope.get("raw_path") or scope["path"].encode()).removeprefix(root) + (b"?" + query if query else b"")
        headers += [(b"accept-encoding", b"identity"), (HEADER, identity.header())]
        self._head = Head(scope["method"], path.decode("ascii", "replace"), headers)
        self._is_begun = False
        self._comments: list[bytes] | None = None  # None if the stream cannot move

    async def run(self) -> None:
        """Serve the request.

        Raises:
            BadRequestError: no replica can serve it, and the reply has not begun.
        """
        num_deaths = 0
        while True:
            try:
                return await self._attempt()
            except exceptions.TaskCancelledError:  # Ray does so when nobody waits for the reply
                raise
            except _SilentError:
                num_deaths += 1
                logger.warning("a replica has sent nothing for %s s", self._silence_timeout_s)
            except _FAULTS as fault:
                num_deaths += 1
                logger.warning("a replica has failed: %s", brief(str(fault).splitlines()[-1] if str(fault) else fault))
            self._head = self._head._replace(attempt=num_deaths)
            if num_deaths >= self._max_deaths:
                message = f"{num_deaths} servers have died while they served this request; it is not tried again"
            elif self._is_begun and self._comments is None:
                message = "the server has died, and a stream of this kind cannot continue on another one"
            else:
                continue
            return await self._fail(BadRequestError(message, None, "server_died", 502))

    async def _attempt(self) -> None:
        """Let a replica serve the request, or the rest of it."""
        given = self._serve(self._head, self._body_for_rest())
        parts = _unless_silent(given, self._silence_timeout_s)
        try:
            status, headers = await anext(parts)
            if self._is_begun and status != 200:
                detail = brief(b"".join([part async for part in parts]).decode(errors="replace"))
                message = f"the server has died, and another one cannot continue the stream: {detail}"
                return await self._fail(BadRequestError(message, None, "server_died", 502))
            if dict(headers).get(b"content-type", b"").startswith(_EVENTS_TYPE):
                await self._relay(status, headers, parts)
            else:
                body = b"".join([part async for part in parts])
                await self._begin(status, headers)
                await self._send({"type": "http.response.body", "body": body})
        finally:
            with suppress(*_FAULTS):
                if (cancel := getattr(given, "cancel", None)) is not None:  # the client may have gone
                    cancel()

    async def _relay(self, status: int, headers: Headers, parts: AsyncIterator[bytes]) -> None:
        """Send a stream to the client as it comes, without the comments between its parts."""
        if not self._is_begun:
            self._comments = [] if HEADER in dict(headers) else None
            await self._begin(status, headers)
        kept = b""
        async for data in parts:
            events, comments, kept = (data, (), b"") if self._comments is None else split_at_comments(kept + data)
            if self._comments is not None:
                self._comments += comments
            if events:
                await self._send({"type": "http.response.body", "body": events, "more_body": True})
        await self._send({"type": "http.response.body", "body": kept})

    async def _begin(self, status: int, headers: Headers) -> None:
        """Send the reply's head."""
        self._is_begun = True
        kept = [(name, value) for name, value in headers if name not in _DROPPED and name != HEADER]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    def _body_for_rest(self) -> bytes:
        """Return the body with the part of the stream that the client has got, if there is one."""
        if not self._is_begun or self._comments is None:
            return self._body
        fields = {FIELD: Delivered.from_comments(self._comments).body_field()}
        return self._body.rstrip()[:-1] + b"," + json.dumps(fields, separators=(",", ":"))[1:].encode()

    async def _fail(self, error: BadRequestError) -> None:
        """End the reply with an error: its only content, or the last event of a stream.

        Raises:
            BadRequestError: the error, if the reply has not begun.
        """
        if not self._is_begun:
            raise error
        name = "event: error\n" if self._path.startswith(MESSAGES) else ""
        event = f"{name}data: {json.dumps(error_body_at(self._path, error))}\n\n"
        await self._send({"type": "http.response.body", "body": event.encode()})


def _without_root(scope: http.Scope) -> str:
    """Return a request's path below the application's `route_prefix`, if it has one."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def plain_headers(headers: Mapping[str, str]) -> Headers:
    """Return a reply's headers as ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
