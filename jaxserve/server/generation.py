"""Generation: completions and chats."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import uuid
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.openai.format import BadRequestError, ParsedRequest
from jaxserve.openai.interfaces import INTERFACES, AnyReply, Interface
from jaxserve.server import http
from jaxserve.server.classes import in_class, read_objectives
from jaxserve.server.http import ClientGoneError
from jaxserve.server.streams import BrokenStepError, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxserve.engine.outputs import RequestGroup
    from jaxserve.increments import Increment
    from jaxserve.server.call import Call
    from jaxserve.server.http import Json
    from jaxserve.server.service import Service

logger = logging.getLogger(__name__)

_CONSTRAINING = {  # fields whose grammars take time to read
    *("response_format", "structured_outputs", "text", "output_config"),
}


class Generation:
    """Handler of completions and chats.

    Args:
        service: engine and state of the server.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._ids = itertools.count()
        self._open_by_tenant: dict[str, int] = {}  # unfinished requests
        has_classes = service.engine.config.scheduling_policy == "priority"
        self._objectives = read_objectives(service.config.objectives) if has_classes else {}

    async def serve(self, call: Call) -> None:
        """Answer a request."""
        body, interface = await call.json(), INTERFACES[call.path]
        self._check_admission(call)
        num_open, num_samples = self._open_by_tenant, 1  # all samples, once they are known
        num_open[call.tenant] = num_open.get(call.tenant, 0) + 1
        try:
            request, groups = await call.beside_the_loop(
                partial(self._read, call, interface, body), needs_time=bool(body.keys() & _CONSTRAINING)
            )
            num_open[call.tenant] += sum(len(group.requests) for group in groups) - num_samples
            num_samples = sum(len(group.requests) for group in groups)
            self._check_draining()
            reply = interface.new_reply(
                request, body, self._engine.tokenizer, response_id=uuid.uuid4().hex, created_s=int(time.time())
            )
            await self._generate(call, request, groups, reply)
        except BrokenStepError as error:
            logger.warning("a request has failed: %s", error)
            message = "the engine could not compute this; try again"
            raise BadRequestError(message, None, "engine_error", 500) from error
        finally:
            num_open[call.tenant] -= num_samples
            if not num_open[call.tenant]:
                del num_open[call.tenant]

    async def _generate(self, call: Call, request: ParsedRequest, groups: list[RequestGroup], reply: AnyReply) -> None:
        call.error_events = reply.error_events
        headers = [(b"x-ignored-params", ",".join(request.ignored).encode())] if request.ignored else []
        stream = Stream(groups, self._engine.frontend.lock, is_whole=not request.stream)
        gone = asyncio.ensure_future(call.wait_until_gone())
        gone.add_done_callback(lambda _: stream.end())
        try:
            with self._service.streams.opened(stream):
                if request.stream:
                    await self._stream(call, stream, reply, headers)
                else:
                    await self._reply(call, stream, reply, headers)
        finally:
            gone.cancel()

    def _read(self, call: Call, interface: Interface, body: Json) -> tuple[ParsedRequest, list[RequestGroup]]:
        """Return a request and what the engine makes of it. On any thread."""
        service = self._service
        request = interface.read(body, service.parse)
        if len(request.prompts) > service.config.max_prompts:
            message = f"prompt must be at most {service.config.max_prompts} prompts, got {len(request.prompts)}"
            raise BadRequestError(message, "prompt")
        num_samples = len(request.prompts) * request.params.n
        if num_samples > service.most_at_once:
            message = (
                f"a request must have at most {service.most_at_once} samples of all its prompts, got {num_samples}"
            )
            raise BadRequestError(message, "n")
        if call.tenant:  # nobody finds out what others have asked
            salt = json.dumps([call.tenant, request.cache_salt])
            request = replace(request, cache_salt=salt)
        request = in_class(request, call.headers, call.tenant, self._objectives)
        return request, self._prepare_all(interface, request)

    def _check_admission(self, call: Call) -> None:
        """Raise BadRequestError where no further request may be served now."""
        if self._service.is_draining:
            self._service.observer.reject("draining")
            raise BadRequestError("the server is stopping; try another one", None, "stopping", 503)
        if self._service.is_full:
            self._service.observer.reject("queue_full")
            raise BadRequestError("the queue of the server is full; try again later", None, "overloaded", 503)
        if self._open_by_tenant.get(call.tenant, 0) >= self._service.config.max_open_requests_per_key:
            self._service.observer.reject("key_limit")
            most = self._service.config.max_open_requests_per_key
            message = f"a key must have fewer than {most} unfinished requests; wait for one"
            raise BadRequestError(message, None, "rate_limit_exceeded", 429)

    def _prepare_all(self, interface: Interface, request: ParsedRequest) -> list[RequestGroup]:
        self._engine.devices.check_serve()
        prepare, name = self._engine.frontend.prepare, interface.prefix
        groups: list[RequestGroup] = []
        whose = request.tenant, request.priority or 0
        for prompt in request.prompts:
            params = request.params
            if params.seed is not None and groups:  # prompts of one request differ in their samples
                params = replace(params, seed=params.seed + len(groups))
            with interface.naming():
                groups.append(prepare(f"{name}-{next(self._ids)}", prompt, params, request.cache_salt, *whose))
        return groups

    async def _reply(self, call: Call, stream: Stream, reply: AnyReply, headers: http.Headers) -> None:
        """Send a whole reply."""
        await stream.run()
        if stream.is_cancelled:
            self._check_draining()
            raise ClientGoneError
        outputs = [group.output for group in stream.groups]
        await http.send_json(call.send, reply.body(outputs), headers=headers)

    async def _stream(self, call: Call, stream: Stream, reply: AnyReply, headers: http.Headers) -> None:
        """Send increments as they come."""
        own = [(b"content-type", http.EVENTS_TYPE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await call.send({"type": "http.response.start", "status": 200, "headers": [*own, *headers]})
        if first := b"".join(reply.first_events()):
            await call.send({"type": "http.response.body", "body": first, "more_body": True})

        def write(number: int, increments: Sequence[Increment]) -> bool:
            events = b"".join(reply.events(number, stream.groups[number].output, increments))
            return not events or call.write(events)

        with call.writing(stream.resume):
            await stream.run(write)
        if stream.is_cancelled:
            self._check_draining()
            raise ClientGoneError
        outputs = [group.output for group in stream.groups]
        last = b"".join(reply.last_events(outputs))
        await call.send({"type": "http.response.body", "body": last, "more_body": False})

    def _check_draining(self) -> None:
        if self._service.is_draining:
            raise BadRequestError("the server has stopped before the end of the reply", None, "stopping", 503)
