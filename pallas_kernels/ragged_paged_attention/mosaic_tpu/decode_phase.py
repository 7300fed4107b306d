"""Attention for decode rows, several processed together. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import work_plan
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import WorkItem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.phase import PageSpan, Phase
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import MASKED, Softmax
from jaxserve.pallas_kernels.tpu import LANES


class _DecodeScratch(NamedTuple):
    """VMEM and semaphores for the decode phase."""

    queries: Ref  # f32[slots, decode slots, K, padded_group, keys]
    out: Ref  # f32[2, decode slots, K, padded_group, sums], outputs on their way to HBM
    state: Softmax  # f32[decode slots, K * padded_group, ...]
    query_sems: Ref  # [slots]
    out_sems: Ref  # [2]


class DecodePhase(Phase):
    """Attention for rows with one new token: an entry is a group of decode slots, each with one row and its pages."""

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs) -> None:
        """Attend with the decode slots that the plan, in `refs`, lists."""
        self.sequences, self.pages = blocks.decode_slots, blocks.decode_pages
        super().__init__(config, blocks, refs, refs.counts[1])
        self.rows = config.num_kv_heads * config.padded_group  # matrix rows per decode slot

    def _scratch(self) -> _DecodeScratch:
        """Return shapes and dtypes for the VMEM and semaphores to allocate."""
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

    def _num_blocks(self, entry: Scalar) -> Scalar:
        """Return how many key blocks a decode slot group attends to: as many as its longest row has."""
        return self.refs.groups[jnp.minimum(entry, self.refs.groups.shape[0] - 1)]

    def _column(self, entry: Scalar, decode_slot: int, column: int) -> Scalar:
        """Read an element in `WorkPlan.decode_slots`.

        Args:
            entry: group index.
            decode_slot: index in the group.
            column: table column, such as `work_plan.KV_LEN`.
        """
        last = self.refs.decode_slots.shape[0] // work_plan.NUM_DECODE_COLUMNS - self.sequences
        index = jnp.minimum(entry * self.sequences, last) + decode_slot
        return self.refs.decode_slots[index * work_plan.NUM_DECODE_COLUMNS + column]

    def _first_token(self, entry: Scalar, decode_slot: int, block: Scalar) -> Scalar:
        """Return the position of the first token in key block `block` of a group's decode slot."""
        return (self._column(entry, decode_slot, work_plan.FIRST_BLOCK) + block) * self.block_tokens

    def _spans(self, entry: Scalar, block: Scalar) -> list[PageSpan]:
        """Return the pages of a group's key block, one span per decode slot."""
        spans = []
        for decode_slot in range(self.sequences):
            first_page = (self._column(entry, decode_slot, work_plan.FIRST_BLOCK) + block) * self.pages
            row_pages = pl.cdiv(self._column(entry, decode_slot, work_plan.KV_LEN), self.config.page_size)
            num_pages = jnp.clip(row_pages - first_page, 0, self.pages)
            spans.append(PageSpan(self._column(entry, decode_slot, work_plan.ROW), first_page, num_pages))
        return spans

    def _query_copies(self, entry: Scalar, slot: Scalar, scratch: _DecodeScratch) -> list[Any]:
        """Return the copy, not yet started, of a group's queries from HBM to slot `slot` of `scratch.queries`."""
        decode_slots = self.refs.inputs.decode_queries.at[pl.ds(entry * self.sequences, self.sequences)]
        return [pltpu.make_async_copy(decode_slots, scratch.queries.at[slot], scratch.query_sems.at[slot])]

    def _out_copy(self, entry: Scalar, scratch: _DecodeScratch) -> Any:
        """Return the copy, not yet started, of a group's outputs from `scratch.out` to HBM."""
        half = lax.rem(entry, 2)
        decode_slots = self.refs.decode_out.at[pl.ds(entry * self.sequences, self.sequences)]
        return pltpu.make_async_copy(scratch.out.at[half], decode_slots, scratch.out_sems.at[half])

    def _compute(self, entry: Scalar, block: Scalar, work_item: WorkItem, scratch: _DecodeScratch) -> None:
        """Attend with a group's rows to one key block; after the last block, start to copy the outputs to HBM."""
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
        """Set the softmax state before any key: empty, or with the sinks."""
        sinks = self.refs.inputs.decode_sinks
        for decode_slot in range(self.sequences):
            state.max_score[decode_slot] = (
                sinks[...] if self.config.has_sinks else jnp.full(sinks.shape, MASKED, jnp.float32)
            )
            state.denominator[decode_slot] = jnp.full(sinks.shape, 1.0 if self.config.has_sinks else 0.0, jnp.float32)
        state.values[...] = jnp.zeros(state.values.shape, jnp.float32)

    def _compute_slot(
        self, entry: Scalar, block: Scalar, decode_slot: int, work_item: WorkItem, queries: Ref, state: Softmax
    ) -> None:
        """Attend with one decode slot's row to one of its key blocks.

        Args:
            entry: decode slot group.
            block: key block index.
            decode_slot: the decode slot's index in the group.
            work_item: the group's pages in VMEM.
            queries: the row's queries in VMEM, f32 `[K, padded_group, keys]`.
            state: the group's softmax state, which is updated.
        """
        first, kv_len = self._first_token(entry, decode_slot, block), self._column(entry, decode_slot, work_plan.KV_LEN)
        work_item.prepare(decode_slot, kv_len - first)
        heads = [work_item.head_block(decode_slot, head) for head in range(self.config.num_kv_heads)]
        scores = [kv.scores(queries[head].astype(kv.keys.dtype)) for head, kv in enumerate(heads)]
        key = lax.broadcasted_iota(jnp.int32, (self.rows, self.block_tokens), 1) + first
        visible = key < kv_len
        if self.config.options.window is not None:
            visible &= key >= kv_len - self.config.options.window

        def weighted_sum(weights: Registers) -> Registers:
            size = self.config.padded_group
            parts = [weights[head * size : (head + 1) * size] for head in range(len(heads))]
            return jnp.concatenate([kv.weighted_sum(part) for kv, part in zip(heads, parts, strict=True)])

        state.absorb(decode_slot, jnp.concatenate(scores), visible, weighted_sum, first < kv_len)

    def _finish(self, scratch: _DecodeScratch) -> None:
        """Wait until the last two groups' outputs are in HBM."""
        num_entries = self._count_entries()

        @pl.loop(jnp.maximum(num_entries - 2, 0), num_entries)
        def drain(entry: Scalar) -> None:
            self._out_copy(entry, scratch).wait()

    def _count_entries(self) -> Scalar:
        """Return how many groups of decode slots have key blocks; these groups come first in the list."""
        groups = self.refs.groups
        return lax.fori_loop(0, groups.shape[0], lambda i, n: n + (groups[i] > 0).astype(jnp.int32), jnp.int32(0))
