"""KVStoreConfig: a shared store of KV pages, in a directory, a Redis server or an engine's memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, no_type_check
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from jaxserve.api.option_values import read_object, read_options
from jaxserve.api.schema import FILLED_TEXT, PATH, Schema, number
from jaxserve.errors import ConfigError

ROLES = ("kv_both", "kv_producer", "kv_consumer")
PRODUCER, CONSUMER = ROLES[1:]
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64  # BLAKE2b takes at most 64
_SCHEMES = ("redis", "rediss", "unix")
_HOST = re.compile(r"(\[[0-9a-fA-F:.]*\]|[^:/]*)(:[0-9]*)?(/|$)")
_MAX = 10**9  # far from what sockets and Redis take as times
_WORDS = "a directory, redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:PATH?db=DB or tcp://HOST:PORT"
_PEER = "tcp"


@dataclass(frozen=True)
class RedisAddress:
    """Address of a Redis server.

    Attributes:
        host: host name; empty for a Unix socket.
        port: port.
        path: path of the Unix socket; empty for a host.
        db: number of the database.
        username, password: credentials; None without any.
        has_tls: True to encrypt the connection.
    """

    host: str = ""
    port: int = 6379
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = None
    has_tls: bool = False


class PeerAddress(NamedTuple):
    """Address of the engine that holds the pages.

    Attributes:
        host: host name or address.
        port: port.
    """

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if nothing leaves this machine."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False


@no_type_check  # tests pass wrong types, which __post_init__ must reject with a ConfigError
@dataclass(frozen=True, repr=False)
class KVStoreConfig:
    """Shared store of KV pages, which engines with the same weights write and read.

    Its representation has no credentials, because messages show it.

    Attributes:
        url: a directory, `redis://[USER:PASSWORD@]HOST:PORT/DB`, `rediss://` with TLS, or `unix:PATH?db=DB`; or
            `tcp://HOST:PORT`, at which the engine that computes the pages listens, and serves them from its memory to
            engines with `kv_role="kv_consumer"`.
        ttl_s: time after its last use after which a page is deleted.
        timeout_s: time without any answer after which the store is skipped for a while.
        size_gib: maximum size of the pages in a directory, of all engines with the same key; memory of a Redis server
            beyond which nothing is written to it; memory of an engine, at most half of what is free.
        key_file: file with a key of 16 to 64 bytes, which names and authenticates the pages; engines with other keys
            neither read nor delete them. None for checksums without a key.
    """

    url: str
    ttl_s: float = 86400.0
    timeout_s: float = 1.0
    size_gib: float = 64.0
    key_file: str | None = None

    def __post_init__(self) -> None:
        _SCHEMA.check(self)
        _ = self.peer, self.redis, self.directory

    def __repr__(self) -> str:
        others = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)[1:]]
        return f"KVStoreConfig({', '.join([f'url={self.shown}', *others])})"

    @classmethod
    def from_value(cls, value: object) -> KVStoreConfig | None:
        """Return the configuration from a URL, a dict or JSON, or the one given; None for None and "null".

        Raises:
            ConfigError: a key is not supported, or a value is invalid.
        """
        if isinstance(value, str) and value.strip() != "null" and not value.lstrip().startswith("{"):
            value = {"url": value}
        if value is None or isinstance(value, cls):
            return value
        words = f"kv_store must be {_WORDS}, or an object with such a url"
        if not isinstance(value, str | Mapping):
            raise ConfigError(f"{words}, got a value of type {type(value).__name__}")
        if isinstance(value, str) and value.strip() == "null":
            return None
        # No message of another reader, which would show a value: it may have a password.
        try:
            given = read_object("kv_store", value)
        except ConfigError:
            raise ConfigError(f"{words}, got text or keys that are none") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(url := given.get("url", ""), str):
            raise ConfigError(f"url of kv_store must be {_WORDS}, got a value of type {type(url).__name__}")
        return read_options("kv_store", cls, {key: each if key in names else "..." for key, each in given.items()})

    @property
    def peer(self) -> PeerAddress | None:
        """Address of the engine that holds the pages; None for a Redis server or a directory."""
        if self.url.partition(":")[0].lower() != _PEER:
            return None
        with suppress(ValueError):
            parts = urlsplit(self.url)
            host, port, rest = parts.hostname, parts.port, (parts.path.strip("/"), parts.query, parts.fragment)
            if host and port and not any(rest) and parts.username is None:
                return PeerAddress(host, port)
        raise ConfigError(f"url of kv_store must be {_WORDS}, got {self.shown}")

    @property
    def redis(self) -> RedisAddress | None:
        """Address of the Redis server; None for an engine or a directory."""
        if not self._is_address or self.peer is not None:
            return None
        try:
            parts = urlsplit(self.url)
            return _redis_address(parts)
        except ValueError:
            raise ConfigError(f"url of kv_store must be {_WORDS}, got {self.shown}") from None

    @property
    def directory(self) -> Path | None:
        """Directory of the pages; None for a server or an engine."""
        return None if self._is_address else Path(self.url)

    @property
    def _is_address(self) -> bool:
        """True for the address of a server, even a wrong one, and False for a directory."""
        return "://" in self.url or self.url.partition(":")[0].lower() in (*_SCHEMES, _PEER)

    @property
    def shown(self) -> str:
        """URL without credentials, for messages: from a wrong one, nothing that could be part of them."""
        if not self._is_address:
            return repr(self.url)
        scheme, _, rest = self.url.partition(":")
        before, _, host = rest.rpartition("@")
        mark = "//" if rest.startswith("//") else ""
        host = re.split("[?#]", host)[0].removeprefix(mark)
        if "?" in before or "#" in before or not _HOST.match(host):  # an @ in a query, or perhaps no @ after a password
            host = "..."
        return repr(f"{scheme}:{mark}{host}")

    def read_key(self) -> bytes:
        """Return the key in `key_file`, without a line end; empty without a file.

        Raises:
            ConfigError: the file cannot be read, or has a key of another length.
        """
        if self.key_file is None:
            return b""
        try:
            key = Path(self.key_file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError(f"key_file of kv_store cannot be read: {error}") from error
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"key_file of kv_store must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got {len(key)} in "
                f"{self.key_file!r}; `openssl rand -hex 32` makes a key"
            )
        return key


def _redis_address(parts: SplitResult) -> RedisAddress:
    """Return the address in a URL; ValueError if it is none."""
    if parts.scheme not in _SCHEMES or parts.fragment:
        raise ValueError("no scheme of Redis")
    query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    credentials: dict[str, Any] = {
        name: None if value is None else unquote(value)
        for name, value in (("username", parts.username), ("password", parts.password))
    }
    if parts.scheme == "unix":
        names = [name for name, _ in query]
        if parts.hostname or not parts.path or names not in ([], ["db"]):
            raise ValueError("no path, or another query")
        return RedisAddress(path=parts.path, db=_number(query[0][1] if query else "0"), **credentials)
    path = parts.path.strip("/")
    if query or not parts.hostname:
        raise ValueError("a query, or no host")
    port = 6379 if parts.port is None else parts.port
    if not port:
        raise ValueError("no port")
    return RedisAddress(parts.hostname, port, db=_number(path or "0"), has_tls=parts.scheme == "rediss", **credentials)


def _number(text: str) -> int:
    """Return a database's number; ValueError if it is none."""
    if not text.isdecimal():
        raise ValueError("no number")
    return int(text)


_SCHEMA = Schema(
    ConfigError,
    KVStoreConfig,
    {
        "url": FILLED_TEXT,
        "key_file": PATH.optional(),
        **dict.fromkeys(("ttl_s", "timeout_s", "size_gib"), number(0, _MAX, excludes_low=True)),
    },
    " of kv_store",
)
