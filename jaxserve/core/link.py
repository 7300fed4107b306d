"""Link: the process of a core, the pipe to it, and the thread that serves the pipe.

Only that thread, which no interrupt of a caller reaches, reads and writes the pipe. All others queue events and calls
for it, and wake it.
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
import weakref
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from jaxserve.api.metrics import EngineStats, Occupancy, StepStats
from jaxserve.core import process_messages
from jaxserve.core.core_thread import MAX_DELTAS
from jaxserve.core.deltas import Delta
from jaxserve.core.events import Event, Submitted
from jaxserve.core.process_messages import Failed, FromCore, HostCall, Logged, Reply, SentEvent, Start, Started, ToCore
from jaxserve.core.status import CoreStatus, MemoryState
from jaxserve.errors import ConfigError, EngineDiedError, RequestError
from jaxserve.system.environment import child_variables

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

END_S = 10.0  # time for the process to end after its pipe is closed
MAX_STEPS = 256  # maximum step statistics kept for the engine's driver


class Link:
    """A core's process, its pipe and the pipe's thread; drives the core like `CoreThread`.

    Attributes:
        outbox: received deltas.
        stats: totals as of the core's last message.
        steps: statistics of the latest steps, taken by the engine's driver.
        status: core status in the last message.
        started: first message from the core.
        error: reason why the process has ended; None while it runs.
        num_untaken_tokens: prompt tokens in events that the core has not taken yet, as far as known.
    """

    status = CoreStatus(0, False, Occupancy(0, 0, 0, 0), 0, None, MemoryState(), False)
    started: Started

    def __init__(self) -> None:
        self.outbox: deque[Delta | BaseException] = deque()
        self.stats = EngineStats()
        self.steps: deque[StepStats] = deque(maxlen=MAX_STEPS)
        self.error: BaseException | None = None
        self.num_untaken_tokens = 0
        self._untaken: deque[int] = deque()  # prompt tokens of each untaken event
        self._events: deque[tuple[int, SentEvent]] = deque()  # events to send, each after its number of prompt tokens
        self._calls: deque[tuple[int, bytes]] = deque()  # pickled `HostCall`s to send, each after its reply's number
        self._replies: dict[int, SimpleQueue[Reply]] = {}
        self._numbers = itertools.count()
        self._news: SimpleQueue[None] = SimpleQueue()
        self._ready: SimpleQueue[None] = SimpleQueue()  # filled when the core has started or failed
        self._num_received = self._num_acknowledged = 0  # number of deltas
        self._is_paused = self._is_ending = False
        self._is_over = False  # True once the outbox holds the process's end, for threads that wait for deltas
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._process: subprocess.Popen[bytes]
        self._connection: Connection
        _links.add(self)

    def launch(self, start: Start) -> None:
        """Start the core's process and the pipe's thread, and wait until the core is ready; raise any error from its
        start.
        """
        try:
            data = process_messages.encode(start)
        except RequestError as error:
            raise ConfigError(f"engine_process must be False with these options: {error}") from error
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxserve.assembly.core_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=child_variables(PYTHONPATH=path),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's interrupt is meant for this process
            )
        threading.Thread(target=self._run, args=(data,), name="jaxserve pipe", daemon=True).start()
        self._ready.get()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the process by closing the pipe, or by force. Callable from any thread, even the pipe's."""
        self._is_ending = True
        self._wake()
        process = getattr(self, "_process", None)
        if process is None:
            self._close()
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def forget(self) -> None:
        """Close this side of the pipe and refuse all calls; for a fork of the process that has started the core's."""
        if not hasattr(self, "_process"):
            return
        self._is_ending = self._is_over = True
        self.error = EngineDiedError(
            "an engine with engine_process serves the process that has started it, got a fork of that; start one here"
        )
        del self._process
        self._close()  # otherwise the engine's process would not notice the end of its own client

    # Called from any thread, and interruptible anywhere

    def send(self, event: Event) -> None:
        """Queue an event for the core; RequestError if it cannot be sent."""
        num_tokens = 0
        if isinstance(event, Submitted):
            num_tokens = sum(request.num_prompt_tokens for request in event.requests)
        self._events.append((num_tokens, process_messages.encode_event(event)))
        self._wake()
        if self.error is not None and isinstance(event, Submitted):  # nothing else reports the end of the process
            self.outbox.append(self.error)

    def call(self, name: str, *args: Any) -> Any:
        """Call a host method and return its result, or raise its exception."""
        value, error = self.ask(name, *args).get()[1:]
        if error is not None:
            raise error
        return value

    def ask(self, name: str, *args: Any) -> SimpleQueue[Reply]:
        """Start a call of a host method; return the queue that gets its reply. RequestError if it cannot be sent."""
        data = process_messages.encode(HostCall(name, args))
        number, reply = next(self._numbers), SimpleQueue[Reply]()
        self._replies[number] = reply
        self._calls.append((number, data))
        self._wake()
        if self.error is not None:  # the thread may have ended before
            self._replies.pop(number, None)
            raise EngineDiedError(str(self.error))
        return reply

    def _wake(self) -> None:
        """Make the thread send new events and calls."""
        with contextlib.suppress(OSError):  # a full socket wakes it as well; or it is closed
            self._wake_sender.send(b"x")

    # Interface of `CoreThread`

    def start(self) -> None:
        """Do nothing: the process drives its own core."""

    def has_work(self) -> bool:
        """Return whether deltas may still come."""
        return not self._is_over and (self.num_untaken > 0 or self.status.has_work)

    @property
    def num_untaken(self) -> int:
        """Number of events that the core has not taken yet, as far as known."""
        return 0 if self._is_over else len(self._untaken) + len(self._events)

    @property
    def is_running(self) -> bool:
        """True if deltas may come and are waited for."""
        return self.has_work() and not self._is_paused

    def wait(self, timeout_s: float | None) -> None:
        """Report taken deltas, so that the core continues, and wait for a message, for at most `timeout_s` seconds."""
        if self._num_received - len(self.outbox) - self._num_acknowledged >= MAX_DELTAS // 2:
            self._wake()
        with contextlib.suppress(Empty):
            self._news.get(timeout=timeout_s)

    def pause(self) -> None:
        """Make `is_running` False and wake `wait`, until `resume`; the core itself continues."""
        self._is_paused = True
        self._notify()

    def resume(self) -> None:
        """End the effect of `pause`."""
        self._is_paused = False

    def _notify(self) -> None:
        """Make the current or next call of `wait` return."""
        if self._news.empty():  # messages may come in any number while no thread waits
            self._news.put(None)

    # The pipe's thread

    def _run(self, start: bytes) -> None:
        """Send the pickled `Start`, then exchange messages until the pipe is closed.

        This is the body of the pipe's thread.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake_receiver, select.POLLIN)
        wake_handle = self._wake_receiver.fileno()
        try:
            self._connection.send_bytes(start)
            while not self._is_ending:
                for handle, _ in poll.poll():
                    if handle == wake_handle:
                        self._wake_receiver.recv(4096)
                        self._send()
                    else:
                        self._take(process_messages.receive(self._connection))
        except (EOFError, OSError):
            pass
        except BaseException as error:
            logging.getLogger(__name__).exception("the engine's process is given up: a message could not be taken")
            self._process.kill()
            self.error = EngineDiedError(f"the engine's process was ended, as a message could not be taken: {error}")
        self._end_all(self.error or self._death())

    def _send(self) -> None:
        """Send queued events, the number of delivered deltas, and the oldest queued call, once the core has started."""
        if not hasattr(self, "started"):
            return
        num_delivered = self._num_received - len(self.outbox)
        events = []
        while self._events:
            num_tokens, event = self._events[0]
            self._untaken.append(num_tokens)  # first, because `has_work` does not know of it before
            self.num_untaken_tokens += num_tokens
            events.append(event)
            self._events.popleft()
        number, call = self._calls.popleft() if self._calls else (None, b"")
        if events or number is not None or num_delivered - self._num_acknowledged >= MAX_DELTAS // 2:
            self._num_acknowledged = num_delivered
            process_messages.send(self._connection, ToCore(events, num_delivered, number))
            if number is not None:
                self._connection.send_bytes(call)
        if self._calls:
            self._wake()

    def _take(self, message: FromCore | Started | Failed | Logged) -> None:
        """Handle a message from the core's process."""
        match message:
            case FromCore(deltas, status, stats, steps, reply):
                process_messages.set_stats(self.stats, stats)
                self.steps.extend(StepStats(*step) for step in steps)
                self.outbox.extend(map(process_messages.unpack_delta, deltas))
                self._num_received += len(deltas)
                num_taken = status.num_taken - self.status.num_taken
                self.status = status  # first: until then, `has_work` counts the untaken events
                for _ in range(num_taken):
                    self.num_untaken_tokens -= self._untaken.popleft()
                if reply is not None and (waiting := self._replies.pop(reply.number, None)) is not None:
                    waiting.put(reply)
                self._notify()
            case Started():
                self.started = message
                self._ready.put(None)
                self._wake()
            case Failed(error):
                self.error = error
                self._is_ending = True
            case Logged(record):
                made = logging.makeLogRecord(record)
                if (logger := logging.getLogger(made.name)).isEnabledFor(made.levelno):
                    logger.handle(made)

    def _death(self) -> EngineDiedError:
        """Wait for the process to end; return an error that reports how it ended."""
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
        message = f"the engine's process has ended {how}: no requests are served; start another engine"
        logging.getLogger(__name__).error("%s", message)
        return EngineDiedError(message)

    def _end_all(self, error: BaseException) -> None:
        """Pass the process's end to the outbox, the status and all waiting threads, and close the pipe."""
        self.error = error
        self.outbox.append(error)  # `send` does the same from now on
        self._is_over = True
        empty = Occupancy(0, 0, 0, self.status.occupancy.num_pages)  # otherwise a server might find its queue full
        self.status = self.status._replace(has_work=False, occupancy=empty, num_waiting_tokens=0)
        self.num_untaken_tokens = 0
        self._ready.put(None)
        for number, waiting in list(self._replies.items()):
            waiting.put(Reply(number, None, EngineDiedError(str(error))))
        self._notify()
        self._close()

    def _close(self) -> None:
        for end in (getattr(self, "_connection", self._wake_receiver), self._wake_receiver, self._wake_sender):
            end.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_all() -> None:
    for link in list(_links):
        link.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
