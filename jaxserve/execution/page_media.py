"""Media: where the bytes of pages in lower tiers lie.

The scheduler decides which pages a tier holds (`StoredPages`); a medium does it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from jaxserve.api.metrics import EngineStats
from jaxserve.errors import ConfigError
from jaxserve.execution.page_bytes import Page, PageBytes
from jaxserve.scheduling.kv_cache.page_archive import PageArchive, SlicedArchive
from jaxserve.scheduling.kv_cache.pages import STATES
from jaxserve.scheduling.kv_cache.stored_pages import PageKey, StoredPages

logger = logging.getLogger(__name__)

OpenArchive = Callable[[], PageArchive]
T = TypeVar("T")

MAX_UNWRITTEN_PAGES = 1024  # pages that wait for the file; with more, pages are not stored
NEW_FRACTION = 1 / 16  # weight of the last read in the mean time to read a page
HALF_LIFE_S = 20.0  # for that mean while nothing is read
SYNC_S = 120.0  # maximum time to wait for the disk
counting = threading.Lock()  # held to add to the totals, as several I/O threads have the same ones


@runtime_checkable
class Medium(Protocol):
    """Bytes of the pages in one tier. One thread at a time uses it, and it does all work in the order of calls."""

    def new_tier(self) -> StoredPages:
        """Return the scheduler's index of the pages."""

    def put(self, key: PageKey, page: Page, done: Callable[[bool], None]) -> bool:
        """Begin to store a page; return False if too many pages wait to be stored.

        Args:
            key: content of the page.
            page: the page, which may still be computed by the device.
            done: called with the success at the end, possibly on another thread.
        """

    def get(self, key: PageKey, done: Callable[[Page | None], None]) -> None:
        """Begin to read a page; `done` is called with it, or with None if it is lost, possibly on another thread."""

    def page_s(self) -> float:
        """Return the measured time to read a page; 0 if there is no measurement."""

    def poll(self) -> None:
        """End work that has taken too long, without its result."""

    def delete(self, key: PageKey) -> None:
        """Delete a page."""

    def clear(self) -> None:
        """Delete all pages."""

    def use_weights(self) -> None:
        """Continue with pages of the weights that are in use now, after `clear`."""

    def forget_device(self) -> None:
        """Delete pages that a device failure may have destroyed."""

    def sync(self) -> bool:
        """Wait until stored pages survive the process and the machine, if they can; callable from any thread.

        Returns:
            False if that has failed.
        """

    def close(self) -> None:
        """Complete the stores and free all resources. Has no effect the second time."""


class HostPages:
    """Pages in host memory.

    Args:
        num_pages: capacity.
        stats: totals to which pages are added.
        state_pages: pages that take as many bytes as a state snapshot.
    """

    def __init__(self, num_pages: int, stats: EngineStats, state_pages: int = 1) -> None:
        self._num_pages, self._stats, self._state_pages = num_pages, stats, state_pages
        self._pages: dict[PageKey, Page] = {}

    def new_tier(self) -> StoredPages:
        """Return an empty index."""
        return StoredPages("host", self._num_pages, state_pages=self._state_pages)

    def put(self, key: PageKey, page: Page, done: Callable[[bool], None]) -> bool:
        """Keep a page."""
        self._pages[key] = page
        with counting:
            self._stats.num_stored_pages += 1
        done(True)
        return True

    def get(self, key: PageKey, done: Callable[[Page | None], None]) -> None:
        """Return a page; None if its copy to host memory has failed."""
        page = self._pages.get(key)
        done(page if page and is_whole(page) else None)

    def page_s(self) -> float:
        """Return 0: the page is there."""
        return 0.0

    def poll(self) -> None:
        """Do nothing: no work takes long."""

    def delete(self, key: PageKey) -> None:
        """Free a page; a copy to another tier may still use it."""
        self._pages.pop(key, None)

    def clear(self) -> None:
        """Free all pages."""
        self._pages.clear()

    def use_weights(self) -> None:
        """Do nothing: this engine has computed the pages."""

    def forget_device(self) -> None:
        """Free all pages: the latest may have been copied from destroyed ones."""
        self._pages.clear()

    def sync(self) -> bool:
        """Return True: the pages end with this process."""
        return True

    def close(self) -> None:
        """Free all pages."""
        self._pages.clear()


