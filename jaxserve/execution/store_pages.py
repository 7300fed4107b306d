"""StorePages: the medium of pages in a shared store, which may be slow, full or gone at any time.

Threads read and write, and nothing waits for them for long: a store without an answer for a while is skipped, its
pages are computed, and new ones are not written to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import jax

from jaxserve.api.kv_store_config import KVStoreConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.errors import ConfigError
from jaxserve.execution.page_bytes import Page, PageBytes
from jaxserve.execution.page_media import HALF_LIFE_S, NEW_FRACTION, counting, is_whole
from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.shared_store import Seal, SharedStore, StoreError, open_store
from jaxserve.scheduling.kv_cache.stored_pages import PageKey, StoredPages

logger = logging.getLogger(__name__)

Awaited = tuple[Callable[[], Any], Callable[[Any], None]]  # a question, and what is called with its answer
Found = Sequence[bool] | None  # for each key whether the store has it; None if it has not answered

MAX_UNWRITTEN_PAGES = 1024  # pages that wait to be written; with more, pages are not stored
MAX_DAMAGED_PAGES = 4096  # damaged pages that a consumer remembers
DAMAGED_S = 60.0  # time for which it does not ask for one, unless it is missing meanwhile: producers write it again
SKIP_S = 10.0  # time for which a store that has not answered is not asked
SYNC_S = 30.0  # maximum time to wait until all pages are written
CLOSE_S = 10.0  # the same before the engine ends
NUM_READERS = 4


class StorePages:
    """Pages in a shared store.

    Args:
        config: options of the store.
        new_seal: returns the seal of the weights in use.
        num_pages: pages that the store may have, as far as this engine plans.
        page_bytes: conversion of pages.
        state_bytes: conversion of state snapshots; None without recurrent layers.
        stats: totals to which pages are added.
        writes: True to write pages, and to delete damaged ones; False to change nothing in the store.
        new_store: opens the store.
    """

    def __init__(
        self,
        config: KVStoreConfig,
        new_seal: Callable[[], Seal],
        num_pages: int,
        page_bytes: PageBytes,
        state_bytes: PageBytes | None,
        stats: EngineStats,
        *,
        writes: bool = True,
        new_store: Callable[[KVStoreConfig, Seal], SharedStore] | None = None,
    ) -> None:
        self._config, self._new_seal = config, new_seal
        self._new_store = new_store or partial(open_store, writes=writes)
        self._num_pages, self._stats = num_pages, stats
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self._writes = writes
        seal = new_seal()
        self._current: tuple[SharedStore, Seal] | None = (self._new_store(config, seal), seal)
        self._unwritten: dict[PageKey, Page] = {}
        self._num_unwritten = 0  # pages that wait to be written, of earlier weights too
        self._gives_up = False  # True after a close without time for the pages that wait
        self._damaged: dict[str, float] = {}  # names of damaged pages, the latest last, and when they are read again
        self._tickets, self._waiting = count(), dict[int, Awaited]()
        self._progress_s, self._skip_until_s = 0.0, 0.0  # time of the last answer; when the store is asked again
        self._read_s = self._measured_s = 0.0  # mean time to read a page; when the last read has ended
        self._to_read, self._to_write = SimpleQueue[Any](), SimpleQueue[Any]()
        self._threads = [
            threading.Thread(target=_work, args=(tasks,), name="jaxserve store", daemon=True)
            for tasks in (self._to_write, *[self._to_read] * NUM_READERS)
        ]
        for thread in self._threads:
            thread.start()
        self._is_closed = False

    @property
    def pages(self) -> str:
        """Identity of the pages, by weights and layout; empty if none are shared."""
        return "" if self._current is None else self._current[1].fingerprint.hex()

    def new_tier(self) -> StoredPages:
        """Return an empty index: what the store has is asked for each prompt."""
        state_pages = 1 if self._state_bytes is None else -(-self._state_bytes.size // self._page_bytes.size)
        return StoredPages(
            "store", self._num_pages, outlives_device=True, state_pages=state_pages, is_read_only=not self._writes
        )

    # Lookups

    def find(self, keys: Sequence[PageKey], done: Callable[[Found], None]) -> None:
        """Begin to look for pages; `done` is called with what is there, or None, possibly on another thread."""
        self._ask(lambda: self._find(keys), done)

    def _find(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return for each page whether the store has it, or will; on a thread."""
        if self._current is None:
            return [False] * len(keys)
        store, seal = self._current
        names = [seal.name(key) for key in keys]
        found = store.has(names)
        if self._damaged:
            found = [self._is_readable(name, is_there) for name, is_there in zip(names, found, strict=True)]
        return [is_there or key in self._unwritten for key, is_there in zip(keys, found, strict=True)]

    def _is_readable(self, name: str, is_there: bool) -> bool:
        """Return whether to read a page that may have been found damaged; on a thread."""
        with counting:
            if not is_there:
                self._damaged.pop(name, None)
            return is_there and self._damaged.get(name, 0.0) <= time.monotonic()

    # A medium's methods

    def put(self, key: PageKey, page: Page, done: Callable[[bool], None]) -> bool:
        """Have a thread write a page; False if too many wait, or the store is skipped."""
        current = self._current
        if current is None or len(self._unwritten) >= MAX_UNWRITTEN_PAGES or self._is_skipped:
            return False
        self._unwritten[key] = page
        with counting:
            self._num_unwritten += 1
        self._to_write.put(lambda: done(self._write(current, key, page)))
        return True

    def get(self, key: PageKey, done: Callable[[Page | None], None]) -> None:
        """Return a page that waits to be written, or have a thread read it."""
        if (page := self._unwritten.get(key)) is not None:
            done(page if is_whole(page) else None)
        else:
            self._ask(lambda: self._read(key), done)

    def page_s(self) -> float:
        """Return the mean time to read a page; without new reads it decays, so that a slow store is tried again."""
        return self._read_s * 0.5 ** ((time.monotonic() - self._measured_s) / HALF_LIFE_S)

    def poll(self) -> None:
        """Skip the store if it has not answered for too long."""
        if self._waiting and time.monotonic() - self._progress_s > self._config.timeout_s:
            self._skip(f"it has not answered within {self._config.timeout_s} s")
            for ticket in list(self._waiting):
                if (awaited := self._waiting.pop(ticket, None)) is not None:
                    awaited[1](None)

    def delete(self, key: PageKey) -> None:
        """Do nothing: others may use the page."""

    def clear(self) -> None:
        """Do nothing: others may use the pages."""

    def use_weights(self) -> None:
        """Continue with the pages of the weights in use."""
        current, self._current = self._current, None
        self._unwritten = {}  # what waits is written for the earlier weights, and must not be read for these
        if current is not None:
            self._to_write.put(current[0].close)
        try:
            seal = self._new_seal()
            self._current = self._new_store(self._config, seal), seal
        except ConfigError as error:
            logger.warning("no KV pages are shared: %s", error)

    def forget_device(self) -> None:
        """Do nothing: pages that cannot be read from the device are not written."""

    def sync(self) -> bool:
        """Wait until the store has all pages that were given to it, if it takes them; callable from any thread."""
        if self._is_closed:
            return True
        written = threading.Event()
        self._to_write.put(written.set)
        return written.wait(SYNC_S)

    def close(self) -> None:
        """Write the stored pages, unless the store is too slow, and end the threads.

        The store has CLOSE_S for all pages, and `timeout_s` for each. Pages that it has not taken count as dropped.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._to_write.put(None)
        for _ in range(NUM_READERS):
            self._to_read.put(None)
        writer, *readers = self._threads
        end_s, num_left = time.monotonic() + CLOSE_S, self._num_unwritten
        while writer.is_alive() and (rest_s := end_s - time.monotonic()) > 0:
            writer.join(min(self._config.timeout_s, rest_s))
            if self._num_unwritten == num_left:
                break
            num_left = self._num_unwritten
        with counting:
            self._gives_up, num_lost = True, self._num_unwritten
            self._stats.num_dropped_pages += num_lost
        if num_lost:
            logger.warning("%d pages are not in the store %s, which is too slow", num_lost, self._config.shown)
        for thread in readers:
            thread.join(self._config.timeout_s)
        current, self._current = self._current, None
        if current is not None and not any(thread.is_alive() for thread in self._threads):
            current[0].close()

    @property
    def _is_skipped(self) -> bool:
        """True for a while after the store has failed."""
        return time.monotonic() < self._skip_until_s

    def _skip(self, reason: object) -> None:
        """Do not ask the store for a while."""
        if not self._is_skipped:
            logger.warning("the store of KV pages %s is skipped for %s s: %s", self._config.shown, SKIP_S, reason)
        self._skip_until_s = time.monotonic() + SKIP_S

    def _ask(self, question: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Have a thread ask the store, and pass the answer on, or None without one."""
        if self._is_skipped or self._is_closed:
            done(None)
            return
        if not self._waiting:
            self._progress_s = time.monotonic()
        ticket = next(self._tickets)
        self._waiting[ticket] = question, done
        self._to_read.put(lambda: self._answer(ticket))  # a store that hangs for hours must not hold questions

    # On a thread

    def _answer(self, ticket: int) -> None:
        """Ask the store, and pass the answer on unless nobody waits for it any more."""
        if (awaited := self._waiting.get(ticket)) is None:
            return
        answer = None
        try:
            answer = awaited[0]()
        except StoreError as error:
            self._skip(error)
        except Exception:  # a defect must not leave a request waiting
            logger.exception("the store of KV pages could not be read")
        self._progress_s = time.monotonic()
        if self._waiting.pop(ticket, None) is not None:
            awaited[1](answer)

    def _write(self, current: tuple[SharedStore, Seal], key: PageKey, page: Page) -> bool:
        """Write a page unless the store has it; return whether it can be read."""
        store, seal = current
        is_stored, is_new, name = False, False, seal.name(key)
        try:
            if not (self._is_skipped or self._gives_up):
                is_new = store.has([name]) == [False]
                is_stored = not is_new or store.write(name, seal.close(key, self._bytes_of(key).pack(page)))
        except StoreError as error:
            self._skip(error)
        except jax.errors.JaxRuntimeError:  # raised by the step that should have written the page
            is_stored = False
        except Exception:  # a defect must not end the thread, nor leave a page waiting
            logger.exception("a page could not be written to the store of KV pages")
        if self._unwritten.get(key) is page:
            del self._unwritten[key]
        with counting:
            self._num_unwritten -= 1
            if not self._gives_up:  # `close` has counted the others
                self._stats.num_stored_pages += is_stored and is_new
                self._stats.num_dropped_pages += not is_stored
        return is_stored

    def _read(self, key: PageKey) -> Page | None:
        """Read a page; None if it is not there, or is not whole."""
        if self._current is None:
            return None
        (store, seal), started_s = self._current, time.monotonic()
        name, form = seal.name(key), self._bytes_of(key)
        value = store.read(name)
        if value is None:
            return None
        content = seal.open(key, value)
        self._measured_s = time.monotonic()
        page_s = (self._measured_s - started_s) / max(form.size // self._page_bytes.size, 1)
        self._read_s += (page_s - self._read_s) * (NEW_FRACTION if self._read_s else 1)
        if content is not None and len(content) == form.size:
            return form.unpack(content)
        logger.warning("a page in the shared store is not intact and is computed again")
        if self._writes:
            with suppress(StoreError):
                store.delete(name)
        with counting:
            self._stats.num_corrupt_pages += 1
            if not self._writes:  # producers delete it
                self._damaged.pop(name, None)
                self._damaged[name] = time.monotonic() + DAMAGED_S
                if len(self._damaged) > MAX_DAMAGED_PAGES:
                    del self._damaged[next(iter(self._damaged))]
        return None

    def _bytes_of(self, key: PageKey) -> PageBytes:
        """Return the conversion of a page or state snapshot."""
        return self._page_bytes if key.group != STATES or self._state_bytes is None else self._state_bytes


def _work(tasks: SimpleQueue[Any]) -> None:
    """Do tasks until None comes."""
    while (task := tasks.get()) is not None:
        task()
