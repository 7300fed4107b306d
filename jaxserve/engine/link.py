"""Link: the process of a core, the pipe to it and the thread that serves the pipe.

That thread alone, which no interrupt of a caller reaches, reads and writes the pipe: everybody else leaves events and
calls for it, and wakes it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from jaxserve.engine import messages
from jaxserve.engine.core_thread import MAX_DELTAS
from jaxserve.engine.deltas import Delta, Ended
from jaxserve.engine.events import Cancelled, Event, Submitted
from jaxserve.engine.messages import Call, Failed, Formed, FromCore, Logged, Reply, Start, Started, ToCore
from jaxserve.engine.status import CoreStatus, MemoryState
from jaxserve.environment import child_variables
from jaxserve.errors import EngineDiedError, RequestError
from jaxserve.metrics import EngineStats, Occupancy, StepStats
from jaxserve.request import FinishReason

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

END_S = 10.0  # time that the process has to end once its pipe is closed
MOST_STEPS = 256  # statistics of steps that are kept for who drives the engine


class Link:
    """The process, the pipe to it and the thread that serves the pipe; a driver of a core as `CoreThread` is.

    Attributes:
        outbox: deltas that have come.
        stats: totals; those of the core as they were with the last message.
        last_steps: statistics of the latest steps.
        status: status of the core with the last message.
        started: first message of the core.
        error: reason why the process has ended; None as long as it runs.
        num_untaken_tokens: tokens of the prompts of events that the core has not taken, as far as is known.
    """

    status = CoreStatus(0, False, Occupancy(0, 0, 0, 0), 0, None, MemoryState(), False)
    started: Started

    def __init__(self) -> None:
        self.outbox: deque[Delta | BaseException] = deque()
        self.stats = EngineStats()
        self.last_steps: deque[StepStats] = deque(maxlen=MOST_STEPS)
        self.error: BaseException | None = None
        self.num_untaken_tokens = 0
        self._untaken: deque[int] = deque()  # tokens of the prompts of each of these events
        self._events: deque[Event] = deque()  # waiting to be sent, as are these calls
        self._calls: deque[Call] = deque()
        self._replies: dict[int, SimpleQueue[Reply]] = {}
        self._numbers = itertools.count()
        self._news: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[None] = SimpleQueue()  # told once the core has started, or cannot
        self._num_received = self._num_acknowledged = 0  # deltas
        self._is_paused = self._is_ending = False
        self._waker, self._wakes = socket.socketpair()
        self._waker.setblocking(False)
        self._process: subprocess.Popen[bytes]
        self._connection: Connection

    def launch(self, start: Start) -> None:
        """Start process and thread, and wait for the core; raise whatever has kept it from starting."""
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxserve.engine.core_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=child_variables(PYTHONPATH=path),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's interrupt is for this process
            )
        threading.Thread(target=self._run, args=(start,), name="jaxserve pipe", daemon=True).start()
        self._ready.get()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the process, by closing the pipe or else by force. From any thread, the pipe's too."""
        self._is_ending = True
        self._wake()
        process = getattr(self, "_process", None)
        if process is None:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # From any thread, which an interrupt may stop anywhere

    def send(self, event: Event) -> None:
        """Leave an event for the core."""
        self._events.append(event)
        self._wake()
        if self.error is not None and isinstance(event, Submitted):  # nobody else tells of its end
            self.outbox.append(self.error)

    def call(self, name: str, *args: Any, most_s: float | None = None) -> Any:
        """Call a method of the host and return its result, or raise its exception; Empty if that takes too long."""
        number, reply = next(self._numbers), SimpleQueue[Reply]()
        self._replies[number] = reply
        self._calls.append(Call(number, name, args))
        self._wake()
        if self.error is not None:  # the thread may have ended before
            self._replies.pop(number, None)
            raise EngineDiedError(str(self.error))
        value, error = reply.get(timeout=most_s)[1:]
        if error is not None:
            raise error
        return value

    def _wake(self) -> None:
        """Have the thread look for what there is to send."""
        with contextlib.suppress(OSError):  # full, which wakes it as well; or closed
            self._waker.send(b"x")

    # As `CoreThread`

    def start(self) -> None:
        """Do nothing: the process drives its core by itself."""

    def has_work(self) -> bool:
        """Return whether deltas may come."""
        return self.error is None and (self.num_untaken > 0 or self.status.has_work)

    @property
    def num_untaken(self) -> int:
        """Events that the core has not taken, as far as is known."""
        return len(self._untaken) + len(self._events)

    @property
    def is_running(self) -> bool:
        """True if deltas may come that somebody waits for."""
        return self.has_work() and not self._is_paused

    def wait(self, most_s: float | None) -> None:
        """Wait for a message, for at most some seconds."""
        if self._num_received - len(self.outbox) - self._num_acknowledged >= MAX_DELTAS // 2:
            self._wake()
        with contextlib.suppress(Empty):
            self._news.get(timeout=most_s)

    def pause(self) -> None:
        """Have nobody wait for deltas until `resume`; the core goes on as far as it may."""
        self._is_paused = True
        self._news.put(None)

    def resume(self) -> None:
        """Let deltas be waited for."""
        self._is_paused = False

    # The thread of the pipe

    def _run(self, start: Start) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        wakes = self._wakes.fileno()
        try:
            messages.send(self._connection, start)
            while not self._is_ending:
                for handle, _ in poll.poll():
                    if handle == wakes:
                        self._wakes.recv(4096)
                        self._send()
                    else:
                        self._take(messages.receive(self._connection))
        except (EOFError, OSError):
            pass
        except BaseException:
            logging.getLogger(__name__).exception("the engine's process is given up: a message could not be taken")
        self._end_all(self.error or self._death())

    def _send(self) -> None:
        if not hasattr(self, "started"):
            return
        num_delivered = self._num_received - len(self.outbox)
        events = []
        while self._events:
            event = self._events[0]
            num_tokens = 0
            if isinstance(event, Submitted):
                num_tokens = sum(request.num_prompt_tokens for request in event.requests)
            self._untaken.append(num_tokens)
            self.num_untaken_tokens += num_tokens
            events.append(messages.formed(self._events.popleft()))
        call = self._calls.popleft() if self._calls else None
        if events or call is not None or num_delivered - self._num_acknowledged >= MAX_DELTAS // 2:
            self._num_acknowledged = num_delivered
            try:
                data = messages.encoded(ToCore(events, num_delivered, call))
            except RequestError as error:
                if call is not None:
                    self._reply(Reply(call.number, None, error))
                data = messages.encoded(ToCore([self._sendable(event) for event in events], num_delivered))
            self._connection.send_bytes(data)
        if self._calls:
            self._wake()

    def _sendable(self, event: Event | Formed) -> Event | Formed:
        """Return an event; one that cannot be sent ends its requests, which leaves their cancel in its place."""
        if not isinstance(event, Submitted | Formed):
            return event
        try:
            messages.encoded(event)
        except RequestError as error:
            keys = [request.key for request in event.requests]
            ended = [Ended(key, FinishReason.ABORT) for key in keys]
            self.outbox.append(Delta(time.monotonic(), ended=ended, error=error))
            self._news.put(None)
            return Cancelled(keys, FinishReason.ABORT)
        return event

    def _reply(self, reply: Reply) -> None:
        if (waiting := self._replies.pop(reply.number, None)) is not None:
            waiting.put(reply)

    def _take(self, message: FromCore | Started | Failed | Logged) -> None:
        match message:
            case FromCore(deltas, status, stats, steps, reply):
                messages.take_stats(self.stats, stats)
                self.last_steps.extend(StepStats(*step) for step in steps)
                self.outbox.extend(messages.unpacked(delta) for delta in deltas if delta is not None)
                self._num_received += len(deltas)
                for _ in range(status.num_taken - self.status.num_taken):
                    self.num_untaken_tokens -= self._untaken.popleft()
                self.status = status
                if reply is not None:
                    self._reply(reply)
                self._news.put(None)
            case Started():
                self.started = message
                self._ready.put(None)
                self._wake()
            case Failed(error):
                self.error = error
                self._is_ending = True
            case Logged(record):
                made = logging.makeLogRecord(record)
                logging.getLogger(made.name).handle(made)

    def _death(self) -> EngineDiedError:
        """Return the error of a process that has ended, or that ends."""
        if self._is_ending:
            return EngineDiedError("the engine's process was ended; start another engine")
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"with exit code {code}"
        if code < 0:
            how = f"by {signal.Signals(-code).name}" + (", as if memory were short" if code == -signal.SIGKILL else "")
        return EngineDiedError(f"the engine's process has ended {how}: no requests are served; start another engine")

    def _end_all(self, error: BaseException) -> None:
        """Tell everybody who waits that nothing comes any more."""
        self.error = error
        self.outbox.append(error)
        self._ready.put(None)
        for number, waiting in list(self._replies.items()):
            waiting.put(Reply(number, None, EngineDiedError(str(error))))
        self._news.put(None)
        self._connection.close()
        self._wakes.close()
        self._waker.close()
