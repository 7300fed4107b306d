"""Loading: bytes of image files that requests name by URL or path, only from sources that the operator allows.

By default only data: URLs are read. Web servers are reached by allowed names only; a name is resolved once, and the
connection goes to that address, which must be public. Redirects are errors.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

from jaxserve.errors import BusyError, RequestError, brief
from jaxserve.images import decoding
from jaxserve.images.deadline import Deadline

FETCH_S = 5.0  # time for a whole file from a web server
_PART_BYTES = 2**16
_RESOLVERS = threading.BoundedSemaphore(16)
_SCHEMES = {"http": 80, "https": 443}


@dataclass(frozen=True)
class ImageSources:
    """Sources that image files may come from.

    Attributes:
        media_domains: allowed host names of web servers; empty for none.
        local_path: directory whose files may be read, with all below it; empty for none.
    """

    media_domains: Sequence[str] = ()
    local_path: str = ""

    def load(self, url: str, deadline: Deadline) -> bytes:
        """Return the file that a data:, http:, https: or file: URL names.

        Args:
            url: the URL.
            deadline: time limit for its prompt's images.

        Raises:
            RequestError: its source is not allowed, or has no such file within the limits.
        """
        if url[:5].lower() == "data:":
            return _from_data(url)
        if any(char <= " " or char in '\\"<>\x7f' or "\ud800" <= char <= "\udfff" for char in url):
            raise RequestError(
                f"the URL of an image must have no spaces, backslashes, quotes and surrogates, got {brief(url)}"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise RequestError(f"the URL of an image must be valid, got {brief(url)}: {error}") from error
        if parts.scheme in _SCHEMES:
            return self._fetch(parts, port or _SCHEMES[parts.scheme], deadline.left_s(FETCH_S))
        if parts.scheme == "file":
            return self._read(parts)
        raise RequestError(f"the URL of an image must begin with data:, http:, https: or file:, got {brief(url)}")

    @cached_property
    def _domains(self) -> frozenset[str]:
        return frozenset(domain.lower().rstrip(".") for domain in self.media_domains)

    def _fetch(self, url: SplitResult, port: int, limit_s: float) -> bytes:
        """Return a file from a web server; RequestError if it is not allowed, or does not send the file in time."""
        host = (url.hostname or "").rstrip(".")
        if host not in self._domains:
            known = f"allowed are {sorted(self._domains)}" if self._domains else "none is allowed, only data: URLs"
            raise RequestError(
                f"the URL of an image must have an allowed domain, got {brief(host)}: {known}; the engine's "
                "allowed_media_domains (--allowed-media-domains) names them"
            )
        if url.username is not None or url.password is not None:
            raise RequestError("the URL of an image must have no user name and password")
        until_s = time.monotonic() + limit_s
        target = f"{url.path or '/'}{f'?{url.query}' if url.query else ''}"
        try:
            connection = _connect(host, port, until_s, encrypted=url.scheme == "https")
            with contextlib.closing(connection), _shut_at(until_s, connection.sock):
                if isinstance(connection.sock, ssl.SSLSocket):
                    connection.sock.do_handshake()
                connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "jaxserve"})
                with contextlib.closing(connection.getresponse()) as response:  # it may outlive the connection
                    if response.status != 200:
                        raise RequestError(
                            f"the server of an image must send it with the status 200, without a redirect, got "
                            f"{response.status} from {host}"
                        )
                    return b"".join(_parts(response, host))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, RequestError):
                raise
            reason = "it took too long" if isinstance(error, TimeoutError) else type(error).__name__
            raise RequestError(f"an image must be loaded from {host} in {limit_s:.3g} s, but: {reason}") from error

    def _read(self, url: SplitResult) -> bytes:
        """Return a local file; RequestError if it is outside the allowed directory, or no regular file."""
        if not self.local_path:
            raise RequestError(
                "the URL of an image must not name a local file, as the engine has no allowed_local_media_path "
                "(--allowed-local-media-path)"
            )
        root = os.path.realpath(self.local_path)
        path = os.path.realpath(unquote(url.path).replace("\0", ""))
        if url.netloc not in ("", "localhost") or not Path(path).is_relative_to(root):
            raise RequestError("an image's file must be below allowed_local_media_path; links are followed first")
        try:
            # A link or a pipe that has replaced the file meanwhile is not followed, and not waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise RequestError("an image's file must exist and be readable") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise RequestError("an image's file must be a regular file")
        with open(descriptor, "rb") as file:
            return _within_limit(file.read(decoding.MAX_FILE_BYTES + 1))


def _from_data(url: str) -> bytes:
    """Return the content of a data: URL."""
    header, comma, content = url.partition(",")
    if not comma:
        raise RequestError(f"a data: URL of an image must have a comma before its content, got {brief(url)}")
    if len(content) > 3 * decoding.MAX_FILE_BYTES:
        return _within_limit(content)
    try:
        if not header.lower().endswith(";base64"):
            return _within_limit(unquote_to_bytes(content))
        return _within_limit(base64.b64decode(content, validate=True))
    except (binascii.Error, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"a data: URL of an image must be base64, got {brief(content)}") from error


def _within_limit(data: bytes | str) -> bytes:
    """Return a file's content; RequestError if it is too large."""
    if len(data) > decoding.MAX_FILE_BYTES or isinstance(data, str):
        raise RequestError(f"an image file must have at most {decoding.MAX_FILE_BYTES} bytes")
    return data


