"""Run key: the secret that a run's processes share, which no other process must be able to read."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.system.environment import RUN_KEY, run_key

MIN_CHARS = 16


def given_key(key: str | None, host: str | None) -> bytes | None:
    """Return the key that the user has given; None for processes on one machine, which need none.

    Args:
        key: the key; None takes the environment's.
        host: host of process 0; None if it is not known yet.

    Raises:
        ConfigError: it is too short, or processes on several machines have none.
    """
    key = key or run_key()
    if key is None:
        if host is None or is_loopback(host):
            return None
        raise ConfigError(
            f"processes that reach each other at {host} must share a key: set {RUN_KEY} to the same secret of at "
            f"least {MIN_CHARS} characters in all of them; processes of one machine need none at 127.0.0.1"
        )
    if len(key) < MIN_CHARS:
        raise ConfigError(f"{RUN_KEY} must have at least {MIN_CHARS} characters, got {len(key)}; use a random one")
    return hashlib.sha256(key.encode()).digest()


def check_reachable(host: str) -> None:
    """Raise ConfigError for a name other than localhost that resolves to the loopback interface, as on Debian."""
    is_literal = host.replace(".", "").isdigit() or ":" in host
    if not is_literal and host != "localhost" and is_loopback(host):
        raise ConfigError(
            f"coordinator_address must be one that other machines reach, got {host}, which is the loopback interface "
            "here; give the address of a network interface, or 127.0.0.1 for processes of one machine"
        )


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


@contextmanager
def key_file() -> Iterator[tuple[str, bytes]]:
    """Write a new key to a file that only this user can read; yield the file's name and the key, then delete it."""
    file = _folder() / f"run-{secrets.token_hex(8)}"
    key = secrets.token_bytes(32)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(key)
    try:
        yield file.name, key
    finally:
        file.unlink(missing_ok=True)


def read_key(name: str) -> bytes:
    """Return the key in a `key_file`; ConfigError if this user has no such file."""
    if not re.fullmatch(r"run-[0-9a-f]{16}", name):
        raise ConfigError(f"process 0 must name a file of its key, got {name[:40]!r}; is another program at its port?")
    try:
        return (_folder() / name).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the key of the run must be readable, but: {error}; processes of several users or containers must share "
            f"one in {RUN_KEY}"
        ) from error


def _folder() -> Path:
    """Return this user's private folder for key files, created if absent.

    ConfigError if the path is no folder, or if another user owns it or can open it.
    """
    folder = Path(tempfile.gettempdir()) / f"jaxserve-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a folder of this user that is closed to others (0700); remove it")
    return folder
