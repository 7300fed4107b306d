"""Generation: completions and chats."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from jaxserve.images.prepared import without_patches
from jaxserve.openai.chats import has_images
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import ParsedRequest, naming_fields
from jaxserve.openai.interfaces import INTERFACES, Interface, invoked_path
from jaxserve.openai.replies import AnyReply, Reply
from jaxserve.openai.resumption import HEADER, Delivered, ReplyIdentity
from jaxserve.openai.translation import naming
from jaxserve.scheduling.kv_cache.prefix_hashes import CachedSequence
from jaxserve.server import http
from jaxserve.server.http import ClientGoneError
from jaxserve.server.json_pieces import MAX_VALUES, json_pieces, num_new_values, num_values
from jaxserve.server.request_classes import (
    allowed_priority,
    early_priority,
    in_class,
    in_session,
    read_objectives,
)
from jaxserve.server.resumption import Resumption
from jaxserve.server.streams import BrokenStepError, Stream
from jaxserve.server.timeouts import Timeouts, read_timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jaxserve.api.outputs import RequestOutput
    from jaxserve.api.stream_events import Increment
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.openai.kv_transfer import KVTransfer
    from jaxserve.server.call import Call
    from jaxserve.server.http import Json
    from jaxserve.server.service import Service

logger = logging.getLogger(__name__)

# Fields that take time to read, however short they are.
_COSTLY = {"response_format", "structured_outputs", "text", "output_config", "tools", "bad_words"}
MAX_SHORT = 8  # prompts, or samples per prompt, that are read on the loop


class Generation:
    """Handler for requests that generate or pool: completions, chats, responses, messages, embeddings and scores.

    Args:
        service: engine and server state.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._ids, self._random = itertools.count(), random.Random()
        has_classes = service.engine.config.scheduling_policy == "priority"
        self._objectives = read_objectives(service.config.objectives) if has_classes else {}

    async def serve(self, call: Call) -> None:
        """Answer a request, from its admission to the end of the reply."""
        came_s, admission = time.monotonic(), self._service.admission
        call.header_makers.append(partial(admission.headers, call.tenant))
        self._check_draining("draining")
        admission.check_early(call.tenant)
        with admission.opened(call.tenant):
            body = await call.json()
            with call.watched():
                await self._answer(call, body, came_s)

    async def _answer(self, call: Call, body: Json, came_s: float) -> None:
        """Answer a request with this `body`, which came at the time `came_s`.

        Raises:
            BadRequestError: it is refused, or the engine could not compute it.
        """
        admission = self._service.admission
        identity = ReplyIdentity.from_header(http.header_value(call.headers, HEADER))
        delivered = Delivered.take_from(body)
        interface = INTERFACES[invoked_path(call.path, body, self._engine.arch.pooler)]
        timeouts = read_timeouts(call.headers, body, streams=bool(body.get("stream")))
        priority = early_priority(body, call.headers, self._objectives)
        admission.check_body(call.tenant, priority, body, timeouts.first_token_s)
        request, groups = await call.read_off_loop(
            partial(self._read, call, interface, body, identity), needs_time=_needs_time(body)
        )
        resumption = None
        if identity is not None or delivered is not None:
            resumption = Resumption.begin(request, groups, delivered, self._engine.arch.vocab_size)
        self._check_draining()
        priority = groups[0].requests[0].priority
        identity = identity or ReplyIdentity(f"{self._random.getrandbits(128):032x}", int(time.time()), 0)
        reply = interface.new_reply(
            request,
            body,
            self._engine.tokenizer,
            request.request_id or identity.response_id,
            created_s=identity.created_s,
            fingerprint=self._service.fingerprint,
        )
        with admission.admitted(call.tenant, priority, groups, timeouts.first_token_s):
            try:
                left = timeouts.since(came_s, time.monotonic())
                await self._generate(call, request, groups, reply, left, priority, resumption)
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
        resumption: Resumption | None,
    ) -> None:
        """Run a request's groups in the engine, and send the reply as a whole or as a stream.

        Args:
            call: the HTTP request.
            request: the request in its body.
            groups: its prompts, as the engine takes them.
            reply: builder of the reply.
            timeouts: times that are left.
            priority: the request's class.
            resumption: how another server can continue the stream; None if none can.
        """
        if request.stream:
            call.error_events = reply.error_events
            call.can_move = resumption is not None
        headers = [(b"x-ignored-params", ",".join(request.ignored).encode())] if request.ignored else []
        starts = None if resumption is None else resumption.starts
        stream = Stream(groups, self._engine.frontend.lock, is_whole=not request.stream, starts=starts)
        try:
            with stream.expiring(timeouts.total_s, timeouts.first_token_s):
                await self._service.admission.turn(priority, stream.through)
                if stream.through.done():
                    self._check_whole(stream)
                with self._service.streams.opened(stream):
                    if request.stream:
                        await self._stream(call, stream, reply, headers, resumption, has_echo=request.echo)
                    else:
                        await self._reply(call, stream, reply, headers, request.transfer, has_echo=request.echo)
        finally:
            if self._service.traces is not None:
                self._service.traces.note(call.headers, groups)
            if any(group.params.logprobs is not None or group.params.prompt_logprobs is not None for group in groups):
                self._service.workers.release(groups)

    def _read(
        self, call: Call, interface: Interface, body: Json, identity: ReplyIdentity | None
    ) -> tuple[ParsedRequest, list[RequestGroup]]:
        """Return the request in a body, and its prompts as groups for the engine. On any thread."""
        service = self._service
        request = interface.read(body, partial(service.parse, call=call), self._engine.schedule.max_model_len)
        service.check_size(request)
        if request.transfer is not None:
            request = self._transferring(request, request.transfer)
        request = replace(request, cache_salt=call.salt(request.cache_salt))
        if identity is not None and request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=identity.seed))
        request = in_session(in_class(request, call.headers, call.tenant, self._objectives), call.headers)
        if service.keys:
            limits = service.admission.limits.tenant_limits(call.tenant)
            request = replace(request, priority=allowed_priority(request.priority, limits))
        return request, self._prepare_all(interface, request)

    def _transferring(self, request: ParsedRequest, transfer: KVTransfer) -> ParsedRequest:
        """Return a request whose prompt is computed for another server, or by one; the former has one output token.

        Raises:
            BadRequestError: the servers cannot share pages.
        """
        transfer.check(self._engine.host.shared_pages())
        if len(request.prompts) > 1:
            message = f"a request with kv_transfer_params must have one prompt, got {len(request.prompts)}"
            raise BadRequestError(message, "kv_transfer_params")
        if not transfer.sends:
            return request
        return replace(request, params=request.params.clone({"max_tokens": 1, "min_tokens": 0, "n": 1}))

    def _save_prompt(self, transfer: KVTransfer, groups: Sequence[RequestGroup]) -> Json:
        """Write a prompt's pages to the shared store, and return what its reply tells the other server."""
        (group,), page_size = groups, self._engine.schedule.page_size
        request, host = group.requests[0], self._engine.host
        num_needed = len(request.prompt_token_ids) - 1
        images = without_patches(request.images)
        own = request.salt, images, request.adapter, request.adapter_start
        num_saved = host.save_pages(CachedSequence(request.prompt_token_ids[:num_needed], *own))
        num_saved = num_needed if num_saved == num_needed // page_size * page_size else num_saved
        return transfer.reply(host.shared_pages(), group.request_id, num_saved, page_size)

    def _prepare_all(self, interface: Interface, request: ParsedRequest) -> list[RequestGroup]:
        """Return a group for each prompt of a request; RequestError if the engine cannot serve one."""
        self._engine.host.check_serve()
        name = interface.prefix
        groups: list[RequestGroup] = []
        read = partial(
            self._engine.reader.read,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            priority=request.priority or 0,
            reuse=request.reuse,
            sends_prompt=request.transfer is not None and request.transfer.sends,
            takes_prompt=request.transfer is not None and not request.transfer.sends,
            lora_request=self._service.adapters.request(request.adapter),
        )
        for prompt in request.prompts:
            params = request.params
            if params.seed is not None and groups:  # a request's prompts differ in their samples
                params = replace(params, seed=params.seed + len(groups))
            # The request's field, not the engine's parameter.
            with interface.naming(), naming({"structured_outputs": request.form_field}), naming_fields(request.url):
                groups.append(read(f"{name}-{next(self._ids)}", prompt, request.pooling or params))
        return groups

    async def _reply(
        self,
        call: Call,
        stream: Stream,
        reply: AnyReply,
        headers: http.Headers,
        transfer: KVTransfer | None,
        *,
        has_echo: bool,
    ) -> None:
        """Wait until all groups of a stream have ended, and their pages are stored, and send the whole reply."""
        await stream.run()
        self._check_whole(stream)
        if transfer is not None and transfer.sends and isinstance(reply, Reply):
            reply.kv_transfer_params = await call.in_workers(partial(self._save_prompt, transfer, stream.groups))
        outputs = [group.output for group in stream.groups]
        headers = [*headers, *_energy_headers(outputs)]
        if sum(num_values(each, has_echo=has_echo) for each in outputs) <= MAX_VALUES:
            await call.send_json(reply.body(outputs), headers=headers)
        else:
            await call.send_pieces(_pieces(reply, outputs), 200, http.JSON_TYPE, headers)

    async def _stream(
        self,
        call: Call,
        stream: Stream,
        reply: AnyReply,
        headers: http.Headers,
        resumption: Resumption | None,
        *,
        has_echo: bool,
    ) -> None:
        """Send the groups' increments as server-sent events when they come, between the first and last events."""
        own = [(b"content-type", http.EVENTS_TYPE), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        if resumption is not None:
            own.append((HEADER, b"1"))
        await call.send({"type": "http.response.start", "status": 200, "headers": [*own, *headers]})
        repeats_body = call.has_long_body  # some interfaces repeat request fields in replies
        events_of = reply.events if resumption is None else partial(resumption.events, reply)
        first_events = reply.first_events if resumption is None else partial(resumption.first_events, reply)
        await self._send_events(call, first_events, is_short=not repeats_body)
        long_events: asyncio.Task[None] | None = None
        resume = stream.resume  # called when the client has taken enough

        async def send_long(events: Callable[[], Iterator[bytes]]) -> None:
            """Send long events, which a thread makes, and let the stream continue afterwards."""
            nonlocal resume
            await self._send_events(call, events, is_short=False)
            resume = stream.resume
            resume()

        def write(number: int, increments: Sequence[Increment]) -> bool:
            """Write the events for a group's increments; return False if the client must read before the next."""
            nonlocal long_events, resume
            output = stream.groups[number].output
            make = partial(events_of, number, output, increments)
            if repeats_body or num_new_values(output, increments, has_echo=has_echo) > MAX_VALUES:
                resume = _do_nothing
                long_events = asyncio.ensure_future(send_long(make))
                return False
            events = b"".join(make())
            return not events or call.write(events)

        def on_writable() -> None:
            resume()

        with call.writing(on_writable):
            try:
                await stream.run(write)
                if long_events is not None:
                    await long_events
            finally:
                if long_events is not None:
                    long_events.cancel()
        self._check_whole(stream)
        outputs = [group.output for group in stream.groups]
        is_short = not repeats_body and sum(num_values(each, has_echo=has_echo) for each in outputs) <= MAX_VALUES
        await self._send_events(call, partial(reply.last_events, outputs), is_short=is_short)
        await call.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, call: Call, make: Callable[[], Iterator[bytes]], *, is_short: bool) -> None:
        """Send the events that `make` yields; a thread makes them unless they are short."""
        if is_short:
            if events := b"".join(make()):
                await call.send({"type": "http.response.body", "body": events, "more_body": True})
            return
        async for part in call.parts(make()):
            await call.send({"type": "http.response.body", "body": part, "more_body": True})

    def _check_whole(self, stream: Stream) -> None:
        """Raise an error if the stream was ended early: by its timeout, by the stopping server, or by the client."""
        if stream.is_late:
            message = "the reply was not there within the timeout of the request; allow more time, or ask for less"
            raise BadRequestError(message, None, "deadline_exceeded", 504)
        if stream.is_cancelled:
            self._check_draining()
            raise ClientGoneError

    def _check_draining(self, reason: str | None = None) -> None:
        """Raise BadRequestError (503) if the server stops; count the refusal under `reason` if there is one."""
        if self._service.is_draining:
            if reason is not None:
                self._service.observer.reject(reason)
            raise BadRequestError("the server stops; try another one", None, "stopping", 503)


