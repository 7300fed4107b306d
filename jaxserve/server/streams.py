"""Streams: the requests of a server's event loop, which the engine's threads compute.

The engine's frontend calls listeners on a thread of its own. They leave their requests in a queue and wake the loop
once, however many requests have news by then: to wake it takes longer than all else that a token costs. The callback
on the loop writes to all connections; the requests' tasks sleep until their replies are through.

Writing to many connections takes processor time that the engine's own threads need. If it would take more than a
small fraction of all time, as with many streams from a fast model, parts wait for some milliseconds, and later news
is sent with them. The first news of a request and its end never wait.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from jaxserve.api.stream_events import Increment, OutputReader
from jaxserve.core.threads import EngineThreads
from jaxserve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxserve.assembly.engine import Engine
    from jaxserve.core.events import Event
    from jaxserve.core.frontend import Listener
    from jaxserve.core.growing_outputs import RequestGroup
    from jaxserve.server.observer import Observer


logger = logging.getLogger(__name__)

MAX_WRITING = 1 / 30  # fraction of time for writing stream parts, except first and last ones
LONGEST_WAIT_S = 0.03  # time that parts wait for that at most, however long writing takes
Write = Callable[[int, Sequence[Increment]], bool]
Starts = Mapping[int, tuple[int, int]]


class BrokenStepError(RuntimeError):
    """Engine error that has ended a request early."""


class Stream:
    """The engine requests of one reply, a group per prompt, and the sending of their news.

    Args:
        groups: requests from `RequestReader.read`.
        lock: lock that keeps outputs from changing.
        is_whole: True to be notified only at the end.
        starts: by group, what its reader counts as read; see `OutputReader`.

    Attributes:
        groups: the requests.
        is_whole: True to be notified only at the end.
        begun: ids of requests with a first token, on the frontend's thread.
        is_cancelled: True once nobody waits for the reply.
        is_late: True once a client timeout has passed.
    """

    def __init__(
        self, groups: Sequence[RequestGroup], lock: Lock, *, is_whole: bool, starts: Sequence[Starts] | None = None
    ) -> None:
        self.groups, self.is_whole = groups, is_whole
        self.begun: set[str] = set()
        self._lock = lock
        self.is_cancelled = self.is_late = False
        self._numbers = {group.request_id: number for number, group in enumerate(groups)}
        starts = starts or [{}] * len(groups)
        self._readers = [OutputReader(group.output, read) for group, read in zip(groups, starts, strict=True)]
        self._news: dict[int, None] = {}  # indices of requests with news
        self._open = set(range(len(groups)))  # indices of unfinished requests
        self._is_waiting = True  # True before `run`, and while the client must take something
        self._write: Write | None = None
        self._through: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self, group: RequestGroup) -> None:
        """Send a group's new tokens, now or once the client has read enough. To be called on the loop."""
        number = self._numbers[group.request_id]
        if self._is_waiting:
            self._news[number] = None
        else:
            self._send(number)

    def end(self) -> None:
        """Mark the stream as cancelled and let `run` return."""
        self.is_cancelled = True
        self._set_through()

    @property
    def through(self) -> asyncio.Future[None]:
        """Future that is done when `run` returns."""
        return self._through

    @contextmanager
    def expiring(self, total_s: float, first_token_s: float) -> Iterator[None]:
        """End the stream as late if one of the client's timeouts passes within the context.

        Args:
            total_s: time that is left until the last token; may be infinite.
            first_token_s: time that is left until the first.
        """
        loop, timers = asyncio.get_running_loop(), []
        if total_s < math.inf:
            timers.append(loop.call_later(total_s, self._expire, False))
        if first_token_s < total_s:
            timers.append(loop.call_later(first_token_s, self._expire, True))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _expire(self, may_have_tokens: bool) -> None:
        """End the stream as late, but not if `may_have_tokens` and any group has a token."""
        if not (may_have_tokens and any(group.output.metrics.num_output_tokens for group in self.groups)):
            self.is_late = True
            self.end()

    async def run(self, write: Write | None = None) -> None:
        """Send news until all requests have ended, or until `end` is called.

        Args:
            write: function that sends a request's increments, given its index, in the callback that has the news;
                returns False if nothing more may be sent before `resume` is called. None for a whole reply.

        Raises:
            BrokenStepError: the engine could not continue a request.
            RequestError: its adapter cannot be read again, or the engine's process has died.
        """
        self._write = write
        try:
            self.resume()
            await self._through
        finally:
            self._write = None  # it may have the stream

    def resume(self) -> None:
        """Send the groups' news until `write` returns False. To be called on the loop."""
        self._is_waiting = False
        while self._news and not self._is_waiting:
            number = next(iter(self._news))
            del self._news[number]
            self._send(number)

    def _send(self, number: int) -> None:
        """Send the new tokens of the group with this index, and let `run` return or raise if it was the last to end."""
        group, write = self.groups[number], self._write
        try:
            with self._lock:  # three values from one moment
                increments = self._readers[number].read() if write is not None else ()
                is_ended, error = group.output.finished, group.error
            if isinstance(error, RequestError):
                raise error
            if error is not None:
                raise BrokenStepError(f"the step that served this request broke off: {error!r}")
            if write is not None and increments and not self._through.done():
                self._is_waiting = not write(number, increments)
        except Exception as failure:
            if not self._through.done():
                self._through.set_exception(failure)
        else:
            if is_ended:
                self._open.discard(number)
                if not self._open:
                    self._set_through()

    def _set_through(self) -> None:
        """Let `run` return."""
        if not self._through.done():
            self._through.set_result(None)