class DiskPages:
    """Pages in a file, which a thread reads and writes. Reads overtake writes.

    Args:
        open_archive: opens the file of the weights in use.
        page_bytes: conversion of pages.
        state_bytes: conversion of state snapshots; None without recurrent layers.
        stats: totals to which pages are added.
    """

    def __init__(
        self, open_archive: OpenArchive, page_bytes: PageBytes, state_bytes: PageBytes | None, stats: EngineStats
    ) -> None:
        self._open_archive, self._page_bytes, self._stats = open_archive, page_bytes, stats
        self._state_bytes = state_bytes
        self._archive = open_archive()
        self._sliced = self._slice()
        self._unwritten: dict[PageKey, Page] = {}  # pages that wait for the file
        self._reads: deque[Callable[[], None]] = deque()
        self._changes: deque[Callable[[], None]] = deque()
        self._read_s = self._measured_s = 0.0  # mean time to read a page; when the last read has ended
        self._io = ThreadPoolExecutor(1, "jaxserve pages")
        self._is_working, self._lock = False, threading.Lock()  # whether the thread runs tasks; held to change it

    def new_tier(self) -> StoredPages:
        """Return an index of the pages that an earlier engine has left."""
        num_slots, state_pages = self._archive.num_slots, self._sliced.num_slices
        return StoredPages("disk", num_slots, self._sliced.keys, outlives_device=True, state_pages=state_pages)

    def put(self, key: PageKey, page: Page, done: Callable[[bool], None]) -> bool:
        """Have the thread write a page."""
        if len(self._unwritten) >= MAX_UNWRITTEN_PAGES:
            return False
        self._unwritten[key] = page
        self._submit(self._changes, lambda: _end(done, lambda: self._write(key, page), False))
        return True

    def get(self, key: PageKey, done: Callable[[Page | None], None]) -> None:
        """Return a page that waits for the file, or have the thread read it."""
        if (page := self._unwritten.get(key)) is not None:
            done(page if is_whole(page) else None)
        else:
            self._submit(self._reads, lambda: _end(done, lambda: self._read(key), None))

    def page_s(self) -> float:
        """Return the mean time to read a page; without new reads it decays, so that a slow disk is tried again."""
        return self._read_s * 0.5 ** ((time.monotonic() - self._measured_s) / HALF_LIFE_S)

    def poll(self) -> None:
        """Do nothing: a slow disk counts as such by `page_s`."""

    def delete(self, key: PageKey) -> None:
        """Have the thread delete a page."""
        self._submit(self._changes, lambda: self._sliced.delete(key))

    def clear(self) -> None:
        """Have the thread empty the file."""
        self._submit(self._changes, self._empty)

    def use_weights(self) -> None:
        """Have the thread continue with an empty file for the weights in use."""
        self._submit(self._changes, self._reopen)

    def forget_device(self) -> None:
        """Do nothing: pages that cannot be read from the device are not written."""

    def sync(self) -> bool:
        """Write the stored pages, and wait until the disk has them; callable from any thread."""
        done: Future[bool] = Future()
        try:
            self._submit(self._changes, lambda: _end(done.set_result, self._archive.sync, False))
        except RuntimeError:  # closed, with all pages written
            return True
        try:
            return done.result(SYNC_S)
        except TimeoutError:
            return False

    def close(self) -> None:
        """Write the stored pages, and close the file."""
        self._io.shutdown()
        self._archive.close()

    def _submit(self, tasks: deque[Any], task: Callable[[], None]) -> None:
        """Add a task for the thread."""
        # Tasks are of any type, because a checker of their types would iterate while the thread takes some.
        with self._lock:
            tasks.append(task)
            if not self._is_working:  # to wake it for each page takes longer than all else that a page needs
                self._io.submit(self._work)
                self._is_working = True

    # On the thread

    def _work(self) -> None:
        """Run tasks until there is none: reads first, because requests wait for them."""
        while True:
            with self._lock:
                tasks = self._reads or self._changes
                if not tasks:
                    self._is_working = False
                    return
                task = tasks.popleft()
            try:
                task()
            except Exception:
                logger.exception("work on the file of KV pages has failed")

    def _empty(self) -> None:
        """Empty the file, which may have been opened after the request."""
        self._archive.clear()

    def _write(self, key: PageKey, page: Page) -> bool:
        """Write a page to the file; return whether it can be read."""
        try:
            is_stored = self._sliced.write(key, *self._bytes_of(key).parts(page))
        except jax.errors.JaxRuntimeError:  # raised by the step that should have written the page
            is_stored = False
        finally:
            if self._unwritten.get(key) is page:
                del self._unwritten[key]
        with counting:
            self._stats.num_stored_pages += is_stored
        return is_stored

    def _read(self, key: PageKey) -> Page | None:
        """Read a page from the file; return None if it is lost."""
        num_corrupt = self._archive.num_corrupt
        started_s = time.monotonic()
        content = self._sliced.read(key)
        self._measured_s = time.monotonic()
        page_s = (self._measured_s - started_s) / (self._sliced.num_slices if key.group == STATES else 1)
        self._read_s += (page_s - self._read_s) * (NEW_FRACTION if self._read_s else 1)
        with counting:
            self._stats.num_corrupt_pages += self._archive.num_corrupt - num_corrupt
        return None if content is None else self._bytes_of(key).unpack(content)

    def _reopen(self) -> None:
        """Continue with an empty file for the weights in use; without it, no page is kept."""
        self._archive.close()  # first: after a failure, nothing writes pages to the file of other weights
        try:
            self._archive = self._open_archive()
        except ConfigError as error:
            logger.warning("no KV pages are kept on disk: %s", error)
        else:
            self._archive.clear()
            self._sliced = self._slice()

    def _slice(self) -> SlicedArchive:
        """Return the archive with slices of state snapshots."""
        return SlicedArchive(self._archive, 0 if self._state_bytes is None else self._state_bytes.size)

    def _bytes_of(self, key: PageKey) -> PageBytes:
        """Return the conversion of a page or state snapshot."""
        return self._page_bytes if key.group != STATES or self._state_bytes is None else self._state_bytes


def _end(done: Callable[[T], None], work: Callable[[], T], failed: T) -> None:
    """Do work and pass its result to `done`; `failed` after an exception: nobody may wait forever."""
    result = failed
    try:
        result = work()
    finally:
        done(result)


def is_whole(page: Page) -> bool:
    """Return whether a page was copied from the device, or will be."""
    leaves: list[Any] = [leaf for leaf in page if isinstance(leaf, jax.Array)]
    try:
        jax.block_until_ready([leaf for leaf in leaves if leaf.is_ready()])
    except jax.errors.JaxRuntimeError:
        return False
    return True
