"""Sockets of the server: taken before anything heavy is imported, so that a taken address is reported immediately."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from typing import Protocol, runtime_checkable

from jaxserve.errors import ConfigError


@runtime_checkable
class Address(Protocol):
    """Options with the address to listen at.

    Attributes:
        host: host, if `uds` is None.
        port: port, if `uds` is None; 0 takes a free one.
        uds: path of a Unix domain socket.
    """

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def uds(self) -> str | None: ...


def listen(config: Address) -> socket.socket:
    """Return a socket bound to the address that the options specify; ConfigError if it is taken.

    A Unix socket that an ended server has left is replaced.
    """
    address: str | tuple[str, int]
    if config.uds is not None:
        family, address = socket.AF_UNIX, config.uds
        name, flag = f"Unix socket {config.uds}", "--uds"
    else:
        family, address = socket.AF_INET6 if ":" in config.host else socket.AF_INET, (config.host, config.port)
        name, flag = f"address {config.host} and port {config.port}", "--port"
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.uds is not None and _is_left_behind(config.uds):
            os.unlink(config.uds)
        sock.bind(address)
    except OSError as error:
        sock.close()
        message = f"the server must get the {name}, but: {error.strerror or error}; choose another {flag}"
        raise ConfigError(message) from error
    return sock


def is_reachable(sock: socket.socket) -> bool:
    """Return whether other machines may reach a socket: it is bound to an address other than a loopback one."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return not ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def _is_left_behind(path: str) -> bool:
    """Return whether the file at a path is a Unix socket at which no process listens."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def url_of(sock: socket.socket) -> str:
    """Return the URL at which a bound socket is reached."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
