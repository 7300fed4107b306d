"""Connections between the processes of a run: followers execute the leader's messages, and all end together.

The leader sends every follower the same messages in the same order, over one connection to each. All processes send
heartbeats. A process whose connection ends, or that is silent for `SILENCE_S`, is lost together with its devices'
contents, so that the run cannot continue. The leader has `GRACE_S` to raise `PeerLostError` from a call; then it
ends, and so do the followers, which have no caller. All end with exit code `EXIT_CODE` and name the lost process.

A follower that ends in order, for example because it cannot load the model, is not reported as lost if the leader also
ends within `GRACE_S`.
"""

import atexit
import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from typing import Any, NoReturn

from jaxserve.distributed.channel import Channel
from jaxserve.errors import ConfigError, PeerLostError

BEAT_S = 1.0  # heartbeat interval
SILENCE_S = 20.0
GRACE_S = 5.0
CONNECT_S = 300.0
MAX_WELCOMED = 64  # connections that have not proved the key yet
ANSWER_POLL_S = 0.2  # time between looks for a lost process, which does not answer
LOSS_SHOWS_S = 2.0  # time from a failed collective to the end of a connection
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed next time

Address = tuple[str, int]


class _Kind:
    """First elements of messages."""

    EVENT = "event"
    VALUES = "values"  # replies of all processes, from the leader
    VALUE = "value"  # reply of a follower
    CLOSED = "closed"  # the leader has ended
    LEFT = "left"  # a follower ends in order although the leader has not closed
    LOST = "lost"  # a process was lost or has failed


def _messages(channel: Channel, name: str) -> Iterator[tuple[str, Any]]:
    """Yield kind and content of each message from a process, and LOST if it ends, is silent or cannot be read."""
    try:
        while True:
            kind, content = channel.receive()
            yield kind, content
    except Exception as error:  # any error, for example in a message of another version
        yield _Kind.LOST, f"lost {name}: {str(error) or 'its connection ended'}"


def _in_background(function: Any, *args: Any) -> threading.Thread:
    """Call a function in a new daemon thread, and return the thread."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _after_grace(function: Callable[[str], None], message: str) -> None:
    """Call a function with a message after GRACE_S seconds."""
    time.sleep(GRACE_S)
    function(message)


def _exit(message: str | None = None) -> NoReturn:
    """End this process with EXIT_CODE and a message, without waiting for devices or for jax's shutdown of the run."""
    with contextlib.suppress(Exception):
        if message is not None:
            print(f"jaxserve: error: {message}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_CODE)


class Leader:
    """Leading process, whose script makes the calls. The constructor waits until all others have connected.

    Args:
        listener: socket to which followers connect, made by `listen`.
        key: secret that all processes share.
        num_followers: number of followers.

    Raises:
        ConfigError: not all followers connected within `CONNECT_S`.
    """

    def __init__(self, listener: socket.socket, key: bytes, num_followers: int) -> None:
        self._lost: PeerLostError | None = None
        self._losing = threading.Lock()
        self._notifiers: list[threading.Thread] = []
        self._closing = False
        self._is_claimed = False
        self._loss_reported = threading.Event()  # set when a process is lost
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asking = threading.Lock()  # held until all have answered
        self._followers: dict[str, Channel] = {}  # keys: names, such as "process 1 on HOST"
        self._num_welcomed = threading.Semaphore(MAX_WELCOMED)
        joined: queue.SimpleQueue[tuple[str, Channel]] = queue.SimpleQueue()
        _in_background(self._accept, listener, key, joined)
        deadline = time.monotonic() + CONNECT_S
        try:
            while len(self._followers) < num_followers:
                name, channel = joined.get(timeout=max(0.0, deadline - time.monotonic()))
                self._followers[name] = channel
        except queue.Empty:
            raise ConfigError(
                f"all processes must reach the first one, got {len(self._followers)} of {num_followers} others within "
                f"{CONNECT_S:.0f} s; see what they say"
            ) from None
        finally:
            listener.close()
        for name, channel in self._followers.items():
            _in_background(self._listen, name, channel)
            _in_background(channel.send_heartbeats, BEAT_S)
        atexit.register(self.close)

    def _accept(self, listener: socket.socket, key: bytes, joined: "queue.SimpleQueue[tuple[str, Channel]]") -> None:
        """Accept connections until the listener is closed, and welcome each in its own thread."""
        with contextlib.suppress(OSError):  # the listener is closed when all have connected
            while True:
                endpoint = listener.accept()[0]
                if self._num_welcomed.acquire(blocking=False):
                    _in_background(self._welcome, endpoint, key, joined)
                else:
                    endpoint.close()

    def _welcome(self, endpoint: socket.socket, key: bytes, joined: "queue.SimpleQueue[tuple[str, Channel]]") -> None:
        """Authenticate a connection, and put its process's name and channel in `joined`; drop any other connection."""
        with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError):  # not a process of this run
            try:
                channel = Channel(endpoint, key, is_leader=True, silence_s=SILENCE_S)
                joined.put((str(channel.receive()), channel))
            finally:
                self._num_welcomed.release()

    def require_free(self) -> None:
        """Raise ConfigError if an engine has the followers."""
        if self._is_claimed:
            raise ConfigError("a run over many processes has one LLM; start another run for another one")

    def claim(self) -> None:
        """Reserve the followers for an engine after all processes have agreed on its options."""
        self._is_claimed = True

    def tell(self, event: Any) -> None:
        """Send an event, a JSON value, to all followers, in the order of calls."""
        self.check()
        self._send(_Kind.EVENT, event)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, the leader first; every process must call this at the same point."""
        values = [value, *(self._answers.get() for _ in self._followers)]
        self.check()
        self._send(_Kind.VALUES, values)
        return values

    def ask(self, event: Any) -> list[Any]:
        """Send an event to all followers, which each answers at some time; return the answers. For any thread."""
        with self._asking:
            self.tell(event)
            return [self._next_answer() for _ in self._followers]

    def _next_answer(self) -> Any:
        """Wait for a follower's answer; PeerLostError if a process is lost meanwhile."""
        while True:
            self.check()
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=ANSWER_POLL_S)

    def check(self) -> None:
        """Raise PeerLostError if a process was lost."""
        if self._lost is not None:
            raise self._lost

    def fail(self, reason: str) -> None:
        """Give up after a failure in this process; PeerLostError if a lost process is the cause."""
        self._loss_reported.wait(LOSS_SHOWS_S)
        self.check()
        self._lose(f"process 0 failed: {reason}")

    def close(self) -> None:
        """Let the followers end; has no effect the second time."""
        if not self._closing and self._lost is None:
            self._closing = True
            self._send(_Kind.CLOSED)

    def _send(self, kind: str, content: Any = None) -> None:
        """Send a message to all followers; one that cannot be reached is lost."""
        for name, channel in self._followers.items():
            try:
                channel.send([kind, content])
            except OSError as error:
                self._lose(f"lost {name}: it takes nothing any more ({error})")

    def _listen(self, name: str, channel: Channel) -> None:
        """Take a follower's messages until it is lost."""
        for kind, content in _messages(channel, name):
            if kind == _Kind.LOST:
                self._lose(str(content))
                return
            if kind == _Kind.LEFT:
                _in_background(_after_grace, self._lose, f"lost {name}: it has ended; see its log")
            else:
                self._answers.put(content)

    def _lose(self, message: str) -> None:
        """Report a lost process: notify the followers, let calls raise PeerLostError, and exit after GRACE_S."""
        with self._losing:
            if self._closing or self._lost is not None:
                return
            self._notifiers = [_in_background(_report_loss, each, message) for each in self._followers.values()]
            _in_background(_after_grace, _exit, message)
            atexit.register(self._exit_when_reported)  # runs before jax waits for the remaining processes
            self._lost = PeerLostError(message)
        self._loss_reported.set()

    def _exit_when_reported(self) -> NoReturn:
        """Exit after all followers are notified; otherwise they would report the end of this process."""
        for thread in self._notifiers:
            thread.join()
        _exit()


