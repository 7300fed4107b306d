"""Going through units of keys, with the pages of later ones on their way. See the package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import (
    LANES,
    PAGE_IDS,
    SCALE_HEADS,
    SCALE_TOKENS,
    Blocks,
    Call,
)
from pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import LOG2E


class Span(NamedTuple):
    """What a unit has of one sequence."""

    row: Any
    first_page: Any  # among those of the row
    num_pages: Any  # zero where the sequence has ended


class Pages(NamedTuple):
    """Those of units in memory, or of one."""

    values: Any  # [slots, pages, K, P, 2H]
    scales: Any  # f32[slots, pages, slabs, rows, 128]; None for pools without
    scales_by_token: Any  # f32[sequences, keys and values of heads, tokens], of the unit that is worked on

    def at(self, slot: Any) -> Pages:
        """Those of one unit."""
        scales = None if self.scales is None else self.scales.at[slot]
        return self._replace(values=self.values.at[slot], scales=scales)


class HeadBlock(NamedTuple):
    """A kv head of a sequence's block."""

    keys: Any  # [tokens, width]
    values: Any
    key_scales: Any  # f32[1, tokens]; None for pools without
    value_scales: Any


class Phase(ABC):
    """A list of entries, each with blocks of keys to go through: one after the other they are the units of the phase.

    While one unit is worked on, the pages of the next ones are on their way, and the page ids of the one after those.
    """

    sequences: int  # of a unit
    pages: int  # of a sequence in a unit

    def __init__(self, call: Call, blocks: Blocks, refs: Refs, num_units: Any) -> None:
        self.call, self.blocks, self.refs, self.num_units = call, blocks, refs, num_units
        self.block_tokens = self.pages * call.page_size
        self.id_chunks = -(-call.table_width // PAGE_IDS)

    @abstractmethod
    def _num_blocks(self, entry: Any) -> Any:
        """Of an entry."""

    @abstractmethod
    def _spans(self, entry: Any, block: Any) -> list[Span]:
        """The pages of each sequence in the block-th block of an entry, counted from its first."""

    @abstractmethod
    def _query_copies(self, entry: Any, slot: Any, scratch: Any) -> list[Any]:
        """What brings the queries of an entry."""

    @abstractmethod
    def _compute(self, entry: Any, block: Any, unit: Any, ring: Pages, scratch: Any) -> None:
        """Attends to the unit in `ring`."""

    @abstractmethod
    def _finish(self, scratch: Any) -> None:
        """After the last unit."""

    @abstractmethod
    def _scratch(self) -> Any:
        """What else the phase keeps in memory."""

    def run(self) -> None:
        """Goes through all."""
        slots, K = self.blocks.slots, self.call.num_kv_heads
        page = (K, self.call.page_size, 2 * self.call.head_dim)
        ring = Pages(pltpu.VMEM((slots, self.sequences * self.pages, *page), self.call.kv_dtype), None, None)
        if self.call.has_scales:
            tiles = self.refs.scales.shape[2:]
            by_token = (self.sequences, SCALE_HEADS * tiles[1], -(-self.block_tokens // LANES) * LANES)
            ring = ring._replace(
                scales=pltpu.VMEM((slots, self.sequences * self.pages, *tiles), jnp.float32),
                scales_by_token=pltpu.VMEM(by_token, jnp.float32),
            )
        pl.run_scoped(
            self._go_through,
            ring,
            pltpu.SMEM((2, self.sequences, 1, PAGE_IDS), jnp.int32),
            pltpu.SemaphoreType.DMA((slots,)),
            pltpu.SemaphoreType.DMA((2,)),
            self._scratch(),
        )

    def _go_through(self, ring: Pages, ids: Any, page_sems: Any, id_sems: Any, scratch: Any) -> None:
        ahead = self.blocks.slots - 1

        def fetch(unit: Any, at: tuple[Any, Any]) -> tuple[Any, Any]:
            """Asks for the pages of a unit and the page ids of the next; tells where that is."""
            following = self._after(*at)

            @pl.when(unit + 1 < self.num_units)
            def next_ids() -> None:
                self._start_ids(following, ids, id_sems, lax.rem(unit + 1, 2))

            @pl.when(unit < self.num_units)
            def pages() -> None:
                self._start_pages(at, unit, ring, ids, page_sems, id_sems, scratch)

            return following

        @pl.when(self.num_units > 0)
        def first_ids() -> None:
            self._start_ids((0, 0), ids, id_sems, 0)

        start = (jnp.int32(0), jnp.int32(0))
        fetched = lax.fori_loop(0, ahead, fetch, start)

        def step(unit: Any, at: tuple[tuple[Any, Any], tuple[Any, Any]]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
            here, fetched = at
            fetched = fetch(unit + ahead, fetched)
            slot = lax.rem(unit, self.blocks.slots)
            self._wait_for_pages(here, ring.at(slot), page_sems.at[slot])
            self._compute(*here, unit, ring.at(slot), scratch)
            return self._after(*here), fetched

        lax.fori_loop(0, self.num_units, step, (start, fetched))
        self._finish(scratch)

    def _after(self, entry: Any, block: Any) -> tuple[Any, Any]:
        """The entry and block that follow."""
        is_last = block + 1 >= self._num_blocks(entry)
        return jnp.where(is_last, entry + 1, entry), jnp.where(is_last, 0, block + 1)

    def _id_copies(self, at: tuple[Any, Any], ids: Any, id_sems: Any, half: Any) -> list[tuple[Any, Any]]:
        copies = []
        for number, span in enumerate(self._spans(*at)):
            chunk = span.row * self.id_chunks + span.first_page // PAGE_IDS
            source = self.refs.inputs.page_ids.at[jnp.where(span.num_pages > 0, chunk, 0)]
            copies.append((span, pltpu.make_async_copy(source, ids.at[half, number], id_sems.at[half])))
        return copies

    def _start_ids(self, at: tuple[Any, Any], ids: Any, id_sems: Any, half: Any) -> None:
        for span, copy in self._id_copies(at, ids, id_sems, half):
            pl.when(span.num_pages > 0)(copy.start)

    def _start_pages(
        self, at: tuple[Any, Any], unit: Any, ring: Pages, ids: Any, page_sems: Any, id_sems: Any, scratch: Any
    ) -> None:
        entry, block = at
        half, slot = lax.rem(unit, 2), lax.rem(unit, self.blocks.slots)

        @pl.when(block == 0)
        def queries() -> None:
            for copy in self._query_copies(entry, lax.rem(entry, self.blocks.slots), scratch):
                copy.start()

        for span, copy in self._id_copies(at, ids, id_sems, half):
            pl.when(span.num_pages > 0)(copy.wait)
        for number, span in enumerate(self._spans(*at)):
            first_id = lax.rem(span.first_page, PAGE_IDS)

            @pl.loop(0, span.num_pages)
            def start(page: Any, number: int = number, first_id: Any = first_id) -> None:
                page_id = ids[half, number, 0, first_id + page]
                place = number * self.pages + page
                for copy in self._page_copies(self.refs.layer[0], page_id, ring.at(slot), place, page_sems.at[slot]):
                    copy.start()

    def _page_copies(self, layer: Any, page_id: Any, pages: Pages, place: Any, sem: Any) -> list[Any]:
        copies = [pltpu.make_async_copy(self.refs.kv_pages.at[layer, page_id], pages.values.at[place], sem)]
        if self.call.has_scales:
            copies.append(pltpu.make_async_copy(self.refs.scales.at[layer, page_id], pages.scales.at[place], sem))
        return copies

    def _wait_for_pages(self, at: tuple[Any, Any], pages: Pages, sem: Any) -> None:
        num_pages = sum(span.num_pages for span in self._spans(*at))

        @pl.loop(0, num_pages)
        def wait(page: Any) -> None:
            for copy in self._page_copies(0, 0, pages, 0, sem):
                copy.wait()

    def _prepare(self, pages: Pages, sequence: int, end: Any) -> None:
        """Zeros in place of a sequence's keys and values from token `end` of the block on, if it ends there.

        A stale NaN would pass through a weight of zero; integers are none, but their scales may be.
        """
        if not jnp.issubdtype(self.call.kv_dtype, jnp.integer):
            self._clear_tail(pages.values, sequence, end)
        if self.call.has_scales:
            self._order_scales(pages, sequence, end)

    def _clear_tail(self, pages: Any, sequence: int, end: Any) -> None:
        slab = self.call.slab
        slabs_per_page, num_slabs = self.call.page_size // slab, self.block_tokens // slab

        @pl.when((end > 0) & (end < self.block_tokens))
        def clear() -> None:
            @pl.loop(end // slab, num_slabs)
            def clear_slab(index: Any) -> None:
                page, offset = index // slabs_per_page, lax.rem(index, slabs_per_page) * slab
                rows = pl.ds(pl.multiple_of(offset, slab), slab)
                place = pages.at[sequence * self.pages + page, :, rows]
                token = lax.broadcasted_iota(jnp.int32, place.shape, 1) + index * slab
                place[...] = jnp.where(token < end, place[...].astype(jnp.float32), 0).astype(place.dtype)

    def _order_scales(self, pages: Pages, sequence: int, end: Any) -> None:
        """Puts the scales of each head side by side, token after token; zeros from token `end` of the block on.

        Rows of a tile of scales hold several heads for the tokens of a slab, then for several slabs one head.
        """
        num_rows = pages.scales.shape[-2]
        slabs_per_page, num_slabs = self.call.page_size // SCALE_TOKENS, self.block_tokens // SCALE_TOKENS
        together = min(SCALE_HEADS, num_slabs)

        @pl.loop(0, num_slabs // together)
        def order(group: Any) -> None:
            columns = pl.ds(pl.multiple_of(group * LANES, LANES), LANES)
            column = lax.broadcasted_iota(jnp.int32, (num_rows, LANES), 1)
            slabs = []
            for number in range(together):
                index = group * together + number
                page = sequence * self.pages + index // slabs_per_page
                slabs.append(pages.scales[page, lax.rem(index, slabs_per_page)])
            for part in range(SCALE_HEADS):
                ordered = jnp.zeros((num_rows, LANES), jnp.float32)
                for number, slab in enumerate(slabs):
                    shift = (number - part) % SCALE_HEADS * SCALE_TOKENS
                    moved = pltpu.roll(slab, shift, 1) if shift else slab
                    ordered = jnp.where(column >= number * SCALE_TOKENS, moved, ordered)
                ordered = jnp.where(column + group * LANES < end, ordered, 0)
                pages.scales_by_token[sequence, part * num_rows : (part + 1) * num_rows, columns] = ordered

    def _head_block(self, pages: Pages, sequence: int, head: Any) -> HeadBlock:
        own = pages.values[sequence * self.pages : (sequence + 1) * self.pages, head]  # [pages, P, 2H]
        kv = own.reshape(self.block_tokens, own.shape[-1]).astype(self.call.product_dtype)
        H = self.call.head_dim
        keys, values = (kv[:, :H], kv[:, H:]) if self.call.width == H else (kv, kv)
        if not self.call.has_scales:
            return HeadBlock(keys, values, None, None)
        tokens = slice(0, self.block_tokens)
        scales = [pages.scales_by_token[sequence, pl.ds(2 * head + part, 1), tokens] for part in range(2)]
        return HeadBlock(keys, values, *scales)

    def _dot(self, a: Any, b: Any, contracted: int) -> Any:
        """`a[m, c] . b`, over the given dimension of b, in float32."""
        is_wide = self.call.product_dtype == jnp.float32
        return lax.dot_general(
            a,
            b,
            (((1,), (contracted,)), ((), ())),
            precision=lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )

    def _scores(self, q: Any, block: HeadBlock) -> Any:
        """In base 2, soft-capped."""
        scale, soft_cap = self.call.scale, self.call.soft_cap
        products = self._dot(q, block.keys, 1)
        if block.key_scales is not None:
            products *= block.key_scales
        if soft_cap is None:
            return products * (scale * LOG2E)
        return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)

    def _weighted_sum(self, weights: Any, block: HeadBlock) -> Any:
        if block.value_scales is not None:
            weights = weights * block.value_scales
        return self._dot(weights.astype(block.values.dtype), block.values, 0)
