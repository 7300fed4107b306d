"""Exchange: one request's way through the router, over as many replicas as it takes."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web
from multidict import CIMultiDict

from jaxserve.errors import brief
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import CHAT, COMPLETIONS
from jaxserve.openai.interfaces import error_body_at, error_status_at
from jaxserve.openai.kv_transfer import FIELD as KV_TRANSFER
from jaxserve.openai.messages import MESSAGES
from jaxserve.openai.resumption import FIELD, HEADER, Delivered, ReplyIdentity, split_at_comments
from jaxserve.routing.replicas import SilentError
from jaxserve.routing.upstream import BrokenReplyError, ConnectError, Reply
from jaxserve.scheduling.byte_prefix import TOKEN_BYTES, byte_prefix

if TYPE_CHECKING:
    from jaxserve.routing.config import RouterConfig
    from jaxserve.routing.counts import Counts
    from jaxserve.routing.replicas import Load, Replica, Replicas
    from jaxserve.scheduling.router import Prefix

logger = logging.getLogger(__name__)

HOP_HEADERS = frozenset(  # these concern one connection; RFC 9110, section 7.6.1
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer")
) | {"transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "expect"}
_NOT_PASSED_ON = HOP_HEADERS | {HEADER.decode(), "x-forwarded-for"}
_PROMPT_FIELDS = tuple(
    f'"{name}"'.encode() for name in ("system", "instructions", "tools", "messages", "prompt", "input", "query")
)
_HEADER = HEADER.decode()
_EVENTS_TYPE = "text/event-stream"
_TRANSFERRED = (COMPLETIONS, CHAT)
_OUTPUT_FIELDS = ("max_completion_tokens", "stream_options", "min_tokens", "n", "best_of", "echo")
_MISMATCH = 409  # status if a server cannot read another one's pages
_REFUSALS = (503, 529)  # another replica may take the request; 529 is Anthropic's


class _LostError(Exception):
    """A replica that could not be reached, or has died while it served the request."""

    def __init__(self, problem: str, *, has_died: bool) -> None:
        super().__init__(problem)
        self.has_died = has_died


class _RefusedError(Exception):
    """A replica that takes no request now; its reply is kept."""

    def __init__(self, reply: web.Response) -> None:
        super().__init__()
        self.reply = reply


class _AgainError(Exception):
    """A replica that must be asked again, without the pages of another one."""


class _EventStream(web.StreamResponse):
    """A stream to the client, whose headers leave with its first part."""

    _send_headers_immediately = False  # aiohttp's: otherwise in a segment of their own


class Exchange:
    """A request and its reply.

    A reply that breaks off is asked for again from another replica. All replicas get the same name, date and seed for
    it, so that it is the same reply; a stream continues after the part that the client has got.

    Args:
        request: the client's request.
        body: its body.
        replicas: replicas that may serve it.
        config: options of the router.
        counts: totals of the router.
    """

    def __init__(
        self, request: web.BaseRequest, body: bytes, replicas: Replicas, config: RouterConfig, counts: Counts
    ) -> None:
        self._request, self._body, self._replicas = request, body, replicas
        self._config, self._counts = config, counts
        self._path = request.rel_url.raw_path
        identity = ReplyIdentity(secrets.token_hex(16), int(time.time()), secrets.randbits(62))
        given = ((name.lower(), value) for name, value in request.headers.items())
        self._headers = [each for each in given if each[0] not in _NOT_PASSED_ON]
        self._headers += [("accept-encoding", "identity"), (_HEADER, identity.header().decode())]
        forwarded = [*request.headers.getall("x-forwarded-for", ()), *filter(None, [request.remote])]
        if forwarded:
            self._headers.append(("x-forwarded-for", ", ".join(forwarded)))
        key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
        self._prefix, self._num_tokens = prompt_prefix(body, key.encode(errors="surrogateescape"))
        self._reply: web.StreamResponse | None = None  # the stream to the client, once it has begun
        self._transfer: dict[str, Any] | None = None  # what a producer has said about the prompt's pages
        # Comments of the parts that the client has got, read only if the stream moves; None if it cannot move.
        self._comments: bytearray | None = None

    async def serve(self) -> web.StreamResponse:
        """Serve the request, and return the reply, which may have been sent already.

        Raises:
            BadRequestError: no replica can serve it, and the reply has not begun.
        """
        await self._transfer_prompt()
        num_deaths, until_s = 0, 0.0
        tried: set[Replica] = set()
        refusal: web.Response | None = None
        while True:
            choice = self._replicas.choose(self._prefix, self._num_tokens, tried)
            if choice is None:
                if refusal is not None and self._reply is None:
                    return refusal
                # a request that was lost waits for another replica, and asks those that refuse again after a while
                if time.monotonic() < until_s and await self._replicas.wait_for_ready(until_s):
                    if tried:
                        await asyncio.sleep(self._config.poll_interval_s)
                        tried.clear()
                    continue
                return await self._fail(self._no_replica())
            replica, num_shared = choice
            try:
                num_tokens = max(self._num_tokens - num_shared, 0)
                async with self._replicas.serving(replica, self._prefix, num_tokens) as load:
                    return await self._attempt(replica, load)
            except _AgainError:
                continue
            except _RefusedError as refused:
                refusal = refused.reply
                tried.add(replica)
                self._counts.refused(replica)
            except (_LostError, SilentError) as lost:
                self._replicas.fail(replica, str(lost))
                (self._counts.silent if isinstance(lost, SilentError) else self._counts.lost)(replica)
                if isinstance(lost, SilentError) or lost.has_died:
                    num_deaths += 1
                    until_s = time.monotonic() + self._config.failover_timeout_s
                    if (error := self._why_not_again(num_deaths)) is not None:
                        return await self._fail(error)

    async def _transfer_prompt(self) -> None:
        """Have a producer compute a long prompt, if there is one, so that another replica finds its pages.

        Whatever goes wrong, the other replica computes what is missing.
        """
        is_long = self._num_tokens >= self._config.min_transfer_tokens
        if self._path not in _TRANSFERRED or not is_long or not self._replicas.has_producer:
            return
        body = _for_producer(self._body)
        choice = None if body is None else self._replicas.choose(self._prefix, self._num_tokens, from_producers=True)
        if choice is None:
            return
        producer, num_shared = choice
        try:
            async with (
                self._replicas.serving(producer, self._prefix, max(self._num_tokens - num_shared, 0)),
                producer.request("POST", self._request.rel_url.raw_path_qs, self._headers, body) as reply,
            ):
                found = json.loads(await reply.read()) if reply.status == 200 else None
        except SilentError as error:
            self._replicas.fail(producer, str(error))
            self._counts.silent(producer)
            return
        except OSError as error:
            self._replicas.fail(producer, f"a prompt could not be computed: {error!r}")
            self._counts.lost(producer)
            return
        except ValueError:
            found = None
        if isinstance(found, dict) and isinstance(params := found.get(KV_TRANSFER), dict):
            self._transfer = params
            self._counts.num_transferred += 1

    def _why_not_again(self, num_deaths: int) -> BadRequestError | None:
        """Return why a request cannot be tried again after `num_deaths` deaths of replicas; None if it can."""
        if num_deaths >= self._config.max_deaths:
            message = f"{num_deaths} servers have died while they served this request; it is not tried again"
        elif self._reply is not None and self._comments is None:
            message = "the server has died, and a stream of this kind cannot continue on another one"
        else:
            return None
        return BadRequestError(message, None, "server_died", 502)

    async def _attempt(self, replica: Replica, load: Load) -> web.StreamResponse:
        """Let a replica serve the request, or the rest of it.

        Raises:
            _LostError: the replica cannot be reached, or its reply has broken off.
            _RefusedError: it takes no request now.
        """
        try:
            method, path = self._request.method, self._request.rel_url.raw_path_qs
            body = self._body_for_rest() if method == "POST" else None
            async with replica.request(method, path, self._headers, body) as reply:
                done = await self._take(reply, load)
        except ConnectError as error:
            raise _LostError(f"it cannot be reached: {error}", has_died=False) from error
        except BrokenReplyError as error:
            raise _LostError(f"a reply broke off: {error!r}", has_died=True) from error
        self._counts.answered(replica)
        return done

    async def _take(self, reply: Reply, load: Load) -> web.StreamResponse:
        """Return a replica's reply; a stream is sent to the client meanwhile."""
        if reply.status in _REFUSALS:
            raise _RefusedError(await self._whole(reply))
        if reply.status == _MISMATCH and self._transfer is not None:
            logger.warning("a prompt is computed again: %s", brief((await reply.read()).decode(errors="replace")))
            self._transfer = None
            raise _AgainError
        if self._reply is not None and reply.status != 200:
            detail = brief((await reply.read()).decode(errors="replace"))
            message = f"the server has died, and another one cannot continue the stream: {detail}"
            return await self._fail(BadRequestError(message, None, "server_died", 502))
        return await (self._relay(reply, load) if reply.content_type == _EVENTS_TYPE else self._whole(reply))

    def _body_for_rest(self) -> bytes:
        """Return the body with the part of the stream that the client has got, if there is one."""
        fields: dict[str, Any] = {} if self._transfer is None else {KV_TRANSFER: self._transfer}
        if self._comments is not None and self._reply is not None:
            fields[FIELD] = Delivered.from_comments(bytes(self._comments).split(b"\n")[:-1]).body_field()
        if not fields:
            return self._body
        return self._body.rstrip()[:-1] + b"," + json.dumps(fields, separators=(",", ":"))[1:].encode()

    async def _whole(self, reply: Reply) -> web.Response:
        """Return a whole reply."""
        return web.Response(body=await reply.read(), status=reply.status, headers=_without_hops(reply.headers))

    async def _relay(self, reply: Reply, load: Load) -> web.StreamResponse:
        """Send a stream to the client as it comes, without the comments between its parts."""
        if self._reply is None:
            self._comments = bytearray() if _HEADER in reply.headers else None
            new = _EventStream if reply.has_part else web.StreamResponse
            self._reply = new(status=reply.status, headers=_without_hops(reply.headers))
            await self._reply.prepare(self._request)
        elif self._comments is not None:
            self._counts.num_moved += 1
        write, kept = self._reply.write, b""  # it raises ConnectionResetError if the client has gone
        while data := await reply.read_any():
            events = data
            if self._comments is not None:
                events, comments, kept = split_at_comments(kept + data)
                for comment in comments:
                    self._comments += comment + b"\n"
            if reply.at_end:  # the end leaves with the last part
                kept = events + kept
            elif events:
                load.heard_s = math.inf
                await write(events)
            load.heard()
        await self._reply.write_eof(kept)
        return self._reply

    async def _fail(self, error: BadRequestError) -> web.StreamResponse:
        """End the reply with an error: its only content, or the last event of a stream.

        Raises:
            BadRequestError: the error, if the reply has not begun.
        """
        self._counts.num_failed += 1
        if self._reply is None:
            raise error
        body = json.dumps(error_body_at(self._path, error))
        name = "event: error\n" if self._path.startswith(MESSAGES) else ""
        with suppress(ConnectionError):
            await self._reply.write(f"{name}data: {body}\n\n".encode())
            await self._reply.write_eof()
        return self._reply

    def _no_replica(self) -> BadRequestError:
        """Return the error if no replica is ready."""
        problems = "; ".join(f"{replica.url}: {replica.problem}" for replica in self._replicas.all if replica.problem)
        return BadRequestError(f"no server is ready: {problems or 'all refuse'}", None, "no_replica", 503)


