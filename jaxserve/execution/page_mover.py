"""PageMover: copies pages between the pool and lower tiers, while steps run.

    store: pool --gather on the device--> host memory --> medium     the page is free once the gather is dispatched
    load:  medium --> host memory --scatter on the device--> pool

The device runs programs in dispatch order: a gather reads pages after the earlier steps have written them, and later
steps read the pages after a scatter. A medium works in the order of requests, so a page can be loaded once its store
was requested.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.api.metrics import EngineStats
from jaxserve.execution.page_bytes import Page
from jaxserve.execution.page_media import Medium
from jaxserve.execution.page_programs import MOVED_PAGES
from jaxserve.execution.runner import Runner
from jaxserve.scheduling.kv_cache.stored_pages import StoredPages
from jaxserve.scheduling.kv_cache.transfers import DEVICE, Deletion, EndedMoves, Move, Requested

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")


class PageMover:
    """Copies pages between one runner's pool and the media of lower tiers. One thread at a time uses it.

    Args:
        runner: owner of the pool.
        media: media of the lower tiers, the next one first.
        stats: totals to which moved pages are added.
    """

    def __init__(self, runner: Runner, media: Sequence[Medium], stats: EngineStats) -> None:
        self._runner, self._media, self._stats = runner, media, stats
        self._programs = runner.programs.compile_page_movers()
        self._structure = jax.tree.structure(runner.programs.lowering.abstract_state.kv_pages)
        self._is_cleared = False  # all media were emptied, and the weights may be others now
        self._is_closed = False
        self._loading: dict[int, Move] = {}  # by key
        self._read: deque[tuple[Move, Page | None]] = deque()  # loads whose page was read; None if it is lost
        self._copied: deque[tuple[Move, bool]] = deque()  # copies between media that have ended, and their success
        self._ended: list[EndedMoves] = []
        self._copy_s = self._measure()

    def new_tiers(self) -> list[StoredPages]:
        """Return the scheduler's indices of the media's pages."""
        return [medium.new_tier() for medium in self._media]

    def start_moves(self, requested: Requested) -> None:
        """Start the work that the scheduler requested while a plan was made; call it after the plan's step."""
        self._end(requested.forgotten, ok=False)
        moves = [each for each in requested.work if isinstance(each, Move)]
        if self._is_closed:
            self._end(moves, ok=False)
            return
        if requested.is_cleared:
            self._is_cleared = True
            for medium in self._media:
                medium.clear()
        if moves and self._is_cleared:  # not earlier: the weights may be replaced or asleep until a step
            self._is_cleared = False
            for medium in self._media:
                medium.use_weights()
        gathered = self._gather([move for move in moves if move.source == DEVICE])
        for each in requested.work:
            if isinstance(each, Deletion):
                self._medium(each.tier).delete(each.content)
            elif each.source == DEVICE:
                self._store(each, gathered.get(each.key))
            elif each.is_load:
                self._loading[each.key] = each
                self._medium(each.source).get(each.content, partial(self._note_read, each))
            else:
                self._medium(each.source).get(each.content, partial(self._pass_on, each))

    def page_s(self) -> list[float]:
        """Return the time to load a page from each medium: measured reads, and the copy to the device."""
        return [medium.page_s() + self._copy_s for medium in self._media]

    def _measure(self) -> float:
        """Return the time to copy a page to the device, after first runs of both programs; the pool is not changed."""
        size = MOVED_PAGES[-1]
        ids, seconds = np.zeros(size, np.int32), 0.0
        for _ in range(2):
            state = self._runner.state
            if state is None:
                break
            pages = jax.block_until_ready(self._programs[f"gather_pages {size}"](state.kv_pages, ids))
            started_s = time.perf_counter()
            pool = self._programs[f"scatter_pages {size}"](state.kv_pages, ids, pages)
            self._runner.state = replace(state, kv_pages=jax.block_until_ready(pool))
            seconds = time.perf_counter() - started_s
        return seconds / size

    def _medium(self, tier: int) -> Medium:
        """Return the medium of a lower tier."""
        return self._media[tier - 1]

    def _gather(self, moves: Sequence[Move]) -> dict[int, Page]:
        """Dispatch the copies of device pages to host memory, and return them by the keys of their moves."""
        if self._runner.state is None:
            return {}
        gathered: dict[int, Page] = {}
        for size, batch in _batches(moves):
            try:
                pages = self._programs[f"gather_pages {size}"](self._runner.state.kv_pages, self._ids(batch, size))
            except jax.errors.JaxRuntimeError as error:  # no memory for the copies; the pool is unchanged
                logger.debug("pages are not stored: %s", error)
                break
            gathered |= {move.key: jax.tree.leaves(page) for move, page in zip(batch, pages, strict=False)}
        return gathered

    def _store(self, move: Move, page: Page | None) -> None:
        """Pass a device page's copy to its medium, and end the move: the page itself is not needed any more."""
        is_taken = page is not None and self._medium(move.target).put(move.content, page, lambda ok: None)
        self._stats.num_dropped_pages += not is_taken
        self._end([move], ok=is_taken)

    def _note_read(self, move: Move, page: Page | None) -> None:
        """Note a page that was read for a load, on any thread."""
        self._read.append((move, page))

    def _pass_on(self, move: Move, page: Page | None) -> None:
        """Store a page that was read from one medium in another one, on any thread."""

        def note(ok: bool) -> None:
            self._copied.append((move, ok))

        if page is None or not self._medium(move.target).put(move.content, page, note):
            note(False)

    def _end(self, moves: Sequence[Move], *, ok: bool) -> None:
        """Report the end of some moves to `take_ended`."""
        if moves:
            self._ended.append(EndedMoves([move.key for move in moves], ok))

    def take_ended(self) -> list[EndedMoves]:
        """Return the moves that have ended since the last call, after dispatching the copies of loaded pages."""
        for move, ok in _taken(self._copied):
            self._end([move], ok=ok)
        read = [(move, page) for move, page in _taken(self._read) if self._loading.pop(move.key, None) is not None]
        whole = [(move, page) for move, page in read if page is not None and self._runner.state is not None]
        for size, batch in _batches(whole):
            self._load(batch, size)
        loaded = {move.key for move, _ in whole}
        self._end([move for move, _ in whole], ok=True)
        self._end([move for move, _ in read if move.key not in loaded], ok=False)
        ended, self._ended = self._ended, []
        return ended

    def _load(self, read: Sequence[tuple[Move, Page]], size: int) -> None:
        """Dispatch the copies of up to `size` pages to the pool."""
        pages = [jax.tree.unflatten(self._structure, page) for _, page in read]
        pages += pages[-1:] * (size - len(pages))
        state = self._runner.state
        assert state is not None, "pages for a state that sleeps are dropped"
        ids = self._ids([move for move, _ in read], size)
        pool = self._programs[f"scatter_pages {size}"](state.kv_pages, ids, tuple(pages))
        self._runner.state = replace(state, kv_pages=pool)
        self._stats.num_loaded_pages += len(read)

    def _ids(self, moves: Sequence[Move], size: int) -> NDArray[np.int32]:
        """Return the device pages of some moves, the last one repeatedly."""
        pages = [move.page for move in moves]
        return np.array(pages + pages[-1:] * (size - len(pages)), np.int32)

    def sync(self) -> None:
        """Write the pages stored so far durably; callable from any thread."""
        for medium in self._media:
            medium.sync()

    def forget(self) -> None:
        """Forget all moves, after a failure: none of them writes to a device page any more."""
        self._loading.clear()
        self._ended = []
        for medium in self._media:
            medium.forget_device()

    def close(self) -> None:
        """Complete the stores and free all resources; later moves fail. Has no effect the second time."""
        self._is_closed = True
        for medium in self._media:
            medium.close()


def _batches(items: Sequence[_Item]) -> Iterator[tuple[int, Sequence[_Item]]]:
    """Split items into batches for one program each, with the number of pages that it copies."""
    start = 0
    while start < len(items):
        num_left = len(items) - start
        size = next((size for size in MOVED_PAGES if size // 2 < num_left <= size), MOVED_PAGES[0])
        size = max([size, *(each for each in MOVED_PAGES if each <= num_left)])
        yield size, items[start : start + size]
        start += size


def _taken(items: deque[Any]) -> list[Any]:
    """Remove and return the items of a deque to which other threads may add."""
    return [items.popleft() for _ in range(len(items))]
