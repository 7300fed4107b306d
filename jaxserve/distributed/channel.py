"""Channel: messages between two processes that share a key, each authenticated before anything in it is read.

Both sides prove the key by a nonce of the other (HMAC-SHA256). Every message then carries a code over its content and
its number, under a key of the connection and of the direction: what was changed, repeated or left out on the way ends
the connection. Messages are JSON, so that none can run code. They are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

_NONCE_BYTES, _PROOF_BYTES, _CODE_BYTES = 32, 32, 16
BEAT = b""  # message that only shows that the process lives


class Channel:
    """Connection to one other process, which has proved to have the key. Several threads may send; one receives.

    Args:
        endpoint: connected socket.
        key: secret that both processes share.
        is_leader: True on the side that has listened.
        timeout_s: time that each direction may wait within a message.

    Raises:
        AuthenticationError: the other process does not have the key.
        OSError: the connection ends.
        EOFError: the connection ends.
    """

    def __init__(self, endpoint: socket.socket, key: bytes, *, is_leader: bool, timeout_s: int | float) -> None:
        endpoint.setblocking(True)
        wait = struct.pack("ll", int(timeout_s), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            endpoint.setsockopt(socket.SOL_SOCKET, option, wait)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection: Any = Connection(endpoint.detach())
        try:
            session = self._prove(key, is_leader=is_leader)
        except BaseException:
            self._connection.close()
            raise
        names = (b"leader", b"follower") if is_leader else (b"follower", b"leader")
        self._send_key, self._receive_key = (_hash(session, name) for name in names)
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()

    def _prove(self, key: bytes, *, is_leader: bool) -> bytes:
        """Prove the key to the other process, check its proof, and return the key of the connection."""
        connection, own = self._connection, secrets.token_bytes(_NONCE_BYTES)
        connection.send_bytes(own)
        other = connection.recv_bytes(_NONCE_BYTES)
        nonces = own + other if is_leader else other + own
        roles = (b"proof of the leader", b"proof of the follower")
        mine, theirs = roles if is_leader else reversed(roles)
        if len(other) != _NONCE_BYTES or other == own:
            raise AuthenticationError("the other side is no process of this run")
        if not is_leader:  # the side that has come proves first
            connection.send_bytes(_hash(key, mine + nonces))
        if not hmac.compare_digest(connection.recv_bytes(_PROOF_BYTES), _hash(key, theirs + nonces)):
            raise AuthenticationError("the other process has another key")
        if is_leader:
            connection.send_bytes(_hash(key, mine + nonces))
        return _hash(key, b"session" + nonces)

    def send(self, content: Any) -> None:
        """Send a value of JSON; OSError if the other process is gone or does not receive."""
        self._send(json.dumps(content, separators=(",", ":")).encode())

    def beat(self) -> None:
        """Send a sign of life; OSError if the other process is gone or does not receive."""
        self._send(BEAT)

    def _send(self, message: bytes) -> None:
        with self._sending:
            code = _code(self._send_key, self._num_sent, message)
            self._num_sent += 1
            self._connection.send_bytes(code + message)

    def poll(self, timeout_s: int | float) -> bool:
        """Return whether a message, or the end of the connection, comes in time."""
        return self._connection.poll(timeout_s)

    def receive(self) -> Any:
        """Return the next value; None for a sign of life. OSError, EOFError or AuthenticationError if there is none."""
        data = self._connection.recv_bytes()
        code, message = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if not hmac.compare_digest(code, _code(self._receive_key, self._num_received, message)):
            raise AuthenticationError("a message was changed on the way")
        self._num_received += 1
        return None if message == BEAT else json.loads(message)


def _hash(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def _code(key: bytes, number: int, message: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<Q", number) + message, key=key, digest_size=_CODE_BYTES).digest()
