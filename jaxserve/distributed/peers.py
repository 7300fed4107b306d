"""Connections between the processes of one run: followers execute the leader's messages, and all end together.

The leader sends every follower the same messages in the same order, over one connection to each. All processes send
heartbeats. A process whose connection ends, or that is silent for `SILENCE_S`, is lost together with the contents of
its devices, so that the run cannot continue. The leader has `GRACE_S` to raise `PeerLostError` from a call; then it
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
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from typing import Any, NoReturn

from jaxserve.distributed.channel import Channel
from jaxserve.errors import ConfigError, PeerLostError

BEAT_S = 1.0  # interval of heartbeats
SILENCE_S = 20.0
GRACE_S = 5.0
CONNECT_S = 300.0
MAX_WELCOMED = 64  # connections that have not proved the key yet
LOSS_SHOWS_S = 2.0  # time from the failure of a collective to the end of a connection
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


class _Link:
    """Connection to one other process. Several threads may send; one thread listens.

    Neither direction waits more than `SILENCE_S` within a message: a process that is silent for longer is lost.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self.name = name
        self._channel = channel

    def send(self, kind: str, content: Any = None) -> None:
        """Send a message; OSError if the other process is gone or does not receive."""
        self._channel.send([kind, content])

    def beat(self) -> None:
        """Send heartbeats until the other process is gone; the listening thread reports the loss."""
        with contextlib.suppress(OSError):
            while True:
                self._channel.beat()
                time.sleep(BEAT_S)

    def listen(self) -> Iterator[tuple[str, Any]]:
        """Yield kind and content of the other process's messages; LOST if it ends, is silent or cannot be read."""
        try:
            while self._channel.poll(SILENCE_S):
                if (message := self._channel.receive()) is not None:
                    kind, content = message
                    yield kind, content
            reason = f"it was silent for {SILENCE_S:.0f} s"
        except Exception as error:  # any error, for example in a message of another version
            reason = f"its connection ended{f' ({error})' if str(error) else ''}"
        yield _Kind.LOST, f"lost {self.name}: {reason}"