class Streams:
    """A server's open streams, and the engine's threads that compute them.

    Args:
        engine: engine that nothing else drives.
        observer: notified of progress and ends, on the frontend's thread.

    Attributes:
        num_wakes: calls that have woken the loop.
        interval_s: minimum time between a stream's parts, except the first and the last.
    """

    def __init__(self, engine: Engine, observer: Observer) -> None:
        self.num_wakes = 0
        self.interval_s = 0.0
        self._engine, self._threads, self._observer = engine, EngineThreads(engine), observer
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Stream] = {}  # keys are request ids
        self._urgent: deque[RequestGroup] = deque()  # requests with first tokens or ends
        self._news: deque[RequestGroup] = deque()  # requests with other tokens
        self._is_woken = self._is_timed = False  # True if `_wake`, or `_send_rest` at its time, is about to be called
        self._due_s = 0.0  # time at which other tokens may be written next

    def __len__(self) -> int:
        """Return the number of engine requests whose replies are not through."""
        return len(self._open)

    @contextmanager
    def opened(self, stream: Stream) -> Iterator[Stream]:
        """Submit a stream's groups to the engine; cancel unfinished ones at the end of the context."""
        ids = [group.request_id for group in stream.groups]
        self._open.update(dict.fromkeys(ids, stream))
        try:
            self._threads.submit(stream.groups, self._listen)
            yield stream
        finally:
            for request_id in ids:
                del self._open[request_id]
                self._engine.frontend.cancel(request_id)

    def submit_quietly(self, groups: Sequence[RequestGroup], listener: Listener) -> None:
        """Submit groups that no stream sends; call `listener` on the frontend's thread when one has news."""

        def listen(group: RequestGroup) -> None:
            self._observe(group)
            listener(group)

        self._threads.submit(groups, listen)

    def send(self, event: Event) -> None:
        """Send an event to the engine's core."""
        self._threads.send(event)

    def end_all(self) -> None:
        """End all streams because the server stops."""
        for stream in set(self._open.values()):
            stream.end()

    def close(self) -> None:
        """Stop the engine's threads."""
        self._threads.stop()

    def _listen(self, group: RequestGroup) -> None:
        """Queue a group that has news, and wake the loop if it must be woken. Called on the frontend's thread."""
        self._observe(group)
        stream = self._open.get(group.request_id)
        if stream is None or (stream.is_whole and not group.output.finished):
            return
        is_urgent = group.output.finished or group.request_id not in stream.begun
        if is_urgent:
            stream.begun.add(group.request_id)
        (self._urgent if is_urgent else self._news).append(group)
        if not self._is_woken and (is_urgent or not self._is_timed):
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _observe(self, group: RequestGroup) -> None:
        """Count a group's news in the metrics."""
        try:
            self._observer.note(group)
        except Exception:  # a defect in counting must not cost the client its reply
            logger.exception("a request could not be counted")

    def _wake(self) -> None:
        """Send first tokens and ends, and other news now or at the time when they are due. Called on the loop."""
        self.num_wakes += 1
        self._is_woken = False  # first: later news wakes the loop again
        self._send_all(self._urgent)
        if not self._news or self._is_timed:
            return
        wait_s = self._due_s - time.monotonic()
        if wait_s <= 0:
            self._send_rest()
        else:
            self._is_timed = True
            self._loop.call_later(wait_s, self._send_rest)

    def _send_rest(self) -> None:
        """Send other news than first tokens and ends, and set the time before which they are not sent again."""
        self._is_timed = False  # first: see `_wake`
        began_s = time.monotonic()
        self._send_all(self._news)
        ended_s = time.monotonic()
        wait_s = min((ended_s - began_s) * (1 / MAX_WRITING - 1), LONGEST_WAIT_S)
        self._due_s = max(began_s + self.interval_s, ended_s + wait_s)

    def _send_all(self, news: deque[RequestGroup]) -> None:
        """Empty a queue of groups with news, and notify each group's stream once."""
        groups: dict[RequestGroup, None] = {}  # once each, though steps may have come faster than wakes
        while news:
            groups[news.popleft()] = None
        for group in groups:
            if (stream := self._open.get(group.request_id)) is not None:
                stream.notify(group)
