"""PageMover: copies pages between the pool and a file, while steps run.

    store: pool --gather on the device--> copy --I/O thread--> file     the page is free once the gather is dispatched
    load:  file --I/O thread--> host memory --scatter on the device--> pool

The device runs programs in dispatch order: a gather reads pages after the earlier steps have written them, and later
steps read the pages after a scatter. The I/O thread works in the order of requests, so a page can be loaded once its
store was requested.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.api.metrics import EngineStats
from jaxserve.errors import ConfigError
from jaxserve.execution.lowering import MOVED_PAGES, Lowering
from jaxserve.execution.program_store import described
from jaxserve.execution.runner import Runner
from jaxserve.models.params import Params
from jaxserve.scheduling.kv_cache.disk_tier import DiskTier
from jaxserve.scheduling.kv_cache.page_archive import PageArchive, PageKey
from jaxserve.scheduling.kv_cache.transfers import EndedMoves, Move

logger = logging.getLogger(__name__)

MAX_UNWRITTEN_PAGES = 1024  # copies that wait for the file; with more, pages are not stored
_counting = threading.Lock()  # held to add to the totals, as several movers' I/O threads have the same ones
OpenArchive = Callable[[bytes, int], PageArchive]


class PageMover:
    """Copies pages between one runner's pool and a file. One thread at a time uses it.

    Args:
        runner: owner of the pool.
        open_archive: opens the file, for a fingerprint of weights and page layout and the bytes per page.
        stats: totals to which moved pages are added.
    """

    def __init__(self, runner: Runner, open_archive: OpenArchive, stats: EngineStats) -> None:
        self._runner, self._open_archive, self._stats = runner, open_archive, stats
        programs = runner.programs.compile_page_movers()
        self._gather, self._scatter = programs["gather_pages"], programs["scatter_pages"]
        self._pool = runner.programs.lowering.abstract_state().kv_pages
        self._archive = self._open(runner.params)
        self._tier = DiskTier(self._archive.keys, self._archive.num_slots)
        self._num_gathered = self._num_written = 0  # pages; each number is written by one thread
        self._is_cleared = False  # the file was emptied, and the weights may be others now
        self._is_closed = False
        self._loading: dict[int, Move] = {}  # by key
        self._read: deque[tuple[Move, bytes | None]] = deque()  # loads for which the file was read; None if lost
        self._ended: list[EndedMoves] = []
        self._io = ThreadPoolExecutor(1, "jaxserve pages")

    @property
    def tier(self) -> DiskTier:
        """The scheduler's view of the file."""
        return self._tier

    def _open(self, params: Params) -> PageArchive:
        """Open the file for the given weights."""
        num_bytes = sum(num_page_bytes for _, _, num_page_bytes in self._parts())
        return self._open_archive(fingerprint(params, self._runner.programs.lowering), num_bytes)

    def _parts(self) -> list[tuple[tuple[int, ...], np.dtype[Any], int]]:
        """Return shape, dtype and bytes of a page's part in each leaf of the pool."""
        leaves = [(leaf.shape[:1] + leaf.shape[2:], np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(self._pool)]
        return [(shape, dtype, int(np.prod(shape)) * dtype.itemsize) for shape, dtype in leaves]

    # On the thread of the runner

    def start_moves(self) -> None:
        """Start the moves that the scheduler has requested; call it after the step that was planned meanwhile."""
        requested = self._tier.take_requested()
        self._end(requested.forgotten, ok=False)
        if self._is_closed:
            self._end(requested.moves, ok=False)
            return
        if requested.is_cleared:
            self._io.submit(self._clear_archive)
            self._is_cleared = True
        if requested.moves and self._is_cleared:  # not earlier: the weights may be replaced or asleep until a step
            self._io.submit(self._use_weights, self._runner.params)
            self._is_cleared = False
        if requested.evicted:
            self._io.submit(self._delete_pages, requested.evicted)
        if loads := [move for move in requested.moves if move.is_load]:
            self._loading.update({move.key: move for move in loads})
            self._io.submit(self._read_pages, loads)
        stores = [move for move in requested.moves if not move.is_load]
        for moves in _batches(stores):
            self._store(moves)

    def _store(self, moves: Sequence[Move]) -> None:
        """Dispatch the copies of some pages, and leave their writing to the I/O thread."""
        contents = self._gathered(moves)
        if contents is None:
            self._stats.num_dropped_pages += len(moves)
            self._end(moves, ok=False)
            return
        for leaf in contents:
            leaf.copy_to_host_async()
        self._num_gathered += len(moves)
        self._io.submit(self._write_pages, moves, contents)
        self._end(moves, ok=True)

    def _gathered(self, moves: Sequence[Move]) -> list[jax.Array] | None:
        """Return copies of some pages, per leaf of the pool; None if they cannot be kept until they are written."""
        state = self._runner.state
        if state is None or self._num_gathered - self._num_written > MAX_UNWRITTEN_PAGES:
            return None
        try:
            return jax.tree.leaves(self._gather(state.kv_pages, self._page_ids(moves)))
        except jax.errors.JaxRuntimeError as error:  # the device has no memory for the copies; the pool is unchanged
            logger.debug("pages are not stored: %s", error)
            return None

    def _end(self, moves: Sequence[Move], *, ok: bool) -> None:
        """Report the end of some moves to `take_ended`."""
        if moves:
            self._ended.append(EndedMoves([move.key for move in moves], ok))

    def take_ended(self) -> list[EndedMoves]:
        """Return the moves that have ended since the last call, after dispatching the copies of loaded pages."""
        ended, self._ended = self._ended, []
        read = [self._read.popleft() for _ in range(len(self._read))]
        read = [(move, page) for move, page in read if self._loading.pop(move.key, None) is not None]
        whole = [(move, page) for move, page in read if page is not None and self._runner.state is not None]
        for batch in _batches(whole):
            self._load(batch)
        loaded = {move.key for move, _ in whole}
        lost = [move.key for move, _ in read if move.key not in loaded]
        return ended + [EndedMoves(keys, ok) for keys, ok in (([*loaded], True), (lost, False)) if keys]

    def _load(self, read: Sequence[tuple[Move, bytes]]) -> None:
        """Dispatch the copies of some pages to the pool."""
        contents = []
        offset = 0
        for shape, dtype, num_bytes in self._parts():
            leaf = np.zeros((shape[0], MOVED_PAGES, *shape[1:]), dtype)
            for index, (_, page) in enumerate(read):
                leaf[:, index] = np.frombuffer(page, dtype, num_bytes // dtype.itemsize, offset).reshape(shape)
            contents.append(leaf)
            offset += num_bytes
        tree = jax.tree.unflatten(jax.tree.structure(self._pool), contents)
        state = self._runner.state
        assert state is not None, "pages for a state that sleeps are dropped"
        pool = self._scatter(state.kv_pages, self._page_ids([move for move, _ in read]), tree)
        self._runner.state = replace(state, kv_pages=pool)
        self._stats.num_loaded_pages += len(read)

    def _page_ids(self, moves: Sequence[Move]) -> NDArray[np.int32]:
        """Return the page ids of some moves, and ids out of range after them."""
        none = jax.tree.leaves(self._pool)[0].shape[1]
        return np.array([move.page for move in moves] + [none] * (MOVED_PAGES - len(moves)), np.int32)

    def forget(self) -> None:
        """Forget all moves, after a failure: none of them writes to a page any more."""
        self._loading.clear()
        self._ended = []

    def close(self) -> None:
        """Write the stored pages, and close the file; later moves fail. Has no effect the second time."""
        self._is_closed = True
        self._io.shutdown()
        self._archive.close()

    # On the I/O thread

    def _clear_archive(self) -> None:
        self._archive.clear()

    def _use_weights(self, params: Params) -> None:
        """Continue with an empty file for the given weights; without it, no page is kept."""
        self._archive.close()  # first: after a failure, nothing writes pages to the file of other weights
        try:
            self._archive = self._open(params)
        except ConfigError as error:
            logger.warning("no KV pages are kept on disk: %s", error)
        else:
            self._archive.clear()

    def _delete_pages(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._archive.delete(key)

    def _read_pages(self, moves: Sequence[Move]) -> None:
        num_corrupt = self._archive.num_corrupt
        for move in moves:
            self._read.append((move, self._archive.read(PageKey(move.group, move.page_hash))))
        with _counting:
            self._stats.num_corrupt_pages += self._archive.num_corrupt - num_corrupt

    def _write_pages(self, moves: Sequence[Move], contents: Sequence[jax.Array]) -> None:
        try:
            arrays = [np.asarray(leaf) for leaf in contents]
            for index, move in enumerate(moves):
                page = b"".join(array[:, index].tobytes() for array in arrays)
                is_stored = self._archive.write(PageKey(move.group, move.page_hash), page)
                with _counting:
                    self._stats.num_stored_pages += is_stored
        except jax.errors.JaxRuntimeError as error:  # of the step that should have written the pages
            logger.debug("pages are not stored: %s", error)
        finally:
            self._num_written += len(moves)


def fingerprint(params: Params, lowering: Lowering) -> bytes:
    """Return 16 bytes that identify weights, model and page layout, which determine a page together with its tokens."""
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    pool = jax.tree.map(
        lambda leaf: (leaf.shape[0], *leaf.shape[2:], str(leaf.dtype)), lowering.abstract_state().kv_pages
    )
    model = replace(lowering.arch, eos_ids=frozenset())  # which only the host reads
    parts = [described((model, lowering.backend, lowering.schedule.kv_groups, pool))]
    parts += [f"{name} {leaf.shape} {leaf.dtype} {zlib.crc32(_bytes(leaf))}" for name, leaf in leaves]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()


def _bytes(leaf: jax.Array) -> memoryview:
    """Return an array's bytes; only the result keeps them in host memory."""
    shards = [shard.data for shard in leaf.addressable_shards]
    alias = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)  # as an array keeps its copy
    return np.ascontiguousarray(np.asarray(alias)).reshape(-1).view(np.uint8).data


def _batches(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Split items into batches for one program each."""
    return [items[start : start + MOVED_PAGES] for start in range(0, len(items), MOVED_PAGES)]
