"""Sources of images, one test per class of attack: none of them reaches what the operator has not allowed."""

import base64
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from jaxserve.errors import BusyError, RequestError
from jaxserve.images import decoding, loading
from jaxserve.images.deadline import Deadline
from jaxserve.images.loading import ImageSources, is_public

FILE = b"an image"
ANY = ImageSources(["images.example", "LOCALHOST."])


def load(url: str, sources: ImageSources = ANY, limit_s: int | float = 60) -> bytes:
    return sources.load(url, Deadline(limit_s))


class Handler(BaseHTTPRequestHandler):
    requests: list[tuple[str, str]] = []  # noqa: RUF012 - one server

    def do_GET(self) -> None:
        self.requests.append((self.path, self.headers["Host"]))
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data")
            self.end_headers()
            return
        if self.path == "/slow-header":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Y: ")
            self.slowly()
            return
        self.send_response(200)
        if self.path == "/large":
            self.send_header("Content-Length", str(10**9))
        self.end_headers()
        if self.path == "/endless":
            for _ in range(1000):
                self.wfile.write(bytes(1000))
        elif self.path == "/slow":
            self.slowly()
        else:
            self.wfile.write(FILE)

    def slowly(self) -> None:
        for _ in range(500):
            self.wfile.write(b"x")
            time.sleep(0.02)

    def log_message(self, *args: object) -> None:
        del args


@contextlib.contextmanager
def serving(certificate: Path | None = None) -> Iterator[int]:
    """Yield the port of a server, with TLS if there is a certificate (and its key, in one file)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # clients that leave
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture
def loopback_is_public(monkeypatch):
    """Let the test's server stand for one of the Internet."""
    monkeypatch.setattr(loading, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    return resolving(monkeypatch, "127.0.0.1")


def resolving(monkeypatch, *addresses: str) -> list[str]:
    """Resolve every name to these addresses, and each further time to the next ones; return the names as they come."""
    names: list[str] = []
    real = socket.getaddrinfo

    def resolve(host, port, *args, **kwargs):
        if host in addresses:  # an address, of a connection
            return real(host, port, *args, **kwargs)
        names.append(host)
        address = addresses[min(len(names), len(addresses)) - 1]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return names


@pytest.mark.parametrize("header", ["data:image/png;base64", "DATA:;base64", "data:text/html;charset=x;base64"])
def test_data_urls_are_always_allowed(header):
    assert load(f"{header},{base64.b64encode(FILE).decode()}", ImageSources()) == FILE


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/a.png",
        "https://images.example/a.png",
        "file:///etc/passwd",
        f"file://{Path('pyproject.toml').absolute()}",
        "ftp://images.example/a.png",
        "gopher://images.example:70/x",
        "/etc/passwd",
        "a.png",
        "data:image/png;base64",
        "data:image/png;base64,!!!",
        "data:image/png;base64,YQ",
    ],
)
def test_by_default_nothing_else_is_loaded(url, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(RequestError):
        load(url, ImageSources())


def test_files_of_allowed_domains_are_loaded(port, loopback_is_public):
    assert load(f"http://images.example:{port}/a.png?b=c") == FILE
    assert Handler.requests[-1] == ("/a.png?b=c", f"images.example:{port}")
    assert loopback_is_public == ["images.example"], "a name is resolved once"
    assert load(f"HTTP://Images.Example.:{port}/", ImageSources(["IMAGES.example."])) == FILE


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/",
        "http://images.example.evil.example/",
        "http://evilimages.example/",
        "http://images.example@evil.example/",
        "http://evil.example\\@images.example/",
        "http://evil.example#@images.example/",
        "http://evil.example/?@images.example",
        "http://user:pass@images.example/",
        "http://images.example\r\nHost: evil.example/",
        "http://images.example:99999/",
        "http://[::1/",
        "http:///a.png",
        "http://127.0.0.1/",
    ],
)
def test_urls_that_parsers_may_read_differently_are_refused(url, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(RequestError):
        load(url)


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
    *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1"),
    *("64:ff9b::7f00:1", "2002:7f00:1::", "::ffff:169.254.169.254", "::10.0.0.1", "fec0::1", "fe80::1%lo"),
    "2001:0:808:808:0:0:f7f7:f7f7",  # Teredo, with public addresses inside
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused_after_resolution(address, monkeypatch):
    """SSRF by a domain whose name server returns an inner address."""
    resolving(monkeypatch, address)
    monkeypatch.setattr(socket, "create_connection", None)
    with pytest.raises(RequestError, match="public address"):
        load("http://images.example/a.png")


def test_one_private_address_among_several_is_refused(monkeypatch):
    both = [(2, 1, 6, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: both)
    monkeypatch.setattr(socket, "create_connection", None)
    with pytest.raises(RequestError, match="public address"):
        load("http://images.example/")


NUMBERS = ["2130706433", "017700000001", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:7f00:1]", "0"]


@pytest.mark.parametrize("host", NUMBERS)
def test_addresses_written_as_other_numbers_are_refused(host, monkeypatch):
    """Decimal, octal, hexadecimal and short forms, which the system's resolver reads, also as an allowed domain."""
    monkeypatch.setattr(socket, "create_connection", None)
    with pytest.raises(RequestError, match="allowed domain"):
        load(f"http://{host}/")
    with pytest.raises(RequestError, match="public address"):
        load(f"http://{host}/", ImageSources([host.strip("[]")]))


PUBLIC = ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::93.184.216.34", "2002:5db8:d822::"]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address):
    assert is_public(address)


def test_the_resolved_address_is_the_one_connected_to(monkeypatch):
    """DNS rebinding: a second resolution would return another address, and does not happen."""
    resolving(monkeypatch, "93.184.216.34", "127.0.0.1")
    connected = []

    def connect(address, timeout):
        connected.append(address)
        assert 0 < timeout <= loading.FETCH_S
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RequestError, match="ConnectionRefusedError"):
        load("http://images.example/")
    assert connected == [("93.184.216.34", 80)]


def test_redirects_are_errors(port, loopback_is_public):
    Handler.requests.clear()
    with pytest.raises(RequestError, match="without a redirect, got 302"):
        load(f"http://images.example:{port}/redirect")
    assert Handler.requests == [("/redirect", f"images.example:{port}")]
    assert loopback_is_public


@pytest.mark.parametrize("path", ["large", "endless"])
def test_files_are_read_only_up_to_the_limit(path, port, loopback_is_public, monkeypatch):
    del loopback_is_public
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 10_000)
    with pytest.raises(RequestError, match="at most 10000 bytes"):
        load(f"http://images.example:{port}/{path}")


