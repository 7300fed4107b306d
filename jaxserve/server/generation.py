"""Generation: completions and chats."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import ParsedRequest, naming_fields, prompt_field
from jaxserve.openai.interfaces import INTERFACES, AnyReply, Interface
from jaxserve.openai.translation import naming
from jaxserve.server import http
from jaxserve.server.classes import early_priority, in_class, read_objectives
from jaxserve.server.http import ClientGoneError
from jaxserve.server.streams import BrokenStepError, Stream
from jaxserve.server.timeouts import Timeouts, read_timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxserve.engine.outputs import RequestGroup
    from jaxserve.increments import Increment
    from jaxserve.server.call import Call
    from jaxserve.server.http import Json
    from jaxserve.server.service import Service

logger = logging.getLogger(__name__)

_CONSTRAINING = {  # fields whose grammars take time to read
    *("response_format", "structured_outputs", "text", "output_config", "tools"),
}


class Generation:
    """Handler of completions and chats.

    Args:
        service: engine and state of the server.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._ids, self._random = itertools.count(), random.Random()
        has_classes = service.engine.config.scheduling_policy == "priority"
        self._objectives = read_objectives(service.config.objectives) if has_classes else {}

    async def serve(self, call: Call) -> None:
        """Answer a request."""
        came_s, admission = time.monotonic(), self._service.admission
        call.header_makers.append(lambda: admission.headers(call.tenant))
        self._check_draining("draining")
        admission.check_early(call.tenant)
        with admission.opened(call.tenant):
            body, interface = await call.json(), INTERFACES[call.path]
            timeouts = read_timeouts(call.headers, body, streams=bool(body.get("stream")))
            priority = early_priority(body, call.headers, self._objectives)
            admission.check_body(call.tenant, priority, body, timeouts.first_token_s)
            request, groups = await call.beside_the_loop(
                partial(self._read, call, interface, body), needs_time=bool(body.keys() & _CONSTRAINING)
            )
            self._check_draining()
            samples = [sample for group in groups for sample in group.requests]
            priority = samples[0].priority
            response_id = request.request_id or f"{self._random.getrandbits(128):032x}"
            reply = interface.new_reply(
                request, body, self._engine.tokenizer, response_id=response_id, created_s=int(time.time())
            )
            with admission.admitted(call.tenant, priority, samples, timeouts.first_token_s):
                try:
                    left = timeouts.since(came_s, time.monotonic())
                    await self._generate(call, request, groups, reply, left, priority)
                except BrokenStepError as error:
                    logger.warning("a request has failed: %s", error)
                    message = "the engine could not compute this; try again"
                    raise BadRequestError(message, None, "engine_error", 500) from error

    async def _generate(
        self,
        call: Call,
        request: ParsedRequest,
        groups: list[RequestGroup],
        reply: AnyReply,
        timeouts: Timeouts,
        priority: int,
    ) -> None:
        call.error_events = reply.error_events
        headers = [(b"x-ignored-params", ",".join(request.ignored).encode())] if request.ignored else []
        stream = Stream(groups, self._engine.frontend.lock, is_whole=not request.stream)
        gone = asyncio.ensure_future(call.wait_until_gone())
        gone.add_done_callback(lambda _: stream.end())
        try:
            with stream.expiring(timeouts.total_s, timeouts.first_token_s):
                await self._service.admission.turn(priority, stream.through)
                if stream.through.done():
                    self._check_whole(stream)
                with self._service.streams.opened(stream):
                    if request.stream:
                        await self._stream(call, stream, reply, headers)
                    else:
                        await self._reply(call, stream, reply, headers)
        finally:
            gone.cancel()
            if self._service.traces is not None:
                self._service.traces.note(call.headers, groups)

    def _read(self, call: Call, interface: Interface, body: Json) -> tuple[ParsedRequest, list[RequestGroup]]:
        """Return a request and what the engine makes of it. On any thread."""
        service = self._service
        request = interface.read(body, service.parse)
        field = prompt_field(request.url)
        if len(request.prompts) > service.config.max_prompts:
            message = f"{field} must be at most {service.config.max_prompts} prompts, got {len(request.prompts)}"
            raise BadRequestError(message, field)
        num_samples = len(request.prompts) * request.params.n
        if num_samples > service.most_at_once:
            message = (
                f"a request must have at most {service.most_at_once} samples of all its prompts, got {num_samples}"
            )
            raise BadRequestError(message, "n" if request.params.n > 1 else field)
        if call.tenant:  # nobody finds out what others have asked
            salt = json.dumps([call.tenant, request.cache_salt])
            request = replace(request, cache_salt=salt)
        request = in_class(request, call.headers, call.tenant, self._objectives)
        return request, self._prepare_all(interface, request)

    def _prepare_all(self, interface: Interface, request: ParsedRequest) -> list[RequestGroup]:
        self._engine.devices.check_serve()
        read, name = self._engine.reader.read, interface.prefix
        groups: list[RequestGroup] = []
        whose = request.tenant, request.priority or 0
        for prompt in request.prompts:
            params = request.params
            if params.seed is not None and groups:  # prompts of one request differ in their samples
                params = replace(params, seed=params.seed + len(groups))
            # The field of the request, not the parameter of the engine.
            with interface.naming(), naming({"structured_outputs": request.form_field}), naming_fields(request.url):
                groups.append(
                    read(f"{name}-{next(self._ids)}", prompt, request.pooling or params, request.cache_salt, *whose)
                )
        return groups

    async def _reply(self, call: Call, stream: Stream, reply: AnyReply, headers: http.Headers) -> None:
        """Send a whole reply."""
        await stream.run()
        self._check_whole(stream)
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
        self._check_whole(stream)
        outputs = [group.output for group in stream.groups]
        last = b"".join(reply.last_events(outputs))
        await call.send({"type": "http.response.body", "body": last, "more_body": False})

    def _check_whole(self, stream: Stream) -> None:
        """Raise the error of a reply that was cut short."""
        if stream.is_late:
            message = "the reply was not there within the timeout of the request; allow more time, or ask for less"
            raise BadRequestError(message, None, "deadline_exceeded", 504)
        if stream.is_cancelled:
            self._check_draining()
            raise ClientGoneError

    def _check_draining(self, reason: str | None = None) -> None:
        if self._service.is_draining:
            if reason is not None:
                self._service.observer.reject(reason)
            raise BadRequestError("the server stops; try another one", None, "stopping", 503)
