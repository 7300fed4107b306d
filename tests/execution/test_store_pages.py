"""Pages in a shared store without an engine: damaged ones, and pages that wait when the engine ends."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.api.kv_store_config import KVStoreConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.execution.page_bytes import PageBytes
from jaxserve.execution.store_pages import DAMAGED_S, StorePages
from jaxserve.scheduling.kv_cache.shared_store import DirectoryStore, Seal
from jaxserve.scheduling.kv_cache.stored_pages import PageKey

KEYS = [PageKey(0, bytes([index]) * 16) for index in range(8)]
TIMEOUT_S = 1.0  # a busy machine may pause a thread for long


def opened(path: Path, *, writes: bool = True) -> tuple[StorePages, EngineStats]:
    """Return the pages in a directory, and their totals."""
    stats, page_bytes = EngineStats(), PageBytes([jax.ShapeDtypeStruct((64,), np.uint8)])
    config = KVStoreConfig(str(path), timeout_s=TIMEOUT_S)
    return StorePages(config, lambda: Seal(b"", bytes(16)), 100, page_bytes, None, stats, writes=writes), stats


def put_all(store: StorePages) -> None:
    for index, key in enumerate(KEYS):
        store.put(key, [np.full(64, index, np.uint8)], lambda _: None)


def answer(ask: Callable[..., None], question: Any) -> Any:
    """Return the answer to a question that another thread answers."""
    answered, found = threading.Event(), list[Any]()
    ask(question, lambda value: (found.append(value), answered.set()))
    assert answered.wait(20)
    return found[0]


def contents(path: Path) -> dict[Path, tuple[bytes, int]]:
    """Return all files below a directory, with their times."""
    return {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in path.rglob("*.page")}


@pytest.mark.parametrize("sees_deletion", [False, True])
def test_producers_write_damaged_pages_again_and_consumers_read_these(tmp_path: Path, sees_deletion: bool) -> None:
    store, _ = opened(tmp_path)
    put_all(store)
    store.close()
    for file in sorted(contents(tmp_path))[:3]:
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    before = contents(tmp_path)
    consumer, consumed = opened(tmp_path, writes=False)
    assert all(answer(consumer.find, KEYS))
    found = [answer(consumer.get, key) for key in KEYS]
    assert [page is None for page in found].count(True) == consumed.num_corrupt_pages == 3
    assert contents(tmp_path) == before
    intact = [page is not None for page in found]
    assert answer(consumer.find, KEYS) == intact, "it does not read them again"
    producer, produced = opened(tmp_path)
    for index, key in enumerate(KEYS):
        page = answer(producer.get, key)
        assert page is None or page[0].tolist() == [index] * 64
    assert len(contents(tmp_path)) == len(KEYS) - 3
    if sees_deletion:
        assert answer(consumer.find, KEYS) == intact
    put_all(producer)
    producer.close()
    assert (len(contents(tmp_path)), produced.num_stored_pages) == (len(KEYS), 3)
    if not sees_deletion:
        assert answer(consumer.find, KEYS) == intact
        consumer._damaged = {name: read_again_s - DAMAGED_S for name, read_again_s in consumer._damaged.items()}
    assert all(answer(consumer.find, KEYS))
    assert [answer(consumer.get, key)[0][0] for key in KEYS] == [*range(len(KEYS))]
    consumer.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_waiting_pages_are_written_or_counted(monkeypatch: pytest.MonkeyPatch, hangs: bool, tmp_path: Path) -> None:
    ends, write = threading.Event(), DirectoryStore.write

    def slow(self: DirectoryStore, name: str, value: bytes) -> bool:
        return ends.wait(20 if hangs else TIMEOUT_S / 7) or write(self, name, value)

    monkeypatch.setattr(DirectoryStore, "write", slow)
    store, stats = opened(tmp_path)
    put_all(store)
    began_s = time.monotonic()
    store.close()
    assert time.monotonic() - began_s < 10
    ends.set()
    counts = stats.num_stored_pages, stats.num_dropped_pages, len(contents(tmp_path))
    assert counts == ((0, len(KEYS), 0) if hangs else (len(KEYS), 0, len(KEYS)))
