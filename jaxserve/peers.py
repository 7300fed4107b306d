"""The processes of one run: one leads, the others follow what it tells them, and none outlives another.

The leader tells every follower the same things in the same order, over a connection of its own to each. All send signs
of life. Whoever's connection ends, or who is silent for `SILENCE_S`, is lost, and with it what its devices hold: nobody
can go on. The leader has `GRACE_S` to raise `PeerLostError` where it is called; then it ends, and so do the others,
which have nobody to raise anything to. All with exit code `EXIT_CODE`, and naming the one that was lost.

A follower that ends in good order, for what it cannot load, say, is no loss if the leader does so too within `GRACE_S`.
"""

import atexit
import contextlib
import os
import pickle
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NoReturn

from jaxserve.errors import ConfigError, PeerLostError

BEAT_S = 1.0  # between signs of life
SILENCE_S = 20.0
GRACE_S = 5.0
CONNECT_S = 300.0
LOSS_SHOWS_S = 2.0  # from a collective that fails to a connection that ends
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed next time

_BEAT = b""
Address = tuple[str, int]


@dataclass(frozen=True)
class _Closed:
    """The leader has nothing more to tell."""


@dataclass(frozen=True)
class _Left:
    """A follower ends in good order, although the leader has not closed."""


@dataclass(frozen=True)
class _Lost:
    """A process was lost, or has failed."""

    message: str


class _Link:
    """A connection to one other process. Sending is safe from several threads; one thread listens.

    Neither waits for more than `SILENCE_S` within a message: whoever takes or sends nothing for so long is gone.
    """

    def __init__(self, connection: "Connection[Any, Any]", name: str) -> None:
        self.name = name
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        """OSError if the other is gone, or takes nothing."""
        with self._sending:
            self._connection.send_bytes(message)

    def beat(self) -> None:
        """Give signs of life until the other is gone, of which whoever listens to it knows more."""
        with contextlib.suppress(OSError):
            while True:
                self.send(_BEAT)
                time.sleep(BEAT_S)

    def listen(self) -> Iterator[Any]:
        """What the other sends; ends when it goes away, falls silent or cannot be read, with the reason as a _Lost."""
        try:
            while self._connection.poll(SILENCE_S):
                if (message := self._connection.recv_bytes()) != _BEAT:
                    yield pickle.loads(message)
            reason = f"it was silent for {SILENCE_S:.0f} s"
        except Exception as error:  # of whatever kind: a message of another version, say
            reason = f"its connection ended{f' ({error})' if str(error) else ''}"
        yield _Lost(f"lost {self.name}: {reason}")