def _in_background(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _exit(message: str | None = None) -> NoReturn:
    """End at once, without waiting for devices or for jax's own shutdown of the run."""
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
        key: shared secret of the run.
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
        self._links: list[_Link] = []
        self._num_welcomed = threading.Semaphore(MAX_WELCOMED)
        joined: queue.SimpleQueue[_Link] = queue.SimpleQueue()
        _in_background(self._accept, listener, key, joined)
        deadline = time.monotonic() + CONNECT_S
        try:
            while len(self._links) < num_followers:
                self._links.append(joined.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            raise ConfigError(
                f"all processes must reach the first one, got {len(self._links)} of {num_followers} others within "
                f"{CONNECT_S:.0f} s; see what they say"
            ) from None
        finally:
            listener.close()
        for link in self._links:
            _in_background(self._listen, link)
            _in_background(link.beat)
        atexit.register(self.close)

    def _accept(self, listener: socket.socket, key: bytes, joined: "queue.SimpleQueue[_Link]") -> None:
        with contextlib.suppress(OSError):  # the listener is closed when all have connected
            while True:
                endpoint, places = listener.accept()[0], self._num_welcomed
                if places.acquire(blocking=False):
                    _in_background(self._welcome, endpoint, key, joined)
                else:
                    endpoint.close()

    def _welcome(self, endpoint: socket.socket, key: bytes, joined: "queue.SimpleQueue[_Link]") -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, AuthenticationError):  # not a process of this run
            try:
                channel = Channel(endpoint, key, is_leader=True, timeout_s=SILENCE_S)
                joined.put(_Link(channel, str(channel.receive())))
            finally:
                self._num_welcomed.release()

    def require_free(self) -> None:
        """Raise ConfigError if an engine has the followers."""
        if self._is_claimed:
            raise ConfigError("a run over many processes has one LLM; start another run for another one")

    def claim(self) -> None:
        """Reserve the followers for an engine, on whose options all processes have agreed."""
        self._is_claimed = True

    def tell(self, event: Any) -> None:
        """Send an event, a value of JSON, to all followers, in the order of calls."""
        self.check()
        self._send(_Kind.EVENT, event)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, the leader first; every process must call this at the same point."""
        values = [value, *(self._answers.get() for _ in self._links)]
        self.check()
        self._send(_Kind.VALUES, values)
        return values

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
        for link in self._links:
            try:
                link.send(kind, content)
            except OSError as error:
                self._lose(f"lost {link.name}: it takes nothing any more ({error})")

    def _listen(self, link: _Link) -> None:
        for kind, content in link.listen():
            if kind == _Kind.LOST:
                self._lose(str(content))
                return
            if kind == _Kind.LEFT:
                _in_background(self._lose_after_grace, f"lost {link.name}: it has ended; see what it said")
            else:
                self._answers.put(content)

    def _lose_after_grace(self, message: str) -> None:
        time.sleep(GRACE_S)
        self._lose(message)

    def _lose(self, message: str) -> None:
        with self._losing:
            if self._closing or self._lost is not None:
                return
            self._notifiers = [_in_background(self._report_loss, link, message) for link in self._links]
            _in_background(self._exit_after_grace, message)
            atexit.register(self._exit_when_reported)  # runs before jax waits for the remaining processes
            self._lost = PeerLostError(message)
        self._loss_reported.set()

    def _report_loss(self, link: _Link, message: str) -> None:
        with contextlib.suppress(OSError):
            link.send(_Kind.LOST, message)

    def _exit_when_reported(self) -> NoReturn:
        """Exit after all followers are notified; else they would take the end of this process for the loss."""
        for thread in self._notifiers:
            thread.join()
        _exit()

    def _exit_after_grace(self, message: str) -> NoReturn:
        time.sleep(GRACE_S)
        _exit(message)


class Follower:
    """Following process, which executes the leader's messages.

    Args:
        address: address of the leader's listener.
        key: shared secret of the run.
        process_id: index of this process.
        host: name of its host, for messages.
    """

    def __init__(self, address: Address, key: bytes, process_id: int, host: str) -> None:
        endpoint = socket.create_connection(address, timeout=CONNECT_S)
        channel = Channel(endpoint, key, is_leader=False, timeout_s=SILENCE_S)
        self._name = f"process {process_id} on {host}"
        channel.send(self._name)
        self._link = _Link(channel, f"process 0 at {address[0]}")
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        _in_background(self._listen)
        _in_background(self._link.beat)
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

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, the leader first; every process must call this at the same point."""
        self._link.send(_Kind.VALUE, value)
        kind, values = self._events.get()
        if kind == _Kind.CLOSED:  # the leader could not start
            sys.exit(0)
        return list(values)

    def fail(self, reason: str) -> NoReturn:
        """Give up: send the leader the reason and end; if another process was lost, report that as the reason."""
        time.sleep(LOSS_SHOWS_S)
        message = f"{self._name} failed: {reason}"
        with contextlib.suppress(OSError):
            self._link.send(_Kind.LOST, message)
        _exit(message)

    def _listen(self) -> None:
        for kind, content in self._link.listen():
            if kind == _Kind.LOST:
                if not self._is_closed.is_set():
                    _exit(str(content))
                return
            if kind == _Kind.CLOSED:
                self._is_closed.set()
            self._events.put((kind, content))

    def _leave(self) -> None:
        """Leave the run at exit; jax itself would wait for the other processes and crash if they do not come."""
        if not self._is_closed.is_set():
            with contextlib.suppress(OSError):
                self._link.send(_Kind.LEFT)
            self._is_closed.wait()  # unless the listening thread ends this process


def listen(host: str) -> socket.socket:
    """Open the listener for followers on a free port of an address of this host, and of no other address."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)
