"""Shared stores by themselves: what they delete, whom they trust, and their errors."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.kv_store_config import KVStoreConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduling.kv_cache.shared_store import DirectoryStore, RedisStore, Seal, StoreError
from jaxserve.scheduling.kv_cache.stored_pages import PageKey
from tests.redis_server import RedisServer

KEYS = [PageKey(0, bytes([index]) * 16) for index in range(4)]


def directory_store(path: Path, key: bytes = b"", fingerprint: int = 0, **options: Any) -> tuple[DirectoryStore, Seal]:
    seal = Seal(key, bytes([fingerprint]) * 16)
    return DirectoryStore(path, KVStoreConfig(str(path), **options), seal), seal


def put(store: Any, seal: Seal, key: PageKey, page: bytes = b"page") -> str:
    """Write a page and return its name."""
    name = seal.name(key)
    assert store.write(name, seal.close(key, page))
    return name


def test_names_and_seals_depend_on_key_weights_and_content() -> None:
    seals = [Seal(key, bytes([weights]) * 16) for key in (b"", b"a" * 16, b"b" * 16) for weights in (0, 1)]
    keys = [*KEYS, PageKey(1, KEYS[0].page_hash), PageKey(-1, KEYS[0].page_hash)]
    assert len({seal.name(key) for seal in seals for key in keys}) == len(seals) * len(keys)
    for seal in seals:
        value = seal.close(KEYS[0], b"content")
        assert [other.open(key, value) for other in seals for key in keys].count(b"content") == 1
        assert seal.open(KEYS[0], value) == b"content"
        for index in range(len(value)):
            damaged = value[:index] + bytes([value[index] ^ 4]) + value[index + 1 :]
            assert seal.open(KEYS[0], damaged) is None
            assert seal.open(KEYS[0], value[:index]) is None


def test_old_and_surplus_pages_are_deleted_and_foreign_files_never(tmp_path: Path) -> None:
    page = b"x" * 1000
    limits = {"ttl_s": 100.0}
    store, seal = directory_store(tmp_path, b"k" * 16, **limits)
    others = [directory_store(tmp_path, key, **limits) for key in (b"", b"l" * 16)]
    foreign = [tmp_path / "notes.page", store._own / "notes.page", store._own / "ab" / "notes.txt"]
    theirs = [put(*each, KEYS[0], page) for each in others]
    (store._own / "ab").mkdir()
    for file in foreign:
        file.write_text("mine")
        os.utime(file, (0, 0))
    earlier, earlier_seal = directory_store(tmp_path, b"k" * 16, fingerprint=1, **limits)
    names = [put(earlier, earlier_seal, KEYS[0], page), *[put(store, seal, key, page) for key in KEYS[:3]]]
    for age_s, file in zip((40, 30, 20), (earlier._path(names[0]), *map(store._path, names[1:3])), strict=True):
        os.utime(file, (time.time() - age_s,) * 2)
    assert store.read(names[1]) is not None, "it is used now"
    store._max_bytes = 2500
    store._sweep()
    assert earlier.has(names[:1]) == [False]
    assert store.has(names[1:]) == [True, False, True]
    os.utime(store._path(names[1]), (time.time() - 101,) * 2)
    assert store.has([names[1]]) == [False]
    assert store.read(names[1]) is None
    store._sweep()
    assert not store._path(names[1]).exists()
    assert all(file.read_text() == "mine" for file in foreign)
    assert [each.has([name]) for (each, _), name in zip(others, theirs, strict=True)] == [[True]] * 2


def test_any_error_of_a_disk_fails_one_call_and_no_thread(tmp_path: Path) -> None:
    store, seal = directory_store(tmp_path)
    name = put(store, seal, KEYS[0])
    shutil.rmtree(store._own)
    store._own.write_text("now a file")  # even the temporary file cannot be deleted
    for call in (lambda: store.write(name, b"page"), lambda: store.delete(name)):
        with pytest.raises(StoreError):
            call()
    with pytest.raises(ConfigError, match="kv_store must be a directory"):
        directory_store(Path("/tmp/\0"))


def test_what_is_no_file_is_no_page(tmp_path: Path) -> None:
    store, seal = directory_store(tmp_path)
    names = [put(store, seal, key) for key in KEYS]
    for name in names:
        store._path(name).unlink()
    store._path(names[0]).mkdir()
    store._path(names[1]).symlink_to("/dev/zero")
    store._path(names[2]).symlink_to(store._path(names[2]))
    os.mkfifo(store._path(names[3]))
    assert store.has(names) == [False] * 4
    assert [store.read(name) for name in names] == [None] * 4
    for name in names[1:]:
        assert store.write(name, b"page")
    assert store.has(names[1:]) == [True] * 3


def test_a_consumer_creates_no_directory(tmp_path: Path) -> None:
    seal, config = Seal(b"", bytes(16)), KVStoreConfig(str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="kv_store must be an existing directory with kv_role='kv_consumer'"):
        DirectoryStore(tmp_path / "missing", config, seal, writes=False)
    reader = DirectoryStore(tmp_path, config, seal, writes=False)
    name = seal.name(KEYS[0])
    assert (reader.has([name]), reader.read(name), [*tmp_path.iterdir()]) == ([False], None, [])
    put(*directory_store(tmp_path), KEYS[0])
    assert reader.has([name]) == [True]


def test_pages_in_use_stay_on_a_disk_that_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, seal = directory_store(tmp_path)
    name = put(store, seal, KEYS[0])
    os.utime(store._path(name), (time.time() - 100,) * 2)
    assert store.read(name) is not None
    assert (store._age_s(name) or 0) < 50
    os.utime(store._path(name), (time.time() - 100,) * 2)
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    assert store.read(name) is not None


def test_a_server_with_a_lower_limit_is_full_and_still_read(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "1"):
        config = KVStoreConfig(f"unix:{tmp_path}/socket")
        assert config.redis is not None
        store = RedisStore(config.redis, config, Seal(b"", bytes(16)))
        assert [store.write("name", b"page") for _ in range(2)] == [False, False]
        assert store.read("name") is None
        store.close()


def test_a_user_of_a_server_who_may_only_read_reads(redis: str) -> None:
    config = KVStoreConfig(redis)
    assert config.redis is not None
    seal = Seal(b"", bytes(16))
    store = RedisStore(config.redis, config, seal)
    name = put(store, seal, KEYS[0])
    store._client.execute_command(*["ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+@connection"])
    reader = RedisStore(replace(config.redis, username="reader", password="secret"), config, seal)
    assert reader.has([name]) == [True]
    assert seal.open(KEYS[0], reader.read(name) or b"") == b"page"
    with pytest.raises(StoreError):
        reader.delete(name)
    for each in (store, reader):
        each.close()


def test_a_server_deletes_old_pages_and_takes_none_beyond_its_memory(redis: str) -> None:
    config = KVStoreConfig(redis, ttl_s=0.2)
    assert config.redis is not None
    seal = Seal(b"k" * 16, bytes(16))
    store = RedisStore(config.redis, config, seal)
    name = put(store, seal, KEYS[0])
    assert store.has([name, seal.name(KEYS[1])]) == [True, False]
    assert seal.open(KEYS[0], store.read(name) or b"") == b"page"
    time.sleep(0.4)
    assert store.read(name) is None
    small = RedisStore(config.redis, KVStoreConfig(redis, size_gib=1e-9), seal)
    assert not small.write(name, b"page")
    for each in (store, small):
        each.close()


@pytest.mark.parametrize("ahead_s", [-(10.0**6), 10.0**6])
def test_clocks_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """An engine whose clock is days ahead finds and keeps the pages of others, and deletes what is too old."""
    config, now_s = KVStoreConfig(str(tmp_path), ttl_s=100.0), time.time
    names = [f"{number:040x}" for number in range(3)]
    DirectoryStore(tmp_path, config, Seal(b"", bytes(16))).write(names[0], b"page")
    monkeypatch.setattr(time, "time", lambda: now_s() + ahead_s)
    other = DirectoryStore(tmp_path, config, Seal(b"", bytes(16)))
    assert other.read(names[0]) == b"page"
    other.write(names[1], b"page")
    os.utime(other._path(names[0]), (now_s() - 101,) * 2)
    assert other.has(names) == [False, True, False]
    other._sweep()
    assert [other._path(name).exists() for name in names] == [False, True, False]


def test_errors_of_a_server_are_without_credentials() -> None:
    config = KVStoreConfig("redis://user:secret@127.0.0.1:1/0", timeout_s=0.2)
    assert config.redis is not None
    assert config.redis.password == "secret"
    store = RedisStore(config.redis, config, Seal(b"", bytes(16)))
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1/0") as raised:
        store.read("name")
    assert "secret" not in str(raised.value)
    store.close()
