"""Peer store: pages in an engine's memory that others read over TCP; wrong keys, other weights, and ends of peers."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.kv_store_config import KVStoreConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.kv_cache import peer_store
from jaxserve.scheduling.kv_cache.peer_store import HolderStore, ReaderStore
from jaxserve.scheduling.kv_cache.shared_store import Seal, SharedStore, StoreError, open_store
from jaxserve.scheduling.kv_cache.stored_pages import PageKey
from tests.parameters import mainly
from tests.waiting import until

KEY, WEIGHTS = b"k" * 16, bytes(range(16))
Open = Callable[..., Any]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def open_at(tmp_path: Path) -> Iterator[Open]:
    """Open a store at one port: the engine that holds the pages, or one that reads them."""
    port = free_port()
    with ExitStack() as stack:

        def open_at(*, writes: bool = False, key: bytes = b"", weights: bytes = WEIGHTS, **options: Any) -> SharedStore:
            config = KVStoreConfig(f"tcp://127.0.0.1:{port}", **options)
            store = open_store(config, Seal(key, weights), writes=writes)
            stack.callback(store.close)
            return store

        yield open_at


def test_pages_are_those_written_and_each_byte_is_sent_once(open_at: Open) -> None:
    holder, readers, rng = open_at(writes=True), [open_at() for _ in range(2)], random.Random(1)
    assert isinstance(holder, HolderStore)
    pages = {f"{number:040x}": rng.randbytes(rng.choice((0, 1, 10**5))) for number in range(40)}
    for name, page in pages.items():
        assert holder.write(name, page)
    names = [*pages, "f" * 40]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(readers[index % 2].read, name) for index, name in enumerate(names)]
        assert [each.result() for each in asked] == [*pages.values(), None]
    assert readers[0].has(names) == [True] * 40 + [False]
    assert readers[0].has(names[::-1] * 1000) == [False, *[True] * 40] * 1000, "more than one message holds"
    assert holder.pages.num_sent_bytes == sum(map(len, pages.values()))
    assert not readers[0].write("a", b"page"), "only the holder has memory for pages"
    holder.delete(names[0])
    assert readers[1].has(names[:2]) == [False, True]


def test_a_connection_in_use_while_its_reader_closes_is_closed_after_the_answer(
    open_at: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, reader, opened = open_at(writes=True), open_at(), []
    assert isinstance(reader, ReaderStore)
    connect, page = reader._connect, reader._page
    monkeypatch.setattr(reader, "_connect", lambda: opened.append(connect()) or opened[-1])
    monkeypatch.setattr(reader, "_page", lambda *given: reader.close() or page(*given))
    assert holder.write("a", b"page")
    assert reader.read("a") == b"page"
    assert [connection.fileno() for connection in opened] == [-1]


def test_old_pages_and_those_beyond_the_memory_are_forgotten(open_at: Open) -> None:
    holder = open_at(writes=True, ttl_s=0.3, size_gib=3000 / 2**30)
    assert [holder.write(name, bytes(1000)) for name in "abc"] == [True] * 3
    assert holder.read("a") is not None
    assert holder.write("d", bytes(900))
    assert holder.has([*"abcd"]) == [True, False, True, True], "b was used longest ago"
    assert not holder.write("e", bytes(3001))
    time.sleep(0.2)
    assert holder.read("c") is not None
    time.sleep(0.2)
    assert holder.has([*"acd"]) == [False, True, False]


def test_replicas_and_later_weights_share_one_address(open_at: Open) -> None:
    first, second = open_at(writes=True), open_at(writes=True, weights=bytes(16))
    page_key = PageKey(0, bytes(16))
    seal = Seal(b"", bytes(16))
    assert second.write(seal.name(page_key), seal.close(page_key, b"page"))
    first.close()
    value = open_at(weights=bytes(16)).read(seal.name(page_key))
    assert value is not None
    assert seal.open(page_key, value) == b"page"


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"weights": bytes(16)}, f"weights {WEIGHTS.hex()} here, and of key .*, weights {bytes(16).hex()} there"),
        ({"key": b"x" * 16}, "pages are of key .* here, and of key"),
    ],
)
def test_other_keys_and_weights_are_refused_with_both(open_at: Open, theirs: dict[str, Any], words: str) -> None:
    open_at(writes=True, key=KEY)
    with pytest.raises(StoreError, match=words):
        open_at(**{"key": KEY} | theirs).has(["a"])


def test_silent_connections_are_closed_and_opened_again(open_at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "_IDLE_S", 0.05)
    holder, reader = open_at(writes=True), open_at()
    assert holder.write("a", b"page")
    assert reader.read("a") == b"page"
    until(lambda: not holder.pages._connections, 5.0)
    assert reader.read("a") == b"page"


def test_a_slow_handshake_ends_in_time(open_at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "_HANDSHAKE_S", 0.1)
    holder, reader = open_at(writes=True), open_at()
    with socket.create_connection(reader._address, 5) as connection, suppress(OSError):
        connection.sendall(b"\x00\x00\x10\x00")
        until(lambda: (connection.send(b" ") and time.sleep(0.02)) or not holder.pages._connections, 5.0)
    assert not holder.pages._connections


def test_connections_are_accepted_again_after_an_error(open_at: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "_RETRY_S", 0.01)
    accept, errors = socket.socket.accept, [OSError(24, "Too many open files")] * 2

    def failing(self: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    holder, reader = open_at(writes=True), open_at()
    assert holder.write("a", b"page")
    assert reader.read("a") == b"page"
    assert not errors


class _Claimed(Seal):
    """A seal that names a key which it does not have."""

    def __init__(self) -> None:
        super().__init__(b"guess" * 4, WEIGHTS)
        self.key_id = Seal(KEY, WEIGHTS).key_id


@pytest.mark.parametrize("holder_claims", [False, True])
def test_who_only_claims_a_key_gets_and_gives_no_page(holder_claims: bool) -> None:
    config = KVStoreConfig(f"tcp://127.0.0.1:{free_port()}")
    assert config.peer is not None
    seals: list[Seal] = [Seal(KEY, WEIGHTS), _Claimed()]
    holder = HolderStore(config.peer, config, seals[holder_claims])
    holder.write("a", b"page")
    reader = ReaderStore(config.peer, config, seals[not holder_claims], StoreError)
    with pytest.raises(StoreError, match="does not have the key"):
        reader.read("a")
    assert not holder.pages.num_sent_bytes
    holder.close()


def test_a_key_is_needed_beyond_this_machine() -> None:
    for writes in (False, True):
        with pytest.raises(ConfigError, match="beyond this machine, needs key_file"):
            open_store(KVStoreConfig("tcp://192.0.2.1:7000"), Seal(b"", WEIGHTS), writes=writes)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match="an address to listen at"):
        open_store(KVStoreConfig(f"tcp://127.0.0.1:{port}"), Seal(b"", WEIGHTS), writes=True)


@pytest.mark.parametrize(
    "url", ["tcp://", "tcp://host", "tcp:host:1", "tcp://host:0", "tcp://u@host:1", "tcp://host:1/a"]
)
def test_wrong_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"url of kv_store must be .*tcp://HOST:PORT"):
        KVStoreConfig(url)


def test_readers_outlive_the_holder_and_find_the_next_one(open_at: Open) -> None:
    reader, holder = open_at(), open_at(writes=True)
    assert holder.write("a", b"page")
    assert reader.read("a") == b"page"
    holder.close()
    with pytest.raises(StoreError, match="has failed"):
        reader.read("a")
    next_holder = open_at(writes=True)
    assert reader.has(["a"]) == [False], "its memory is gone"
    assert next_holder.write("a", b"other")
    assert reader.read("a") == b"other"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4,
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x01{",
        b"\x00\x00\x00\x02{}",
        b'\x00\x00\x00\x0d{"version":2}',
        b"",
    ],
)
def test_nonsense_ends_only_its_own_connection(open_at: Open, data: bytes) -> None:
    holder, reader = open_at(writes=True), open_at()
    holder.write("a", b"page")
    address = reader._address
    with suppress(OSError), socket.create_connection(address, 5) as connection:  # reset if not everything was read
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert not answer or "error" in json.loads(answer[4:])
    assert reader.read("a") == b"page"


@pytest.mark.parametrize("answer", mainly([b""], b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02{}", b"\x7f\xff\xff\xff"))
def test_a_holder_that_says_nonsense_or_nothing_is_an_error_in_time(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(1000)
                time.sleep(0.4)

        thread = threading.Thread(target=serve)
        thread.start()
        config = KVStoreConfig(f"tcp://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.1)
        began_s = time.monotonic()
        with pytest.raises(StoreError, match="has failed"):
            open_store(config, Seal(b"", WEIGHTS), writes=False).read("a")
        assert time.monotonic() - began_s < 0.35
        thread.join()