def _do_nothing() -> None:
    """Do nothing when the client could read more, because a thread is still making events."""


def _pieces(reply: AnyReply, outputs: list[RequestOutput]) -> Iterator[bytes]:
    """Yield the JSON text of a whole reply to `outputs` in pieces; nothing is computed before the first."""
    yield from json_pieces(reply.lazy_body(outputs))


def _needs_time(body: Json) -> bool:
    """Return whether a body, however short, takes long to check: costly fields, images, many prompts or samples."""
    prompts, num_samples = body.get("prompt", body.get("input")), body.get("n")
    is_many = isinstance(prompts, list) and len(prompts) > MAX_SHORT and not isinstance(prompts[0], int)
    many_samples = isinstance(num_samples, int) and num_samples > MAX_SHORT
    return bool(body.keys() & _COSTLY) or is_many or many_samples or has_images(body)


def _energy_headers(outputs: Sequence[RequestOutput]) -> http.Headers:
    """Return headers with a reply's energy and its grams of CO2; none without a meter or a carbon intensity."""
    metrics = [completion.metrics for output in outputs for completion in output.outputs]
    headers = []
    for name, values in (
        (b"x-energy-joules", [each.energy_j for each in metrics]),
        (b"x-co2-grams", [each.co2_g for each in metrics]),
    ):
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            headers.append((name, f"{sum(known):.6g}".encode()))
    return headers
