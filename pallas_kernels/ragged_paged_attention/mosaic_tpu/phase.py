"""Iteration over work items while the pages for later ones are in flight. See the package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import PAGE_IDS, BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import SCALE_HEADS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import PageBuffers, WorkItem, page_ref
from jaxserve.pallas_kernels.tpu import LANES


class PageSpan(NamedTuple):
    """Consecutive pages in one sequence, to be copied to VMEM for one work item."""

    row: Scalar  # the sequence's index in the page table
    first_page: Scalar  # index among the row's pages
    num_pages: Scalar  # zero if the sequence has ended


class _Memory(NamedTuple):
    """Memory and DMA semaphores that a phase allocates."""

    pages: PageBuffers
    ids: Ref  # i32[2, sequences, 1, 128] in SMEM, page ids for a work item and the next one
    page_sems: Ref  # [slots, 2], semaphores for values and for scales
    id_sems: Ref  # [2]
    scratch: Any  # the subclass's memory and semaphores


class Phase(ABC):
    """Part of the kernel that attends for one list of queries: a loop over work items, with copies ahead.

    An entry of the list is a set of queries that are computed together, such as a query tile; the subclass defines it.
    A work item is an entry with one of the key blocks that it attends to; work items are processed entry by entry.
    While one is computed, the next ones' pages are being copied to VMEM, and the page ids for the one after them.

    Attributes:
        sequences: number of sequences per work item.
        pages: number of pages per sequence in a work item, its key block.
        block_tokens: number of tokens in a key block.
    """

    sequences: int
    pages: int

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs, num_work_items: Scalar) -> None:
        """Process `num_work_items` work items, a traced number, with the kernel's references to HBM and SMEM."""
        self.config, self.blocks, self.refs, self.num_work_items = config, blocks, refs, num_work_items
        self.block_tokens = self.pages * config.page_size
        self.id_chunks = -(-config.table_width // PAGE_IDS)

    @abstractmethod
    def _num_blocks(self, entry: Scalar) -> Any:
        """Return how many key blocks entry `entry` attends to."""

    @abstractmethod
    def _spans(self, entry: Scalar, block: Scalar) -> list[PageSpan]:
        """Return the pages of one work item, one span per sequence.

        Args:
            entry: entry index.
            block: key block index, counted from the entry's first.
        """

    @abstractmethod
    def _query_copies(self, entry: Scalar, slot: Scalar, scratch: Any) -> list[Any]:
        """Return the copies, not yet started, of an entry's queries from HBM to slot `slot` of `scratch`."""

    @abstractmethod
    def _compute(self, entry: Scalar, block: Scalar, work_item: WorkItem, scratch: Any) -> None:
        """Attend with an entry's queries to one key block; after the last block, start to copy the outputs to HBM.

        Args:
            entry: entry index.
            block: key block index, counted from the entry's first.
            work_item: the block's pages in VMEM.
            scratch: the subclass's memory, with the queries and the softmax state.
        """

    @abstractmethod
    def _finish(self, scratch: Any) -> None:
        """Wait, after the last work item, until the copies of outputs to HBM are complete."""

    @abstractmethod
    def _scratch(self) -> Any:
        """Return the memory and semaphores that the subclass needs, as shapes to allocate."""

    def run(self) -> None:
        """Allocate memory, and process all work items in order."""
        slots = self.blocks.slots
        memory = _Memory(
            pages=self._page_memory(),
            ids=pltpu.SMEM((2, self.sequences, 1, PAGE_IDS), jnp.int32),
            page_sems=pltpu.SemaphoreType.DMA((slots, 2)),
            id_sems=pltpu.SemaphoreType.DMA((2,)),
            scratch=self._scratch(),
        )
        pl.run_scoped(self._run_with, memory)

    def _page_memory(self) -> PageBuffers:
        """Return shapes and dtypes for the VMEM that holds pages."""
        slots, num_pages = self.blocks.slots, self.sequences * self.pages
        page = (self.config.num_matrices, self.config.page_size, self.config.columns.matrix_columns)
        values = pltpu.VMEM((slots, num_pages, *page), self.config.kv_dtype)
        if not self.config.has_scales:
            return PageBuffers(values, None, None)
        tiles = self.refs.scales.shape[2:]
        by_token = (self.sequences, SCALE_HEADS * tiles[1], -(-self.block_tokens // LANES) * LANES)
        scales = pltpu.VMEM((slots, num_pages, *tiles), self.refs.scales.dtype)
        return PageBuffers(values, scales, pltpu.VMEM(by_token, jnp.float32))

    def _run_with(self, memory: _Memory) -> None:
        """Process all work items in allocated memory."""
        ahead = self.blocks.slots - 1

        def fetch(number: Scalar, at: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            """Start copies for a work item's pages and the next one's page ids; return the next entry and block."""
            following = self._after(*at)

            @pl.when(number + 1 < self.num_work_items)
            def next_ids() -> None:
                self._start_ids(following, lax.rem(number + 1, 2), memory)

            @pl.when(number < self.num_work_items)
            def pages() -> None:
                self._start_pages(at, number, memory)

            return following

        @pl.when(self.num_work_items > 0)
        def first_ids() -> None:
            self._start_ids((0, 0), 0, memory)

        start = (jnp.int32(0), jnp.int32(0))
        fetched = lax.fori_loop(0, ahead, fetch, start)

        def step(
            number: Scalar, at: tuple[tuple[Any, Any], tuple[Any, Any]]
        ) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
            here, fetched = at
            fetched = fetch(number + ahead, fetched)
            slot = lax.rem(number, self.blocks.slots)
            pages = memory.pages.at(slot)
            self._wait_for_pages(here, pages, memory.page_sems.at[slot])
            self._compute(*here, WorkItem(self.config, pages, self.pages), memory.scratch)
            return self._after(*here), fetched

        lax.fori_loop(0, self.num_work_items, step, (start, fetched))
        self._finish(memory.scratch)

    def _after(self, entry: Scalar, block: Scalar) -> tuple[Scalar, Scalar]:
        """Return the entry and key block of the next work item."""
        is_last = block + 1 >= self._num_blocks(entry)
        return jnp.where(is_last, entry + 1, entry), jnp.where(is_last, 0, block + 1)

    def _id_copies(self, at: tuple[Scalar, Scalar], half: Scalar, memory: _Memory) -> list[tuple[PageSpan, Any]]:
        """Return the copies, not yet started, of a work item's page ids to half `half` of `memory.ids`.

        Args:
            at: the work item's entry and key block.
            half: 0 or 1.
            memory: the phase's memory.

        Returns:
            For each sequence its pages, and the copy of the 128 page ids that include theirs.
        """
        copies = []
        for sequence, span in enumerate(self._spans(*at)):
            chunk = span.row * self.id_chunks + span.first_page // PAGE_IDS
            source = self.refs.inputs.page_ids.at[jnp.where(span.num_pages > 0, chunk, 0)]
            target = memory.ids.at[half, sequence]
            copies.append((span, pltpu.make_async_copy(source, target, memory.id_sems.at[half])))
        return copies

    def _start_ids(self, at: tuple[Scalar, Scalar], half: Scalar, memory: _Memory) -> None:
        """Start the copies of `_id_copies` for the sequences that have pages in the work item."""
        for span, copy in self._id_copies(at, half, memory):
            pl.when(span.num_pages > 0)(copy.start)

    def _start_pages(self, at: tuple[Scalar, Scalar], number: Scalar, memory: _Memory) -> None:
        """Wait for a work item's page ids, and start to copy its pages, and the queries if it is its entry's first.

        Args:
            at: the work item's entry and key block.
            number: work item index, which determines the memory that it uses.
            memory: the phase's memory.
        """
        entry, block = at
        half, slot = lax.rem(number, 2), lax.rem(number, self.blocks.slots)
        pages, sems = memory.pages.at(slot), memory.page_sems.at[slot]

        @pl.when(block == 0)
        def queries() -> None:
            for copy in self._query_copies(entry, lax.rem(entry, self.blocks.slots), memory.scratch):
                copy.start()

        for span, copy in self._id_copies(at, half, memory):
            pl.when(span.num_pages > 0)(copy.wait)
        for sequence, span in enumerate(self._spans(*at)):
            first_id = lax.rem(span.first_page, PAGE_IDS)

            @pl.loop(0, span.num_pages)
            def start(page: Scalar, sequence: int = sequence, first_id: Scalar = first_id) -> None:
                page_id = memory.ids[half, sequence, 0, first_id + page]
                index = sequence * self.pages + page
                for copy in self._page_copies(self.refs.layer[0], page_id, pages, index, sems):
                    copy.start()

    def _page_copies(self, layer: Scalar, page_id: Scalar, pages: PageBuffers, index: Scalar, sems: Ref) -> list[Any]:
        """Return the copies, not yet started, of one page and its scales from HBM to VMEM.

        Args:
            layer: layer in the pool.
            page_id: page in the pool.
            pages: the work item's buffers.
            index: the page's index in the buffers.
            sems: the work item's semaphores, for values and for scales.
        """
        page = page_ref(self.config, self.refs, layer, page_id)
        copies = [pltpu.make_async_copy(page, pages.values.at[index], sems.at[0])]
        if self.config.has_scales:
            scales = self.refs.scales.at[layer, page_id]
            copies.append(pltpu.make_async_copy(scales, pages.scales.at[index], sems.at[1]))
        return copies

    def _wait_for_pages(self, at: tuple[Scalar, Scalar], pages: PageBuffers, sems: Ref) -> None:
        """Wait until all pages of a work item are in VMEM.

        Args:
            at: the work item's entry and key block.
            pages: the work item's buffers.
            sems: the work item's semaphores, for values and for scales.
        """
        num_pages = sum(span.num_pages for span in self._spans(*at))

        @pl.loop(0, num_pages)
        def wait(page: Scalar) -> None:
            for copy in self._page_copies(0, 0, pages, 0, sems):
                copy.wait()
