"""PageMover: copies pages between the pool and lower tiers, while steps run.

    store: pool --gather on the device--> host memory --> medium     the page is free once the gather is dispatched
    load:  medium --> host memory --scatter on the device--> pool

The device runs programs in dispatch order: a gather reads pages after the earlier steps have written them, and later
steps read the pages after a scatter. A medium works in the order of requests, so a page can be loaded once its store
was requested.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.api.metrics import EngineStats
from jaxserve.execution.moved_pools import MovedPools, kv_access, state_access
from jaxserve.execution.page_bytes import Page
from jaxserve.execution.page_media import Medium
from jaxserve.execution.page_programs import MOVED_PAGES, MOVED_STATES
from jaxserve.execution.runner import Runner
from jaxserve.execution.staged_pools import StagedPools
from jaxserve.scheduling.kv_cache.stored_pages import StoredPages
from jaxserve.scheduling.kv_cache.transfers import DEVICE, Deletion, EndedMoves, Move, Requested

logger = logging.getLogger(__name__)


class PageMover:
    """Copies pages between an executor's pools and the lower tiers' media. One thread at a time uses it.

    Args:
        stages: owners of the pools, one runner per pipeline stage.
        media: media of the lower tiers, the next one first.
        stats: totals to which moved pages are added.

    Attributes:
        media: see above.
    """

    def __init__(self, stages: Sequence[Runner], media: Sequence[Medium], stats: EngineStats) -> None:
        self._stages, self.media, self._stats = stages, media, stats
        self._num_slots = stages[0].schedule.max_num_seqs  # whose states come before the snapshots
        pages, states = [], []
        self._keep_state: list[tuple[Runner, Any]] = []  # has only stages with recurrent layers
        for stage in stages:
            programs, access = stage.programs.compile_page_movers(), kv_access(stage.programs.lowering.proposer)
            pages.append((stage, MovedPools("pages", access, programs, MOVED_PAGES)))
            if (keep_state := programs.get("keep_state")) is not None:
                self._keep_state.append((stage, keep_state))
                states.append((stage, MovedPools("states", state_access(), programs, MOVED_STATES, self._num_slots)))
        self._kv, self._states = StagedPools(pages), StagedPools(states)
        self._is_cleared = False  # all media were emptied, and the weights may be others now
        self._is_closed = False
        self._num_weights, self._passing = (
            0,
            threading.Lock(),
        )  # weights used so far; held to pass pages on, and for new
        self._loading: dict[int, Move] = {}  # key -> move
        self._read: deque[tuple[Move, Page | None]] = deque()  # loads whose page was read; None if it is lost
        self._copied: deque[tuple[Move, bool]] = deque()  # copies between media that have ended, and their success
        self._ended: list[EndedMoves] = []
        self._copy_s = self._measure()

    def new_tiers(self) -> list[StoredPages]:
        """Return the scheduler's indices of the media's pages."""
        return [medium.new_tier() for medium in self.media]

    def keep_states(self, kept: Sequence[tuple[int, int]]) -> None:
        """Copy the states of rows that a plan has swapped out, as (slot, page), before its step."""
        assert self._keep_state or not kept, "only recurrent layers have states"
        for slot, page in kept:
            entries = np.array([slot, self._num_slots + page], np.int32)
            for stage, keep_state in self._keep_state:
                state = stage.state
                assert state is not None, "rows have a state"
                stage.state = replace(state, states=keep_state(state.states, entries))

    def start_moves(self, requested: Requested) -> None:
        """Start the work that the scheduler requested while a plan was made; call it after the plan's step."""
        self._end(requested.forgotten, ok=False)
        if not requested.work and not requested.is_cleared:
            return
        moves = [each for each in requested.work if isinstance(each, Move)]
        if self._is_closed:
            self._end(moves, ok=False)
            return
        self._prepare_media(is_cleared=requested.is_cleared, are_used=bool(moves))
        gathered = self._gather([move for move in moves if move.source == DEVICE])
        stored = []
        for each in requested.work:
            if isinstance(each, Deletion):
                self._medium(each.tier).delete(each.content)
            elif each.source == DEVICE:
                if self._store(each, gathered.get(each.key)):
                    stored.append(each)
            elif each.is_load:
                self._loading[each.key] = each
                self._medium(each.source).get(each.content, partial(self._note_read, each))
            else:
                self._medium(each.source).get(each.content, partial(self._pass_on, each, self._num_weights))
        self._end(stored, ok=True)  # the device pages themselves are not needed any more

    def page_s(self) -> list[float]:
        """Return the time to load a page from each medium: measured reads, and the copy to the device."""
        return [medium.page_s() + self._copy_s for medium in self.media]

    def _measure(self) -> float:
        """Return the time to copy a page to the device, after first runs of both programs; the pool is not changed."""
        size, seconds = MOVED_PAGES[-1], 0.0
        ids = [0] * size
        for _ in range(2):
            if not self._is_awake:
                break
            pages = jax.block_until_ready(self._kv.gather(ids, size))
            started_s = time.perf_counter()
            self._kv.scatter(ids, pages, size)
            self._kv.wait()
            seconds = time.perf_counter() - started_s
        return seconds / size

    @property
    def _is_awake(self) -> bool:
        """True if the pools exist."""
        return all(stage.state is not None for stage in self._stages)

    def _by_pools(self, moves: Sequence[Move]) -> list[tuple[StagedPools, list[Move]]]:
        """Return the pools, and the moves of their pages."""
        states, pages = ([move for move in moves if move.is_state is each] for each in (True, False))
        return [(self._kv, pages), (self._states, states)]

    def _medium(self, tier: int) -> Medium:
        """Return the medium of a lower tier."""
        return self.media[tier - 1]

    def _gather(self, moves: Sequence[Move]) -> dict[int, Page]:
        """Dispatch the copies of device pages to host memory, and return them by the keys of their moves."""
        if not self._is_awake:
            return {}
        gathered: dict[int, Page] = {}
        for pools, of_pools in self._by_pools(moves):
            for size, batch in pools.batches(of_pools):
                try:
                    pages = pools.gather([move.page for move in batch], size)
                except jax.errors.JaxRuntimeError as error:  # no memory for the copies; the pools are unchanged
                    logger.debug("pages are not stored: %s", error)
                    return gathered
                gathered |= zip([move.key for move in batch], pages, strict=True)
        return gathered

    def _prepare_media(self, *, is_cleared: bool, are_used: bool) -> None:
        """Empty the media if all content is deleted, and let them use other weights before their next pages."""
        if is_cleared:
            self._is_cleared = True
            for medium in self.media:
                medium.clear()
        if are_used and self._is_cleared:  # not earlier: the weights may be replaced or asleep until a step
            self._is_cleared = False
            with self._passing:
                self._num_weights += 1
                for medium in self.media:
                    medium.use_weights()

    def _store(self, move: Move, page: Page | None) -> bool:
        """Pass a device page's copy to its medium; end the move and return False if it cannot take the page."""
        if page is not None and self._medium(move.target).put(move.content, page, _ignore):
            return True
        self._stats.num_dropped_pages += 1
        self._end([move], ok=False)
        return False

    def _note_read(self, move: Move, page: Page | None) -> None:
        """Note a page that was read for a load, on any thread."""
        self._read.append((move, page))

    def _pass_on(self, move: Move, num_weights: int, page: Page | None) -> None:
        """Store a page that was read from one medium in another one, on any thread, unless that has other weights."""

        def note(ok: bool) -> None:
            self._copied.append((move, ok))

        with self._passing:
            is_current = num_weights == self._num_weights
            if not (is_current and page is not None and self._medium(move.target).put(move.content, page, note)):
                note(False)

    def _end(self, moves: Sequence[Move], *, ok: bool) -> None:
        """Report the end of some moves to `take_ended`."""
        if moves:
            self._ended.append(EndedMoves([move.key for move in moves], ok))

    def take_ended(self) -> list[EndedMoves]:
        """Return the moves that have ended since the last call, after dispatching the copies of loaded pages."""
        for medium in self.media:
            medium.poll()
        if not (self._read or self._copied or self._ended):
            return []
        for move, ok in _taken(self._copied):
            self._end([move], ok=ok)
        read = [(move, page) for move, page in _taken(self._read) if self._loading.pop(move.key, None) is not None]
        whole = {move: page for move, page in read if page is not None and self._is_awake}
        for pools, moves in self._by_pools([*whole]):
            for size, batch in pools.batches(moves):
                pools.scatter([move.page for move in batch], [whole[move] for move in batch], size)
                self._stats.num_loaded_pages += len(batch)
        self._end([*whole], ok=True)
        self._end([move for move, _ in read if move not in whole], ok=False)
        ended, self._ended = self._ended, []
        return ended

    def sync(self) -> bool:
        """Write the pages stored so far durably; return False if that has failed. Callable from any thread."""
        synced = [medium.sync() for medium in self.media]  # every one, also after a failure
        return all(synced)

    def forget(self) -> None:
        """Forget all moves, after a failure: none of them writes to a device page any more."""
        self._loading.clear()
        self._ended = []
        for medium in self.media:
            medium.forget_device()

    def close(self) -> None:
        """Complete the stores and free all resources; later moves fail. Has no effect the second time."""
        self._is_closed = True
        for medium in self.media:
            medium.close()


def _ignore(ok: bool) -> None:
    """Do nothing about the end of a store: its page is lost if it has failed, and is computed again."""


def _taken(items: deque[Any]) -> list[Any]:
    """Remove and return the items of a deque to which other threads may add."""
    return [items.popleft() for _ in range(len(items))]
