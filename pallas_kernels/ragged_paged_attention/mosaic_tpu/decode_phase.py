"""Attention for decode rows, several processed together. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import LANES
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import WorkItem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.phase import PageSpan, Phase
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import MASKED, Softmax
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.work_plan import (
    FIRST_BLOCK,
    KV_LEN,
    NUM_DECODE_COLUMNS,
    ROW,
)


class _DecodeScratch(NamedTuple):
    queries: Any  # f32[slots, decode slots, K, padded_group, keys]
    out: Any  # f32[2, decode slots, K, padded_group, sums]
    state: Softmax  # [decode slots, K * padded_group, ...]
    query_sems: Any
    out_sems: Any


class DecodePhase(Phase):
    """Phase for decode rows: an entry is a group of decode slots, each with one row's pages."""

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs) -> None:
        self.sequences, self.pages = blocks.decode_slots, blocks.decode_pages
        super().__init__(config, blocks, refs, refs.counts[1])
        self.rows = config.num_kv_heads * config.padded_group  # matrix rows per decode slot

    def _scratch(self) -> _DecodeScratch:
        config, slots, decode_slots = self.config, self.blocks.slots, self.sequences
        heads = (decode_slots, config.num_kv_heads, config.padded_group)
        columns = pltpu.VMEM((decode_slots, self.rows, LANES), jnp.float32)
        return _DecodeScratch(
            queries=pltpu.VMEM((slots, *heads, config.columns.keys), jnp.float32),
            out=pltpu.VMEM((2, *heads, config.columns.sums), jnp.float32),
            state=Softmax(columns, columns, pltpu.VMEM((decode_slots, self.rows, config.columns.sums), jnp.float32)),
            query_sems=pltpu.SemaphoreType.DMA((slots,)),
            out_sems=pltpu.SemaphoreType.DMA((2,)),
        )

    def _num_blocks(self, entry: Any) -> Any:
        return self.refs.groups[jnp.minimum(entry, self.refs.groups.shape[0] - 1)]

    def _column(self, entry: Any, decode_slot: int, column: int) -> Any:
        last = self.refs.decode_slots.shape[0] // NUM_DECODE_COLUMNS - self.sequences
        index = jnp.minimum(entry * self.sequences, last) + decode_slot
        return self.refs.decode_slots[index * NUM_DECODE_COLUMNS + column]

    def _first_token(self, entry: Any, decode_slot: int, block: Any) -> Any:
        return (self._column(entry, decode_slot, FIRST_BLOCK) + block) * self.block_tokens

    def _spans(self, entry: Any, block: Any) -> list[PageSpan]:
        spans = []
        for decode_slot in range(self.sequences):
            first_page = (self._column(entry, decode_slot, FIRST_BLOCK) + block) * self.pages
            row_pages = pl.cdiv(self._column(entry, decode_slot, KV_LEN), self.config.page_size)
            num_pages = jnp.clip(row_pages - first_page, 0, self.pages)
            spans.append(PageSpan(self._column(entry, decode_slot, ROW), first_page, num_pages))
        return spans

    def _query_copies(self, entry: Any, slot: Any, scratch: _DecodeScratch) -> list[Any]:
        decode_slots = self.refs.inputs.decode_queries.at[pl.ds(entry * self.sequences, self.sequences)]
        return [pltpu.make_async_copy(decode_slots, scratch.queries.at[slot], scratch.query_sems.at[slot])]

    def _out_copy(self, entry: Any, scratch: _DecodeScratch) -> Any:
        half = lax.rem(entry, 2)
        decode_slots = self.refs.decode_out.at[pl.ds(entry * self.sequences, self.sequences)]
        return pltpu.make_async_copy(scratch.out.at[half], decode_slots, scratch.out_sems.at[half])

    def _compute(self, entry: Any, block: Any, work_item: WorkItem, scratch: _DecodeScratch) -> None:
        slot = lax.rem(entry, self.blocks.slots)

        @pl.when(block == 0)
        def begin() -> None:
            for copy in self._query_copies(entry, slot, scratch):
                copy.wait()
            self._reset(scratch.state)

        for decode_slot in range(self.sequences):
            self._compute_slot(
                entry, block, decode_slot, work_item, scratch.queries.at[slot, decode_slot], scratch.state
            )

        @pl.when(block + 1 == self._num_blocks(entry))
        def store() -> None:
            @pl.when(entry >= 2)
            def free() -> None:
                self._out_copy(entry - 2, scratch).wait()

            half = lax.rem(entry, 2)
            for decode_slot in range(self.sequences):
                shape = scratch.out.shape[2:]
                scratch.out[half, decode_slot] = scratch.state.result(decode_slot).reshape(shape)
            self._out_copy(entry, scratch).start()

    def _reset(self, state: Softmax) -> None:
        sinks = self.refs.inputs.decode_sinks
        for decode_slot in range(self.sequences):
            state.max_score[decode_slot] = (
                sinks[...] if self.config.has_sinks else jnp.full(sinks.shape, MASKED, jnp.float32)
            )
            state.denominator[decode_slot] = jnp.full(sinks.shape, 1.0 if self.config.has_sinks else 0.0, jnp.float32)
        state.values[...] = jnp.zeros(state.values.shape, jnp.float32)

    def _compute_slot(
        self, entry: Any, block: Any, decode_slot: int, work_item: WorkItem, queries: Any, state: Softmax
    ) -> None:
        first, kv_len = self._first_token(entry, decode_slot, block), self._column(entry, decode_slot, KV_LEN)
        work_item.prepare(decode_slot, kv_len - first)
        heads = [work_item.head_block(decode_slot, head) for head in range(self.config.num_kv_heads)]
        scores = [own.scores(queries[head].astype(own.keys.dtype)) for head, own in enumerate(heads)]
        key = lax.broadcasted_iota(jnp.int32, (self.rows, self.block_tokens), 1) + first
        visible = key < kv_len
        if self.config.options.window is not None:
            visible &= key >= kv_len - self.config.options.window

        def add_up(weights: Any) -> Any:
            size = self.config.padded_group
            parts = [weights[head * size : (head + 1) * size] for head in range(len(heads))]
            return jnp.concatenate([own.weighted_sum(part) for own, part in zip(heads, parts, strict=True)])

        state.absorb(decode_slot, jnp.concatenate(scores), visible, add_up, first < kv_len)

    def _finish(self, scratch: _DecodeScratch) -> None:
        num_entries = self._count_entries()

        @pl.loop(jnp.maximum(num_entries - 2, 0), num_entries)
        def drain(entry: Any) -> None:
            self._out_copy(entry, scratch).wait()

    def _count_entries(self) -> Any:
        """Return how many groups have blocks; these groups come first."""
        groups = self.refs.groups
        return lax.fori_loop(0, groups.shape[0], lambda i, n: n + (groups[i] > 0).astype(jnp.int32), jnp.int32(0))
