"""Pages that engines share through a directory or a Redis server: the same tokens, and no error to a request."""

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.kv_store_config import KVStoreConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.core.event_log import replay_log
from jaxserve.errors import ConfigError
from jaxserve.execution import store_pages
from jaxserve.execution.page_media import DiskPages
from jaxserve.execution.page_mover import PageMover
from jaxserve.execution.store_pages import StorePages
from jaxserve.scheduling.kv_cache.shared_store import DirectoryStore, RedisStore, Seal, StoreError
from jaxserve.scheduling.kv_cache.stored_pages import PageKey
from tests import checkpoints
from tests.e2e.sizes import EOS, SIZES, VOCAB_SIZE
from tests.e2e.workloads import generate, tokens

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=6, ignore_eos=True)
PAGE_SIZE = SIZES["page_size"]
PROMPT = tokens(33, "shared")
HIT = 32 // PAGE_SIZE * PAGE_SIZE
Start = Callable[..., DrivenEngine]


@pytest.fixture
def start(llama: Path, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(store: Any = None, **options: Any) -> DrivenEngine:
            own = {"skip_tokenizer_init": True, "kv_store": store or str(tmp_path / "store")}
            engine = DrivenEngine(EngineConfig(**{"model": str(llama), **own, **SIZES, **options}))
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the model of `llama` with other weights."""
    path = tmp_path_factory.mktemp("other")
    checkpoints.write_checkpoint(path, "llama", seed=1, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=EOS)
    return str(path)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a Redis server on a socket of its own."""
    if (server := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("redis")
    with run_redis(server, folder):
        yield f"unix:{folder}/socket"


class run_redis:  # noqa: N801 - a context
    """A running server."""

    def __init__(self, server: str, folder: Path, *options: str) -> None:
        self.socket = folder / "socket"
        given = ("--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder), *options)
        self.process = subprocess.Popen([server, *given], stdout=subprocess.DEVNULL)
        until_s = time.monotonic() + 20
        while not self.socket.exists():
            assert time.monotonic() < until_s, "the server has not begun"
            time.sleep(0.01)

    def __enter__(self) -> "run_redis":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def store_of(engine: DrivenEngine) -> StorePages:
    """Return an engine's shared store."""
    mover = engine.replicas[0].mover
    assert isinstance(mover, PageMover)
    store = mover.media[-1]
    assert isinstance(store, StorePages)
    return store


def fill(engine: DrivenEngine, *prompts: list[int]) -> list[Sequence[int]]:
    """Return the tokens for some prompts, whose pages are in the store afterwards."""
    outputs = generate(engine, list(prompts), GREEDY)
    store_of(engine).sync()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_another_engine_continues_from_the_store(
    start: Start, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = request.getfixturevalue("redis") if kind == "redis" else str(tmp_path / "store")
    first = start(store)
    (ids,) = fill(first, PROMPT)
    assert first.stats.num_stored_pages > 0
    log = tmp_path / "log"
    second = start(store, event_log=str(log))
    (output,) = generate(second, [PROMPT], GREEDY)
    assert output.outputs[0].token_ids == ids
    assert (output.cached_tokens.store, output.cached_tokens.total) == (HIT, HIT)
    (sampled,) = generate(second, [PROMPT], SEEDED)
    (expected,) = generate(first, [PROMPT], SEEDED)
    assert sampled.outputs[0].token_ids == expected.outputs[0].token_ids
    salted = second.add_request("salted", PROMPT, GREEDY, cache_salt="other")
    while second.has_unfinished():
        second.step()
    assert (salted.outputs[0].token_ids, salted.num_cached_tokens) == (ids, 0)
    second.check_integrity()
    second.close()
    assert replay_log(log) > 0


@pytest.mark.long
def test_consumers_only_read(start: Start, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    consumer = start(kv_role="kv_consumer")
    (ids,) = fill(consumer, PROMPT)
    producer = start(kv_role="kv_producer")
    assert generate(producer, [PROMPT], GREEDY)[0].num_cached_tokens == 0, "a consumer has written"
    store_of(producer).sync()
    assert consumer.stats.num_stored_pages == consumer.stats.num_dropped_pages == 0
    late = start(kv_role="kv_consumer")
    (output,) = generate(late, [PROMPT], GREEDY)
    assert (output.cached_tokens.store, output.outputs[0].token_ids) == (HIT, ids)


@pytest.mark.long
def test_damaged_pages_are_computed_again(start: Start, tmp_path: Path) -> None:
    (ids,) = fill(start(), PROMPT)
    pages = sorted((tmp_path / "store").rglob("*.page"))
    for index, page in enumerate(pages):
        content = bytearray(page.read_bytes())
        content[(index * 997) % len(content)] ^= 1
        page.write_bytes(content if index % 2 else content[: len(content) // 2])
    second = start()
    (output,) = generate(second, [PROMPT], GREEDY)
    assert output.outputs[0].token_ids == ids
    assert output.num_cached_tokens == 0
    assert second.stats.num_corrupt_pages > 0
    second.check_integrity()


class BadStore:
    """Store that fails or does not answer."""

    def __init__(self, hangs: bool) -> None:
        self._hangs = hangs

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: object) -> Any:
            if self._hangs:
                time.sleep(1.0)
            raise StoreError("it is broken")

        return fail


@pytest.mark.long
@pytest.mark.parametrize("hangs", [False, True])
def test_a_bad_store_delays_requests_by_its_timeout_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, hangs: bool, tmp_path: Path
) -> None:
    plain = start()
    (expected,) = fill(plain, PROMPT)
    monkeypatch.setattr(StorePages, "__init__", _opening(BadStore(hangs)))
    engine = start({"url": str(tmp_path / "store"), "timeout_s": 0.1})
    for _ in range(2):
        began_s = time.monotonic()
        (output,) = generate(engine, [PROMPT], GREEDY)
        assert output.outputs[0].token_ids == expected
        assert time.monotonic() - began_s < 5
        engine.reset_prefix_cache()
    assert store_of(engine)._is_skipped
    engine.check_integrity()


def _opening(store: Any) -> Callable[..., None]:
    """Return a constructor of `StorePages` with this store."""
    original = StorePages.__init__

    def init(self: StorePages, *args: Any, **options: Any) -> None:
        original(self, *args, **options, new_store=lambda *_: store)

    return init


@pytest.mark.long
def test_a_killed_server_is_skipped_and_used_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if (server := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed")
    monkeypatch.setattr(store_pages, "SKIP_S", 0.05)
    engine = start(f"unix:{tmp_path}/socket")  # there is no server yet
    (ids,) = fill(engine, PROMPT)
    time.sleep(0.1)
    with run_redis(server, tmp_path):
        other = tokens(33, "second")
        (expected,) = fill(engine, other)
        second = start(f"unix:{tmp_path}/socket")
        (output,) = generate(second, [other], GREEDY)
        assert (output.cached_tokens.store, output.outputs[0].token_ids) == (HIT, expected)
    (output,) = generate(second, [PROMPT], GREEDY)
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (0, ids)
    second.check_integrity()


@pytest.mark.long
@pytest.mark.parametrize("waits", ["in memory", "on disk"])
def test_pages_of_earlier_weights_are_not_used_for_later_ones(
    start: Start, other: str, monkeypatch: pytest.MonkeyPatch, waits: str, tmp_path: Path
) -> None:
    (expected,) = generate(start(str(tmp_path / "another"), model=other), [PROMPT], GREEDY)
    is_open, held = threading.Event(), list[Callable[[], None]]()
    if waits == "in memory":
        write = DirectoryStore.write
        monkeypatch.setattr(DirectoryStore, "write", lambda *args: is_open.wait(20) and write(*args))
        engine = start()
    else:
        get = DiskPages.get

        def hold(self: DiskPages, key: PageKey, done: Callable[[Any], None]) -> None:
            get(self, key, done if is_open.is_set() else lambda page: held.append(lambda: done(page)))

        monkeypatch.setattr(DiskPages, "get", hold)
        engine = start(kv_offloading_path=str(tmp_path / "pages"))
    generate(engine, [PROMPT], GREEDY)
    while waits == "on disk" and not held:
        engine.settle()
    engine.update_weights(other)
    (output,) = generate(engine, [PROMPT], GREEDY)
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (expected.outputs[0].token_ids, 0)
    is_open.set()
    for passed_on in held:
        passed_on()
    store_of(engine).sync()
    (late,) = generate(start(model=other), [PROMPT], GREEDY)
    assert late.outputs[0].token_ids == expected.outputs[0].token_ids
    engine.check_integrity()


# The stores themselves

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
    if (server := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed")
    with run_redis(server, tmp_path, "--maxmemory", "1"):
        config = KVStoreConfig(f"unix:{tmp_path}/socket")
        assert config.redis is not None
        store = RedisStore(config.redis, config, Seal(b"", bytes(16)))
        assert [store.write("name", b"page") for _ in range(2)] == [False, False]
        assert store.read("name") is None
        store.close()


def test_a_user_who_may_only_read_reads(redis: str) -> None:
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


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("redis://user:secret@host:99999/0", "url of kv_store must be .* got 'redis://host:99999/0'"),
        ("redis://:secret@host/0?nonsense=1", "url of kv_store must be"),
        ("redis://host?", None),
        ("redis://host/db", "url of kv_store must be"),
        ("http://host", "url of kv_store must be"),
        ("unix:?db=0", "url of kv_store must be"),
        ("unix:/run/redis?db=x", "url of kv_store must be"),
        ("", "url of kv_store must be"),
        (5, "kv_store must be a directory"),
        ({"url": "/tmp", "ttl": 5}, "unsupported kv_store"),
        ({"url": "/tmp", "ttl_s": 0}, "ttl_s of kv_store must be"),
        ({"ttl_s": 5}, "kv_store must have a url"),
        ("redis:/user:secret@host", "url of kv_store must be"),
        ("redis://user:secret", "url of kv_store must be .* got 'redis://...'"),
        ("redis://host:0", "url of kv_store must be"),
        ("redis://host/0?password=secret", "url of kv_store must be .* got 'redis://host/0'"),
        ("redis://host/0?password=x@secret", "url of kv_store must be .* got 'redis://...'"),
        ("redis://user:x?secret@host", "url of kv_store must be .* got 'redis://...'"),
        ("unix:/run/redis?db=0&password=secret", "url of kv_store must be .* got 'unix:/run/redis'"),
        (["redis://:secret@host"], "kv_store must be a directory"),
        ('{"url": "redis://:secret@host"', "kv_store must be a directory"),
        ({"url": ["redis://:secret@host"]}, "url of kv_store must be"),
        ({"urls": "redis://:secret@host"}, "unsupported kv_store"),
        *[({"url": "/tmp", name: 1e300}, f"{name} of kv_store must be") for name in ("ttl_s", "timeout_s", "size_gib")],
    ],
)
def test_bad_options_are_one_line_without_credentials(value: Any, words: str | None) -> None:
    if words is None:
        KVStoreConfig.from_value(value)
        return
    with pytest.raises(ConfigError, match=words) as raised:
        EngineConfig(kv_store=value)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


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


def test_credentials_are_in_no_message(tmp_path: Path) -> None:
    config = KVStoreConfig("redis://user:secret@127.0.0.1:1/0", timeout_s=0.2)
    assert config.redis is not None
    assert config.redis.password == "secret"
    store = RedisStore(config.redis, config, Seal(b"", bytes(16)))
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1/0") as raised:
        store.read("name")
    assert "secret" not in str(raised.value)
    store.close()
    short = tmp_path / "key"
    short.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="key_file of kv_store must have 16 to 64 bytes, got 5"):
        KVStoreConfig("/tmp", key_file=str(short)).read_key()
    assert "secret" not in repr(config)
    with pytest.raises(ConfigError, match=r"kv_store must be None with .*127\.0\.0\.1:1/0") as refused:
        EngineConfig(kv_store=config, sparse_attention={"method": "quest", "budget": 64})
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="kv_role needs kv_store"):
        EngineConfig(kv_role="kv_producer")


class FaultyStore:
    """A directory that fails, forgets or damages a value in 5% of all calls."""

    def __init__(self, store: DirectoryStore, seed: int) -> None:
        self._store, self._random, self.num_faults = store, random.Random(seed), 0

    def _fault(self) -> str | None:
        if self._random.random() >= 0.05:
            return None
        self.num_faults += 1
        return self._random.choice(("error", "lost", "damaged"))

    def has(self, names: Sequence[str]) -> list[bool]:
        found = self._store.has(names)
        match self._fault():
            case "error":
                raise StoreError("it is broken")
            case "lost":
                return [False] * len(names)
            case "damaged":
                return [True] * len(names)
        return found

    def read(self, name: str) -> bytes | None:
        value = self._store.read(name)
        match self._fault():
            case "error":
                raise StoreError("it is broken")
            case "lost":
                return None
            case "damaged" if value is not None:
                index = self._random.randrange(len(value))
                return value[:index] + bytes([value[index] ^ 1]) + value[index + 1 :]
        return value

    def write(self, name: str, value: bytes) -> bool:
        match self._fault():
            case "error":
                raise StoreError("it is broken")
            case "lost":
                return False
            case "damaged":
                return self._store.write(name, value[: len(value) // 2])
        return self._store.write(name, value)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def close(self) -> None:
        pass


@pytest.mark.long
def test_a_thousand_requests_with_faults_lose_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path
) -> None:
    """Two engines that share a store with faults: the tokens of one without, and all pages at the end."""
    monkeypatch.setattr(store_pages, "SKIP_S", 0.002)
    prompts = [tokens(9 + number % 13, f"prompt {number % 60}") for number in range(500)]
    plain = DrivenEngine(EngineConfig(str(llama), skip_tokenizer_init=True, **SIZES))
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in generate(plain, prompts, short)]
    plain.close()
    stores: list[FaultyStore] = []
    original = StorePages.__init__

    def init(self: StorePages, *args: Any, **options: Any) -> None:
        def new_store(config: KVStoreConfig, seal: Seal) -> FaultyStore:
            stores.append(FaultyStore(DirectoryStore(tmp_path / "faulty", config, seal), len(stores)))
            return stores[-1]

        original(self, *args, **options, new_store=new_store)

    monkeypatch.setattr(StorePages, "__init__", init)
    engines = [start(str(tmp_path / "faulty")) for _ in range(2)]
    for engine in engines:
        for first in range(0, len(prompts), 50):
            outputs = generate(engine, prompts[first : first + 50], short)
            assert [output.outputs[0].token_ids for output in outputs] == expected[first : first + 50]
        engine.check_integrity()
        assert engine.occupancy.num_pages_used == 0
        assert engine.stats.cached_tokens.store > 0
    assert sum(store.num_faults for store in stores) > 20
