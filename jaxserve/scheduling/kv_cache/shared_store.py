"""Shared stores: KV pages that several engines write and read, by name, in a directory, a Redis server or an engine.

A page's name is a digest of its weights' fingerprint and its content hash, and its value is sealed: a header with
format and key, and a digest of all. With a key, names and digests are keyed, so that nobody without it can guess names
or write pages that are read. Nothing here is trusted: a value that is not whole is no page.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxserve.api.kv_store_config import KVStoreConfig, RedisAddress
from jaxserve.errors import ConfigError, install_extra
from jaxserve.scheduling.kv_cache.peer_store import HolderStore, ReaderStore
from jaxserve.scheduling.kv_cache.stored_pages import PageKey

_MAGIC = b"jskvs\x00\x00\x01"  # the last byte is the format version
_HEADER = Struct("<8s16si16sQ")  # magic, fingerprint, group, hash, page bytes
_DIGEST_BYTES = 32
_PREFIX = f"jaxserve-kv-{_MAGIC[-1]}"
_SWEEP_S = 60.0  # time between two searches of a directory for old pages
_ABANDONED_S = 3600.0  # age from which a temporary file belongs to nobody
_TOUCH_S = 60.0  # a page that was not used for longer, or an eighth of the TTL, is marked as used
_MEMORY_S = 5.0  # time between two questions for a server's memory


class StoreError(Exception):
    """Failure of a store; its text has no credentials."""


class _FullError(StoreError):
    """A server has no memory for a value."""


class Seal:
    """Names and authenticates the pages for some weights.

    Args:
        key: key; empty for digests that anybody can compute.
        fingerprint: 16 bytes that identify weights and page layout.

    Attributes:
        key_id: name of the key, by which stores keep pages of different keys apart.
        fingerprint: see above.
    """

    def __init__(self, key: bytes, fingerprint: bytes) -> None:
        self._key, self.fingerprint = key, fingerprint
        self.key_id = blake2b(key=key, digest_size=8, person=b"kv store id").hexdigest() if key else "open"

    def name(self, key: PageKey) -> str:
        """Return the name of a page."""
        content = self.fingerprint + key.group.to_bytes(4, "little", signed=True) + key.page_hash
        return blake2b(content, key=self._key, digest_size=20, person=b"kv store name").hexdigest()

    def prove(self, text: str) -> str:
        """Return a digest of some text, which nobody without the key can compute."""
        return blake2b(text.encode(), key=self._key, digest_size=32, person=b"kv store proof").hexdigest()

    def close(self, key: PageKey, page: bytes) -> bytes:
        """Return a page with its header and digest."""
        header = _HEADER.pack(_MAGIC, self.fingerprint, *key, len(page))
        return header + self._digest(header, page) + page

    def open(self, key: PageKey, value: bytes) -> bytes | None:
        """Return the page in a value; None unless it is whole, and the page with this key."""
        start = _HEADER.size + _DIGEST_BYTES
        header, digest, page = value[: _HEADER.size], value[_HEADER.size : start], value[start:]
        expected = _HEADER.pack(_MAGIC, self.fingerprint, *key, len(page))
        return page if header == expected and compare_digest(digest, self._digest(header, page)) else None

    def _digest(self, header: bytes, page: bytes) -> bytes:
        digest = blake2b(header, key=self._key, digest_size=_DIGEST_BYTES, person=b"kv store page")
        digest.update(page)
        return digest.digest()


@runtime_checkable
class SharedStore(Protocol):
    """Values by name, callable on several threads. All methods raise StoreError if the store fails."""

    def has(self, names: Sequence[str]) -> list[bool]:
        """Return whether there are values with these names."""

    def read(self, name: str) -> bytes | None:
        """Return a value, and mark it as used; None if there is none."""

    def write(self, name: str, value: bytes) -> bool:
        """Store a value; return False if the store is full."""

    def delete(self, name: str) -> None:
        """Delete a value, if there is one."""

    def close(self) -> None:
        """Free all resources."""


def open_store(config: KVStoreConfig, seal: Seal, *, writes: bool) -> SharedStore:
    """Return the store of the pages with a seal, to write to if `writes`; ConfigError if it cannot be used."""
    if (peer := config.peer) is not None:
        return HolderStore(peer, config, seal) if writes else ReaderStore(peer, config, seal, StoreError)
    if (address := config.redis) is not None:
        return RedisStore(address, config, seal)
    assert config.directory is not None, "a store is an engine, a server or a directory"
    return DirectoryStore(config.directory, config, seal, writes=writes)


class DirectoryStore:
    """Values in files below a directory, which may hold other files: these are neither read nor deleted.

    Args:
        directory: the directory; created if missing, unless it is only read.
        config: options.
        seal: names the subdirectories.
        writes: False if the directory is only read; those who write to it may create subdirectories later.
    """

    def __init__(self, directory: Path, config: KVStoreConfig, seal: Seal, *, writes: bool = True) -> None:
        self._root = directory / f"{_PREFIX}-{seal.key_id}"
        self._own = self._root / seal.fingerprint.hex()
        self._ttl_s, self._max_bytes = config.ttl_s, int(config.size_gib * 2**30)
        self._touch_s = min(config.ttl_s / 8, _TOUCH_S)
        self._sweep_at_s, self._num_written = 0.0, 0
        try:
            if writes:
                self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            else:
                os.scandir(directory).close()
        except (OSError, ValueError) as error:
            words = "a directory to write to" if writes else "an existing directory with kv_role='kv_consumer'"
            raise ConfigError(f"kv_store must be {words}, got {config.shown}: {error}") from error
        self._ahead_s = self._clock_difference_s() if writes else 0.0

    def _clock_difference_s(self) -> float:
        """Return how far the file system's clock is ahead of this machine's, if files can be written.

        A file server stamps files by its own clock, which may differ.
        """
        probe = self._own / "00" / f".{secrets.token_hex(8)}.tmp"
        try:
            probe.parent.mkdir(mode=0o700, exist_ok=True)
            with open(probe, "xb", opener=_open_private):
                ahead_s = probe.stat().st_mtime - time.time()
            probe.unlink()
        except OSError:
            return 0.0
        return ahead_s

    def _now_s(self) -> float:
        """Return the time by the file system's clock."""
        return time.time() + self._ahead_s

    def has(self, names: Sequence[str]) -> list[bool]:
        """Return whether there are files of these names that are not too old."""
        return [self._age_s(name) is not None for name in names]

    def _age_s(self, name: str) -> float | None:
        """Return the time since a file's last use; None without one, or if it is a device or a pipe, without an end."""
        try:
            state = self._path(name).stat()
        except OSError:
            return None
        age_s = self._now_s() - state.st_mtime
        return age_s if age_s < self._ttl_s and stat.S_ISREG(state.st_mode) else None

    def read(self, name: str) -> bytes | None:
        """Return a file's content."""
        age_s = self._age_s(name)
        if age_s is None:
            return None
        path = self._path(name)
        try:
            value = path.read_bytes()
            if age_s > self._touch_s:
                with suppress(OSError):  # a disk that this engine may only read
                    os.utime(path)
        except FileNotFoundError:  # deleted meanwhile
            return None
        except OSError as error:
            raise StoreError(str(error)) from error
        return value

    def write(self, name: str, value: bytes) -> bool:
        """Write a file, which others see only when it is whole."""
        self._num_written += len(value)
        path = self._path(name)
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            if time.monotonic() >= self._sweep_at_s or self._num_written > self._max_bytes // 16:
                self._sweep()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(temporary, "xb", opener=_open_private) as file:
                file.write(value)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StoreError(str(error)) from error
        return True

    def delete(self, name: str) -> None:
        """Delete a file."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(str(error)) from error

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _path(self, name: str) -> Path:
        return self._own / name[:2] / f"{name}.page"

    def _sweep(self) -> None:
        """Delete the key's pages that are too old, and beyond the size those used longest ago."""
        self._sweep_at_s, self._num_written = time.monotonic() + _SWEEP_S, 0
        self._ahead_s = self._clock_difference_s()
        now_s = self._now_s()
        pages = sorted(self._pages(now_s), key=lambda page: page.used_s)
        num_bytes = sum(page.num_bytes for page in pages)
        for page in pages:
            if now_s - page.used_s < self._ttl_s and num_bytes <= self._max_bytes:
                break
            page.path.unlink(missing_ok=True)
            num_bytes -= page.num_bytes

    def _pages(self, now_s: float) -> Iterator[_File]:
        """Yield the pages of the key, for any weights, and delete temporary files that a killed process has left."""
        for path in self._root.glob("*/??/*"):
            try:
                state = path.stat()
            except OSError:
                continue
            if _PAGE_NAME.fullmatch(path.name) and not stat.S_ISDIR(state.st_mode):
                yield _File(path, state.st_mtime, state.st_size)
            elif _TEMPORARY_NAME.fullmatch(path.name) and now_s - state.st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)


