"""Iteration over work items while the pages for later ones are in flight. See the package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import PAGE_IDS, BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import LANES, SCALE_HEADS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import PageBuffers, WorkItem, page_ref


class PageSpan(NamedTuple):
    """Consecutive pages in one sequence, to be loaded for one work item."""

    row: Any
    first_page: Any  # index among the row's pages
    num_pages: Any  # zero if the sequence has ended


class _Memory(NamedTuple):
    """Buffers and semaphores for a phase."""

    pages: PageBuffers
    ids: Any  # i32[2, sequences, 1, 128], page ids for a work item and the next one
    page_sems: Any  # semaphores for values and for scales
    id_sems: Any
    scratch: Any  # scratch memory for the subclass


class Phase(ABC):
    """Loop over work items: (entry, key block) pairs, entry by entry.

    An entry is a set of queries that are computed together, such as a query tile; the subclass defines it. While one
    work item is computed, the pages for the next ones are being copied to VMEM, and the page ids for the one after
    them.
    """

    sequences: int  # sequences per work item
    pages: int  # pages per sequence in a work item

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs, num_work_items: Any) -> None:
        self.config, self.blocks, self.refs, self.num_work_items = config, blocks, refs, num_work_items
        self.block_tokens = self.pages * config.page_size
        self.id_chunks = -(-config.table_width // PAGE_IDS)

    @abstractmethod
    def _num_blocks(self, entry: Any) -> Any:
        """Return the number of key blocks that an entry's queries read."""

    @abstractmethod
    def _spans(self, entry: Any, block: Any) -> list[PageSpan]:
        """Return the pages to load for one key block in an entry, one span per sequence."""

    @abstractmethod
    def _query_copies(self, entry: Any, slot: Any, scratch: Any) -> list[Any]:
        """Return the copies that fetch an entry's queries."""

    @abstractmethod
    def _compute(self, entry: Any, block: Any, work_item: WorkItem, scratch: Any) -> None:
        """Attend from an entry's queries to one key block."""

    @abstractmethod
    def _finish(self, scratch: Any) -> None:
        """Wait until all outputs are stored, after the last work item."""

    @abstractmethod
    def _scratch(self) -> Any:
        """Return the subclass's scratch memory."""

    def run(self) -> None:
        """Process all work items."""
        slots = self.blocks.slots
        memory = _Memory(
            pages=self._page_memory(),
            ids=pltpu.SMEM((2, self.sequences, 1, PAGE_IDS), jnp.int32),
            page_sems=pltpu.SemaphoreType.DMA((slots, 2)),
            id_sems=pltpu.SemaphoreType.DMA((2,)),
            scratch=self._scratch(),
        )
        pl.run_scoped(self._go_through, memory)

    def _page_memory(self) -> PageBuffers:
        slots, num_pages = self.blocks.slots, self.sequences * self.pages
        page = (self.config.num_matrices, self.config.page_size, self.config.columns.matrix_columns)
        values = pltpu.VMEM((slots, num_pages, *page), self.config.kv_dtype)
        if not self.config.has_scales:
            return PageBuffers(values, None, None)
        tiles = self.refs.scales.shape[2:]
        by_token = (self.sequences, SCALE_HEADS * tiles[1], -(-self.block_tokens // LANES) * LANES)
        scales = pltpu.VMEM((slots, num_pages, *tiles), self.refs.scales.dtype)
        return PageBuffers(values, scales, pltpu.VMEM(by_token, jnp.float32))

    def _go_through(self, memory: _Memory) -> None:
        ahead = self.blocks.slots - 1

        def fetch(number: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
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

        def step(number: Any, at: tuple[tuple[Any, Any], tuple[Any, Any]]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
            here, fetched = at
            fetched = fetch(number + ahead, fetched)
            slot = lax.rem(number, self.blocks.slots)
            pages = memory.pages.at(slot)
            self._wait_for_pages(here, pages, memory.page_sems.at[slot])
            self._compute(*here, WorkItem(self.config, pages, self.pages), memory.scratch)
            return self._after(*here), fetched

        lax.fori_loop(0, self.num_work_items, step, (start, fetched))
        self._finish(memory.scratch)

    def _after(self, entry: Any, block: Any) -> tuple[Any, Any]:
        is_last = block + 1 >= self._num_blocks(entry)
        return jnp.where(is_last, entry + 1, entry), jnp.where(is_last, 0, block + 1)

    def _id_copies(self, at: tuple[Any, Any], half: Any, memory: _Memory) -> list[tuple[PageSpan, Any]]:
        copies = []
        for sequence, span in enumerate(self._spans(*at)):
            chunk = span.row * self.id_chunks + span.first_page // PAGE_IDS
            source = self.refs.inputs.page_ids.at[jnp.where(span.num_pages > 0, chunk, 0)]
            target = memory.ids.at[half, sequence]
            copies.append((span, pltpu.make_async_copy(source, target, memory.id_sems.at[half])))
        return copies

    def _start_ids(self, at: tuple[Any, Any], half: Any, memory: _Memory) -> None:
        for span, copy in self._id_copies(at, half, memory):
            pl.when(span.num_pages > 0)(copy.start)

    def _start_pages(self, at: tuple[Any, Any], number: Any, memory: _Memory) -> None:
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
            def start(page: Any, sequence: int = sequence, first_id: Any = first_id) -> None:
                page_id = memory.ids[half, sequence, 0, first_id + page]
                index = sequence * self.pages + page
                for copy in self._page_copies(self.refs.layer[0], page_id, pages, index, sems):
                    copy.start()

    def _page_copies(self, layer: Any, page_id: Any, pages: PageBuffers, index: Any, sems: Any) -> list[Any]:
        page = page_ref(self.config, self.refs, layer, page_id)
        copies = [pltpu.make_async_copy(page, pages.values.at[index], sems.at[0])]
        if self.config.has_scales:
            scales = self.refs.scales.at[layer, page_id]
            copies.append(pltpu.make_async_copy(scales, pages.scales.at[index], sems.at[1]))
        return copies

    def _wait_for_pages(self, at: tuple[Any, Any], pages: PageBuffers, sems: Any) -> None:
        num_pages = sum(span.num_pages for span in self._spans(*at))

        @pl.loop(0, num_pages)
        def wait(page: Any) -> None:
            for copy in self._page_copies(0, 0, pages, 0, sems):
                copy.wait()