def test_other_sources_have_the_same_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(decoding, "MAX_FILE_BYTES", 8)
    sources = ImageSources(local_path=str(tmp_path))
    for size in (8, 9):
        data = b"an image."[:size]
        (tmp_path / "a").write_bytes(data)
        for url in (f"data:;base64,{base64.b64encode(data).decode()}", f"data:,{quote(data)}", f"file://{tmp_path}/a"):
            if size == 8:
                assert load(url, sources) == data
                continue
            with pytest.raises(RequestError, match="at most 8 bytes"):
                load(url, sources)
    monkeypatch.setattr(base64, "b64decode", None)  # what is certainly too long is not even decoded
    with pytest.raises(RequestError, match="at most 8 bytes"):
        load(f"data:;base64,{'A' * 25}")


@pytest.mark.parametrize("path", ["slow", "slow-header"])
def test_slow_servers_are_left_at_the_deadline(path, port, loopback_is_public, monkeypatch):
    del loopback_is_public
    monkeypatch.setattr(loading, "FETCH_S", 0.1)
    began_s = time.monotonic()
    with pytest.raises(RequestError, match="it took too long"):
        load(f"http://images.example:{port}/{path}")
    assert time.monotonic() - began_s < 5


def test_names_that_are_not_resolved_in_time(monkeypatch):
    """The system's resolver has no deadline: its threads are left, and counted."""
    may_end, resolvers = threading.Event(), threading.BoundedSemaphore(1)
    monkeypatch.setattr(loading, "_RESOLVERS", resolvers)
    monkeypatch.setattr(loading, "FETCH_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: may_end.wait() and [])
    began_s = time.monotonic()
    with pytest.raises(RequestError, match="it took too long"):
        load("http://images.example/")
    with pytest.raises(BusyError, match="being resolved"):
        load("http://images.example/")
    assert time.monotonic() - began_s < 1
    may_end.set()
    assert resolvers.acquire(timeout=5)


def test_names_that_do_not_exist(monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(RequestError, match="gaierror"):
        load("http://images.example/")


def test_slow_handshakes_are_left_at_the_deadline(loopback_is_public, monkeypatch):
    del loopback_is_public
    monkeypatch.setattr(loading, "FETCH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                for byte in b"\x16\x03\x03\x40\x00" + bytes(495):  # the record of a long TLS message
                    connection.sendall(bytes([byte]))
                    time.sleep(0.02)

        thread = threading.Thread(target=answer)
        thread.start()
        began_s = time.monotonic()
        with pytest.raises(RequestError, match="it took too long"):
            load(f"https://images.example:{server.getsockname()[1]}/")
        assert time.monotonic() - began_s < 5
        thread.join()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_certificates_are_for_the_host_and_trusted(loopback_is_public, monkeypatch, tmp_path):
    del loopback_is_public
    file, subject = tmp_path / "server.pem", ("-subj", "/CN=a", "-addext", "subjectAltName=DNS:images.example")
    new = ("openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *subject)
    subprocess.run([*new, "-keyout", str(file), "-out", str(tmp_path / "own")], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (tmp_path / "own").read_bytes())
    with serving(file) as port:
        with pytest.raises(RequestError, match="SSLCertVerificationError"):
            load(f"https://images.example:{port}/")
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        assert load(f"https://images.example:{port}/") == FILE
        with pytest.raises(RequestError, match="SSLCertVerificationError"):
            load(f"https://localhost:{port}/")


def test_a_prompt_without_time_loads_nothing(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(RequestError, match="images of a prompt must be loaded and decoded in 0 s"):
        load("http://images.example/", limit_s=0)


def test_errors_of_servers_that_speak_no_http(loopback_is_public):
    del loopback_is_public
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RequestError, match="BadStatusLine"):
            load(f"http://images.example:{server.getsockname()[1]}/")
        thread.join()


def test_local_files_only_below_the_allowed_directory(tmp_path, monkeypatch):
    allowed, outside = tmp_path / "allowed", tmp_path / "allowed-not"
    for folder in (allowed, outside):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "an image.png").write_bytes(FILE)
    (allowed / "link.png").symlink_to(outside / "inner" / "an image.png")
    (allowed / "inner link.png").symlink_to(allowed / "inner" / "an image.png")
    os.mkfifo(allowed / "pipe")
    sources = ImageSources(local_path=str(allowed))
    assert load(f"file://{allowed}/inner/an%20image.png", sources) == FILE
    assert load(f"file://localhost{allowed}/inner%20link.png", sources) == FILE
    for path in (
        *(f"{outside}/inner/an%20image.png", f"{allowed}/../allowed-not/inner/an%20image.png", f"{allowed}/link.png"),
        *(f"{allowed}/%2e%2e/allowed-not/inner/an%20image.png", f"{allowed}/absent.png", f"{allowed}/inner"),
        *(f"{allowed}/pipe", "/etc/passwd", "/proc/self/environ", f"{allowed}/a%00.png"),
    ):
        with pytest.raises(RequestError, match="file must"):
            load(f"file://{path}", sources)
    with monkeypatch.context() as late:
        late.setattr(os.path, "realpath", lambda path: path)  # a link that has come after it was looked at
        with pytest.raises(RequestError, match="must exist and be readable"):
            load(f"file://{allowed}/link.png", sources)
    with pytest.raises(RequestError, match="surrogates"):
        load(f"file://{allowed}/\ud800.png", sources)
    with pytest.raises(RequestError, match="file must"):
        load(f"file://evil.example{allowed}/inner/an%20image.png", sources)