def prompt_prefix(body: bytes, key: bytes) -> tuple[Prefix, int]:
    """Return the sampled prefixes of the prompt in a body, and its estimated number of tokens.

    Args:
        body: a request's body.
        key: its key; prompts with different keys have nothing in common.
    """
    start = min((at for field in _PROMPT_FIELDS if (at := body.find(field)) >= 0), default=len(body))
    return byte_prefix(body[start:], key, b"body"), (len(body) - start) // TOKEN_BYTES


def _for_producer(body: bytes) -> bytes | None:
    """Return a body with which a producer computes the prompt; None if its pages cannot be transferred."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # the server that gets the body refuses it
        return None
    if not isinstance(fields, dict) or KV_TRANSFER in fields:
        return None
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt):
        return None
    fields = {name: value for name, value in fields.items() if name not in _OUTPUT_FIELDS}
    fields |= {"max_tokens": 1, "stream": False, KV_TRANSFER: {"do_remote_decode": True, "do_remote_prefill": False}}
    return json.dumps(fields).encode()


def _without_hops(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return a reply's headers without those that concern one connection or the router."""
    dropped = HOP_HEADERS | {_HEADER}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


def error_reply(path: str, error: BadRequestError) -> web.Response:
    """Return an error in the format of a path as a whole reply."""
    headers = {"retry-after": "1"} if error.status_code == 503 else {}
    return web.json_response(error_body_at(path, error), status=error_status_at(path, error), headers=headers)