def _report_loss(channel: Channel, message: str) -> None:
    """Send the message about a lost or failed process, if the other side still receives."""
    with contextlib.suppress(OSError):
        channel.send([_Kind.LOST, message])


class Follower:
    """Following process, which executes the leader's messages.

    Args:
        address: address that the leader listens at.
        key: secret that all processes share.
        process_id: index of this process.
        host: name of this process's host, for messages.

    Attributes:
        name: name of this process, for messages.
    """

    def __init__(self, address: Address, key: bytes, process_id: int, host: str) -> None:
        endpoint = socket.create_connection(address, timeout=CONNECT_S)
        self._channel = Channel(endpoint, key, is_leader=False, silence_s=SILENCE_S)
        self.name, self._leader_name = f"process {process_id} on {host}", f"process 0 at {address[0]}"
        self._channel.send(self.name)
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        _in_background(self._listen)
        _in_background(self._channel.send_heartbeats, BEAT_S)
        atexit.register(self._leave)

    def require_free(self) -> None:
        """Do nothing: the leader has one engine, and so has this process."""

    def claim(self) -> None:
        """Do nothing: the leader has one engine, and so has this process."""

    def tell(self, event: Any) -> None:
        """Do nothing: only the leader sends events."""

    def events(self) -> Iterator[Any]:
        """Yield the leader's events until it closes."""
        while (message := self._events.get())[0] != _Kind.CLOSED:
            yield message[1]

    def answer(self, value: Any) -> None:
        """Answer an event that the leader has asked; callable from any thread."""
        with contextlib.suppress(OSError):  # the listening thread ends this process
            self._channel.send([_Kind.VALUE, value])

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, the leader first; every process must call this at the same point."""
        self._channel.send([_Kind.VALUE, value])
        kind, values = self._events.get()
        if kind == _Kind.CLOSED:  # the leader could not start
            sys.exit(0)
        return list(values)

    def fail(self, reason: str) -> NoReturn:
        """Give up: send the leader the reason and end; if another process was lost, report that as the reason."""
        time.sleep(LOSS_SHOWS_S)
        message = f"{self.name} failed: {reason}"
        _report_loss(self._channel, message)
        _exit(message)

    def _listen(self) -> None:
        """Put the leader's messages in the queue until it closes; end this process if a process is lost."""
        for kind, content in _messages(self._channel, self._leader_name):
            if kind == _Kind.LOST:
                if not self._is_closed.is_set():
                    _exit(str(content))
                return
            if kind == _Kind.CLOSED:
                self._is_closed.set()
            self._events.put((kind, content))

    def _leave(self) -> None:
        """Leave the run at exit; jax's own shutdown waits for the other processes and crashes without them."""
        if not self._is_closed.is_set():
            with contextlib.suppress(OSError):
                self._channel.send([_Kind.LEFT, None])
            self._is_closed.wait()  # unless the listening thread ends this process


def listen(host: str) -> socket.socket:
    """Return a listening socket at a free port of the address `host`, and at no other address."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)