def _connect(host: str, port: int, until_s: float, *, encrypted: bool) -> http.client.HTTPConnection:
    """Return a connection to the address that a host name has now; RequestError unless all its addresses are public.

    Args:
        host: name of the host.
        port: its port.
        until_s: time when connecting must have ended.
        encrypted: True for TLS with a certificate for this host; the caller begins it with a handshake.
    """
    addresses = _addresses(host, port, until_s)
    for address in addresses:
        if not is_public(address):
            raise RequestError(f"an image's server must have a public address, got a private one for {brief(host)}")
    connection = http.client.HTTPConnection(host, port)
    # Connected here, as HTTPConnection would resolve the name again, perhaps to another address.
    sock = socket.create_connection((addresses[0], port), timeout=_left_s(until_s))
    if encrypted:
        try:
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
    connection.sock = sock
    return connection


def _addresses(host: str, port: int, until_s: float) -> list[str]:
    """Return the addresses that a host name has now; TimeoutError if they are not there in time.

    The system's resolver takes no deadline, and a thread that waits for it cannot be ended: there are few of them.
    """
    if not _RESOLVERS.acquire(timeout=_left_s(until_s)):
        raise BusyError("the names of other images' hosts are being resolved; try again")
    found: SimpleQueue[list[str] | OSError] = SimpleQueue()

    def resolve() -> None:
        try:
            found.put([str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else socket.gaierror(str(error)))
        finally:
            _RESOLVERS.release()

    threading.Thread(target=resolve, name="jaxserve resolver", daemon=True).start()
    try:
        addresses = found.get(timeout=_left_s(until_s))
    except Empty:
        raise TimeoutError from None
    if isinstance(addresses, OSError):
        raise addresses
    return addresses


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public Internet, also inside IPv6 forms of IPv4 addresses."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:  # deprecated, and global according to Python
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _parts(response: http.client.HTTPResponse, host: str) -> Iterator[bytes]:
    """Yield the parts of a response; RequestError as soon as it has too many bytes."""
    num_bytes = 0
    if response.length is not None and response.length > decoding.MAX_FILE_BYTES:
        raise RequestError(f"an image file must have at most {decoding.MAX_FILE_BYTES} bytes, got {response.length}")
    while part := response.read1(_PART_BYTES):
        num_bytes += len(part)
        if num_bytes > decoding.MAX_FILE_BYTES:
            raise RequestError(f"an image file must have at most {decoding.MAX_FILE_BYTES} bytes, got more from {host}")
        yield part


@contextlib.contextmanager
def _shut_at(until_s: float, sock: socket.socket) -> Iterator[None]:
    """Shut a socket down at this time, if the context lasts as long: a timeout of its own is for each part it reads."""

    def shut() -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's, which also changes what its reader uses

    timer = threading.Timer(max(0.0, until_s - time.monotonic()), shut)
    timer.daemon = True
    timer.start()
    try:
        yield
        _left_s(until_s)
    except (OSError, http.client.HTTPException):
        _left_s(until_s)
        raise
    finally:
        timer.cancel()


def _left_s(until_s: float) -> float:
    """Return the time that is left; TimeoutError if none is."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
