"""Peer store: KV pages in the memory of the engine that computes them, read by other engines over TCP.

The pages take no detour: each byte is sent once, from one engine to the other. A connection begins with a handshake:
both sides name their protocol, key and weights, and prove that they have the key. A message is a JSON object, after its
length in four bytes, perhaps followed by a page. Pages are sealed as in every store; see `shared_store`.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.api.kv_store_config import KVStoreConfig, PeerAddress
from jaxserve.errors import ConfigError, brief
from jaxserve.system import machine_memory

if TYPE_CHECKING:
    from jaxserve.scheduling.kv_cache.shared_store import Seal

logger = logging.getLogger(__name__)

_VERSION = 1
_LENGTH_BYTES = 4
_MAX_HEADER_BYTES = 2**20
_MAX_NAMES = 8192  # maximum names per message
_MAX_CONNECTIONS = 256
_MAX_ERROR_CHARS = 500
_HANDSHAKE_S = 5.0  # maximum time until the other side has proved that it has the key
_RETRY_S = 1.0  # time after which connections are accepted again if none can be, as with too many open files
_IDLE_S = 300.0  # maximum time without a message, or to send a page: the other side may be gone
_MEMORY_FRACTION = 0.5  # fraction of the memory free at the start


class PeerError(Exception):
    """Failure of a peer, or of the connection to it."""


class _Held(NamedTuple):
    """A page in memory, and the monotonic time of its last use."""

    value: bytes
    used_s: float


class PeerPages:
    """Pages in this process, which it serves at an address.

    All engines of the process at this address share one object; see `listen`.

    Args:
        address: address to listen at.
        config: options.

    Attributes:
        num_sent_bytes: bytes of pages that were sent.
    """

    def __init__(self, address: PeerAddress, config: KVStoreConfig) -> None:
        self._ttl_s = config.ttl_s
        self._max_bytes = int(min(config.size_gib * 2**30, machine_memory.available_bytes() * _MEMORY_FRACTION))
        self._pages: OrderedDict[str, _Held] = OrderedDict()  # names -> pages, the latest used last
        self._num_bytes = self.num_sent_bytes = 0
        self._lock = threading.Lock()
        self.seals: dict[tuple[str, str], Seal] = {}  # names of key and weights -> seals
        self.num_users = 0
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((address.host, address.port), family=family)
        self._connections = set[socket.socket]()
        self._is_closed = False
        threading.Thread(target=self._accept, name="jaxserve pages", daemon=True).start()

    # Pages

    def has(self, names: Sequence[str]) -> list[bool]:
        """Return whether there are pages with these names."""
        with self._lock:
            self._forget_old()
            return [name in self._pages for name in names]

    def read(self, name: str) -> bytes | None:
        """Return a page, and mark it as used."""
        with self._lock:
            self._forget_old()
            if (found := self._pages.pop(name, None)) is None:
                return None
            self._pages[name] = _Held(found.value, time.monotonic())
            return found.value

    def write(self, name: str, value: bytes) -> bool:
        """Hold a page in place of those used longest ago; False if there is no memory for it at all."""
        if len(value) > self._max_bytes:
            return False
        with self._lock:
            self._drop(name)
            while self._num_bytes + len(value) > self._max_bytes:
                self._drop(next(iter(self._pages)))
            self._pages[name] = _Held(value, time.monotonic())
            self._num_bytes += len(value)
        return True

    def delete(self, name: str) -> None:
        """Forget a page."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if (found := self._pages.pop(name, None)) is not None:
            self._num_bytes -= len(found.value)

    def _forget_old(self) -> None:
        oldest_s = time.monotonic() - self._ttl_s
        while self._pages and next(iter(self._pages.values())).used_s < oldest_s:
            self._drop(next(iter(self._pages)))

    def close(self) -> None:
        """End all connections, and forget the pages."""
        with self._lock:
            self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._socket.close()
        for each in list(self._connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._pages.clear()
            self._num_bytes = 0

    # Connections, on threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("a connection for KV pages cannot be accepted: %s", error)
                time.sleep(_RETRY_S)
                continue
            with self._lock:
                is_taken = not self._is_closed and len(self._connections) < _MAX_CONNECTIONS
                if is_taken:
                    self._connections.add(connection)
            if not is_taken:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="jaxserve pages", daemon=True).start()
            except RuntimeError as error:  # too many threads
                logger.warning("a connection for KV pages cannot be served: %s", error)
                self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one connection until its end."""
        try:
            connection.settimeout(_HANDSHAKE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(connection)
            connection.settimeout(_IDLE_S)
            while True:
                self._answer(connection, _receive(connection))
        except PeerError as error:
            logger.warning("a connection for KV pages is refused: %s", error)
            with suppress(OSError):
                _send(connection, {"error": str(error)})
        except OSError:  # the other side has gone
            pass
        except Exception:  # a defect must not hold the connection
            logger.exception("a connection for KV pages has failed")
        finally:
            self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Take the handshake; PeerError if the other side has another version, key or weights."""
        until_s = time.monotonic() + _HANDSHAKE_S
        theirs = _receive(connection, until_s)
        if theirs.get("version") != _VERSION:
            raise PeerError(f"the protocol has version {_VERSION} here, and {brief(theirs.get('version'))} there")
        key, weights = str(theirs.get("key")), str(theirs.get("weights"))
        if (seal := self.seals.get((key, weights))) is None:
            known = " or ".join(f"key {key}, weights {weights}" for key, weights in list(self.seals))
            raise PeerError(f"pages are of {known} here, and of key {key[:40]}, weights {weights[:40]} there")
        nonce = secrets.token_hex(16)
        _send(connection, {"nonce": nonce, "proof": seal.prove(f"holder {theirs.get('nonce')}")})
        if not compare_digest(str(_receive(connection, until_s).get("proof")), seal.prove(f"reader {nonce}")):
            raise PeerError("the other side does not have the key")
        _send(connection, {"is_ready": True})

    def _answer(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Answer one message."""
        names, name = message.get("has"), message.get("read")
        if isinstance(names, list):
            _send(connection, {"has": self.has(list(map(str, names)))})
        elif isinstance(name, str):
            value = self.read(name)
            _send(connection, {"size": -1 if value is None else len(value)}, value or b"")
            with self._lock:
                self.num_sent_bytes += len(value or b"")
        else:
            raise PeerError(f"a message must have has or read, got {brief(message)}")


_listening: dict[PeerAddress, PeerPages] = {}
_changing = threading.Lock()


class HolderStore:
    """Shared store of the engine that holds the pages; see `SharedStore`.

    Args:
        address: address at which this process serves them.
        config: options.
        seal: names the pages.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, address: PeerAddress, config: KVStoreConfig, seal: Seal) -> None:
        _require_key(address, config)
        self._address, self._names = address, (seal.key_id, seal.fingerprint.hex())
        with _changing:
            if (pages := _listening.get(address)) is None:
                try:
                    pages = _listening[address] = PeerPages(address, config)
                except OSError as error:
                    raise ConfigError(
                        f"kv_store must be an address to listen at unless kv_role='kv_consumer', got {config.shown}: "
                        f"{error}"
                    ) from error
            pages.num_users += 1
            pages.seals[self._names] = seal
        self.pages = pages
        self.has, self.read, self.write, self.delete = pages.has, pages.read, pages.write, pages.delete

    def close(self) -> None:
        """Serve the pages no more, unless another engine of the process does."""
        with _changing:
            self.pages.num_users -= 1
            if not self.pages.num_users and _listening.pop(self._address, None) is not None:
                self.pages.close()