_PAGE_NAME = re.compile(r"[0-9a-f]{40}\.page")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{16}\.tmp")


class _File(NamedTuple):
    """A page in a directory."""

    path: Path
    used_s: float
    num_bytes: int


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class RedisStore:
    """Values in a Redis server, which deletes old ones itself.

    Args:
        address: address of the server.
        config: options.
        seal: names the keys.

    Raises:
        ConfigError: the package is missing.
    """

    def __init__(self, address: RedisAddress, config: KVStoreConfig, seal: Seal) -> None:
        try:
            import redis  # noqa: PLC0415 - an extra
            from redis.backoff import NoBackoff  # noqa: PLC0415
            from redis.retry import Retry  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(f"kv_store needs the package redis for a server: {install_extra('redis')}") from error
        times: dict[str, Any] = {"socket_timeout": config.timeout_s, "socket_connect_timeout": config.timeout_s}
        place: dict[str, Any] = {"unix_socket_path": address.path} if address.path else {"host": address.host}
        if not address.path:
            place |= {"port": address.port, "ssl": address.has_tls}
        self._client: Any = redis.Redis(
            **place,
            **times,
            db=address.db,
            username=address.username,
            password=address.password,
            retry=Retry(NoBackoff(), 0),
        )
        self._error: type[Exception] = redis.RedisError
        self._full: type[Exception] = redis.exceptions.OutOfMemoryError
        self._denied: type[Exception] = redis.exceptions.NoPermissionError
        self._address, self._prefix = config.shown, f"{_PREFIX}:{seal.key_id}:{seal.fingerprint.hex()}:"
        self._ttl_ms, self._max_bytes = max(int(config.ttl_s * 1e3), 1), int(config.size_gib * 2**30)
        self._is_full, self._look_at_s = False, 0.0

    def has(self, names: Sequence[str]) -> list[bool]:
        """Return whether there are these keys, by one message."""

        def ask() -> list[bool]:
            with self._client.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.exists(self._prefix + name)
                return [bool(each) for each in pipeline.execute()]

        return self._call(ask)

    def read(self, name: str) -> bytes | None:
        """Return a key's value, and renew its time if the server's rules allow it."""
        key = self._prefix + name

        def get() -> bytes | None:
            try:
                value: bytes | None = self._client.getex(key, px=self._ttl_ms)
            except self._denied:  # this user may only read
                value = self._client.get(key)
            return value

        found: bytes | None = self._call(get)
        return found

    def write(self, name: str, value: bytes) -> bool:
        """Set a key, unless the server has no memory for it."""
        if time.monotonic() >= self._look_at_s:
            used = int(self._call(lambda: self._client.info("memory")).get("used_memory", 0))
            self._is_full, self._look_at_s = used >= self._max_bytes, time.monotonic() + _MEMORY_S
        if self._is_full:
            return False
        try:
            self._call(lambda: self._client.set(self._prefix + name, value, px=self._ttl_ms))
        except _FullError:  # its own limit, `maxmemory`, is lower; pages can be read nevertheless
            self._is_full = True
        return not self._is_full

    def delete(self, name: str) -> None:
        """Delete a key."""
        self._call(lambda: self._client.delete(self._prefix + name))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call a function of the client; its errors name the server without credentials."""
        try:
            return function()
        except self._full as error:
            raise _FullError(f"the Redis server {self._address} has no memory") from error
        except self._error as error:  # its text may have the server's answer, never the password
            raise StoreError(f"the Redis server {self._address} has failed: {type(error).__name__}: {error}") from None