def _connection(endpoint: socket.socket) -> "Connection[Any, Any]":
    endpoint.setblocking(True)
    wait = struct.pack("ll", int(SILENCE_S), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        endpoint.setsockopt(socket.SOL_SOCKET, option, wait)
    endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(endpoint.detach())


def _in_background(function: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _exit(message: str | None = None) -> NoReturn:
    """End now, whatever waits for the devices and however jax would like to take leave of its peers."""
    with contextlib.suppress(Exception):
        if message is not None:
            print(f"jaxserve: error: {message}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(EXIT_CODE)


class Leader:
    """The process that is called. Waits until all others have connected.

    Args:
        listener: to which they connect, made by `listen`.
        key: that they have.
        num_followers: how many there are.

    Raises:
        ConfigError: they did not come within `CONNECT_S`.
    """

    def __init__(self, listener: socket.socket, key: bytes, num_followers: int) -> None:
        self._lost: PeerLostError | None = None
        self._losing = threading.Lock()
        self._telling: list[threading.Thread] = []
        self._closing = False
        self._is_claimed = False
        self._told = threading.Event()  # that somebody is lost
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._links: list[_Link] = []
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
        with contextlib.suppress(OSError):  # it is closed when all have come
            while True:
                _in_background(self._welcome, _connection(listener.accept()[0]), key, joined)

    def _welcome(self, connection: "Connection[Any, Any]", key: bytes, joined: "queue.SimpleQueue[_Link]") -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError):  # a stranger
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            joined.put(_Link(connection, connection.recv()))

    def claim(self) -> None:
        """Take the followers for an engine; ConfigError if another one has them."""
        if self._is_claimed:
            raise ConfigError("a run over many processes has one LLM; start another run for another one")
        self._is_claimed = True

    def tell(self, event: object) -> None:
        """Send something to all followers, in the order of calls."""
        self.check()
        self._send(pickle.dumps(event))

    def exchange(self, value: Any) -> list[Any]:
        """What all processes bring, the leader first; every one of them calls it at the same point."""
        values = [value, *(self._answers.get() for _ in self._links)]
        self.tell(values)
        return values

    def check(self) -> None:
        """Raise PeerLostError if a process was lost."""
        if self._lost is not None:
            raise self._lost

    def fail(self, reason: str) -> None:
        """Give up, as this process has not done what it told the others; PeerLostError if one is lost, which is why."""
        self._told.wait(LOSS_SHOWS_S)
        self.check()
        self._lose(f"process 0 failed: {reason}")

    def close(self) -> None:
        """Let the followers end; does nothing the second time."""
        if not self._closing and self._lost is None:
            self._closing = True
            self._send(pickle.dumps(_Closed()))

    def _send(self, message: bytes) -> None:
        for link in self._links:
            try:
                link.send(message)
            except OSError as error:
                self._lose(f"lost {link.name}: it takes nothing any more ({error})")

    def _listen(self, link: _Link) -> None:
        for message in link.listen():
            if isinstance(message, _Lost):
                self._lose(message.message)
                return
            if isinstance(message, _Left):
                _in_background(self._lose_after_grace, f"lost {link.name}: it has ended; see what it said")
            else:
                self._answers.put(message)

    def _lose_after_grace(self, message: str) -> None:
        time.sleep(GRACE_S)
        self._lose(message)

    def _lose(self, message: str) -> None:
        with self._losing:
            if self._closing or self._lost is not None:
                return
            self._telling = [_in_background(self._tell_of_loss, link, message) for link in self._links]
            _in_background(self._exit_after_grace, message)
            atexit.register(self._exit_when_told)  # runs before jax waits for those that are left
            self._lost = PeerLostError(message)
        self._told.set()

    def _tell_of_loss(self, link: _Link, message: str) -> None:
        with contextlib.suppress(OSError):
            link.send(pickle.dumps(_Lost(message)))

    def _exit_when_told(self) -> NoReturn:
        """Else the others would take the end of this process for the loss."""
        for thread in self._telling:
            thread.join()
        _exit()

    def _exit_after_grace(self, message: str) -> NoReturn:
        time.sleep(GRACE_S)
        _exit(message)


class Follower:
    """A process that does what the leader tells it.

    Args:
        address: of the leader's listener.
        key: that it shares with those it knows.
        process_id: of this one.
        host: where it runs, for messages.
    """

    def __init__(self, address: Address, key: bytes, process_id: int, host: str) -> None:
        connection = _connection(socket.create_connection(address, timeout=CONNECT_S))
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(f"process {process_id} on {host}")
        self._name = f"process {process_id} on {host}"
        self._link = _Link(connection, f"process 0 at {address[0]}")
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        _in_background(self._listen)
        _in_background(self._link.beat)
        atexit.register(self._leave)

    def claim(self) -> None:
        """Nothing: the leader has one engine, and so has this."""

    def tell(self, event: object) -> None:
        """Nothing: the leader knows."""

    def events(self) -> Iterator[Any]:
        """What the leader tells, until it closes."""
        while not isinstance(event := self._events.get(), _Closed):
            yield event

    def exchange(self, value: Any) -> list[Any]:
        """What all processes bring, the leader first; every one of them calls it at the same point."""
        self._link.send(pickle.dumps(value))
        values = self._events.get()
        if isinstance(values, _Closed):  # the leader could not start
            sys.exit(0)
        return list(values)

    def fail(self, reason: str) -> NoReturn:
        """Give up: tell the leader why, and end; or for the loss of another one, if that is why."""
        time.sleep(LOSS_SHOWS_S)
        message = f"{self._name} failed: {reason}"
        with contextlib.suppress(OSError):
            self._link.send(pickle.dumps(_Lost(message)))
        _exit(message)

    def _listen(self) -> None:
        for message in self._link.listen():
            if isinstance(message, _Lost):
                if not self._is_closed.is_set():
                    _exit(message.message)
                return
            if isinstance(message, _Closed):
                self._is_closed.set()
            self._events.put(message)

    def _leave(self) -> None:
        """At the end: jax would wait for the others, and end badly if they do not come."""
        if not self._is_closed.is_set():
            with contextlib.suppress(OSError):
                self._link.send(pickle.dumps(_Left()))
            self._is_closed.wait()  # or the listener ends this process


def listen() -> socket.socket:
    """Where followers connect: a free port of this host, over IPv4 and, where there is it, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=128)