class ReaderStore:
    """Shared store of an engine that reads the pages of another one; see `SharedStore`.

    Args:
        address: the other engine's address.
        config: options.
        seal: names the pages.
        error: type of the exceptions that it raises.
    """

    def __init__(self, address: PeerAddress, config: KVStoreConfig, seal: Seal, error: type[Exception]) -> None:
        _require_key(address, config)
        self._address, self._seal, self._shown, self._error = address, seal, config.shown, error
        self._timeout_s, self._max_bytes = config.timeout_s, int(config.size_gib * 2**30)
        self._idle: list[socket.socket] = []
        self._is_closed = False

    def has(self, names: Sequence[str]) -> list[bool]:
        """Return whether there are pages with these names, by as few messages as can hold them."""
        found = list[Any]()
        for start in range(0, len(names), _MAX_NAMES):
            asked = list(names[start : start + _MAX_NAMES])
            answer = self._ask({"has": asked})[0].get("has")
            if not isinstance(answer, list) or len(answer) != len(asked):
                raise self._error(f"the engine at {self._shown} has given no answer for each page")
            found += answer
        return [each is True for each in found]

    def read(self, name: str) -> bytes | None:
        """Return a page; None if there is none."""
        return self._ask({"read": name})[1]

    def write(self, name: str, value: bytes) -> bool:
        """Write nothing: only the engine that computes a page holds it."""
        return False

    def delete(self, name: str) -> None:
        """Delete nothing: the page is another engine's."""

    def close(self) -> None:
        """Close all connections; those in use are closed after their answers."""
        self._is_closed = True
        with suppress(IndexError):  # another thread may take the last one
            while self._idle:
                self._idle.pop().close()

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], bytes | None]:
        """Return the answer to a message, and the page after it; again if a kept connection was closed."""
        while True:
            is_kept = bool(self._idle)
            try:
                connection = self._idle.pop()
            except IndexError:
                is_kept, connection = False, None
            try:
                if connection is None:
                    connection = self._connect()
                _send(connection, message)
                answer = _receive(connection)
                page = self._page(connection, answer.get("size", -1))
            except (OSError, PeerError) as error:
                if connection is not None:
                    connection.close()
                if is_kept and not isinstance(error, TimeoutError):
                    continue
                raise self._error(f"the engine at {self._shown} has failed: {error}") from error
            self._idle.append(connection)
            if self._is_closed:
                self.close()
            return answer, page

    def _page(self, connection: socket.socket, size: object) -> bytes | None:
        """Return a page of some size; None if the size is negative."""
        if not isinstance(size, int) or size > self._max_bytes:
            raise PeerError(f"a page must have at most {self._max_bytes} bytes, got {brief(size)}")
        return None if size < 0 else _receive_bytes(connection, size)

    def _connect(self) -> socket.socket:
        """Return a connection after the handshake.

        Raises:
            PeerError: the other side has another version, key or weights.
        """
        connection = socket.create_connection((self._address.host, self._address.port), self._timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce, seal = secrets.token_hex(16), self._seal
            own = {"version": _VERSION, "key": seal.key_id, "weights": seal.fingerprint.hex(), "nonce": nonce}
            _send(connection, own)
            theirs = _receive(connection)
            if not compare_digest(str(theirs.get("proof")), seal.prove(f"holder {nonce}")):
                raise PeerError("the other side does not have the key")
            _send(connection, {"proof": seal.prove(f"reader {theirs.get('nonce')}")})
            _receive(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def _require_key(address: PeerAddress, config: KVStoreConfig) -> None:
    """Raise ConfigError if pages could be sent beyond this machine without a key."""
    if not address.is_loopback and config.key_file is None:
        raise ConfigError(
            f"kv_store at {config.shown}, beyond this machine, needs key_file, a file with a key that the engines "
            "share; `openssl rand -hex 32` makes a key"
        )


def _send(connection: socket.socket, message: dict[str, Any], page: bytes = b"") -> None:
    """Send a message, and a page."""
    header = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(len(header).to_bytes(_LENGTH_BYTES, "big") + header)
    if page:
        connection.sendall(page)


def _receive(connection: socket.socket, until_s: float = math.inf) -> dict[str, Any]:
    """Return the next message, if all of it comes until a monotonic time.

    Raises:
        PeerError: it is none, or an error.
    """
    length = int.from_bytes(_receive_bytes(connection, _LENGTH_BYTES, until_s), "big")
    if length > _MAX_HEADER_BYTES:
        raise PeerError(f"a message must have at most {_MAX_HEADER_BYTES} bytes, got {length}")
    try:
        message = json.loads(_receive_bytes(connection, length, until_s))
    except (ValueError, RecursionError) as error:
        raise PeerError("a message must be JSON") from error
    if not isinstance(message, dict):
        raise PeerError(f"a message must be an object, got {brief(message)}")
    if "error" in message:
        raise PeerError(f"it answers: {str(message['error'])[:_MAX_ERROR_CHARS]!r}")
    return message


def _receive_bytes(connection: socket.socket, size: int, until_s: float = math.inf) -> bytes:
    """Return the next bytes; ConnectionError if there are fewer, TimeoutError if they come after a monotonic time."""
    data = bytearray(size)
    view, start = memoryview(data), 0
    while start < size:
        if until_s < math.inf:
            if (rest_s := until_s - time.monotonic()) <= 0:
                raise TimeoutError("a message has come too slowly")
            connection.settimeout(rest_s)
        count = connection.recv_into(view[start:])
        if not count:
            raise ConnectionError("the connection was closed")
        start += count
    return bytes(data)
