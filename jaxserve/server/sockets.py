"""Sockets of the server: taken before anything heavy is imported, so that a taken address is reported immediately."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.server.config import ServerConfig


def listen(config: ServerConfig) -> socket.socket:
    """Return a socket at the address of the options; ConfigError if it is taken."""
    if config.uds is not None:
        return _listen_at_path(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the server must get the address {config.host} and port {config.port}, but: {error.strerror}; "
            "choose another --port"
        ) from error
    sock.set_inheritable(False)
    return sock


def is_reachable(sock: socket.socket) -> bool:
    """Return whether other machines may reach a socket: it is bound to an address other than a loopback one."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return not ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def _listen_at_path(path: str) -> socket.socket:
    """Return a Unix domain socket; a file that a server has left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"the server must get the Unix socket {path}, but: {error.strerror or error}; choose another --uds"
        ) from error
    sock.set_inheritable(False)
    return sock


def _is_left_behind(path: str) -> bool:
    """Return whether there is a socket at a path at which nothing listens."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def url_of(sock: socket.socket) -> str:
    """Return the address of a socket."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
