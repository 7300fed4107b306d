"""Attention for rows with several new tokens, one query tile after the other. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import work_plan
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import (
    BlockSizes,
    KernelConfig,
    heads_per_matmul,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import SUBLANES
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import WorkItem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.phase import PageSpan, Phase
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import MASKED, Softmax
from jaxserve.pallas_kernels.tpu import LANES


class _TileScratch(NamedTuple):
    """VMEM and semaphores for the tile phase."""

    queries: Ref  # [slots, Q, tokens, keys]
    nodes: Ref  # i32[slots, tokens, columns]
    out: Ref  # [Q, tokens, sums], outputs on their way to HBM
    previous: Ref  # [Q, tokens, sums], previous content of the output at the tile's tokens
    state: Softmax  # f32[Q, tokens, ...]
    query_sems: Ref  # [slots, 2], semaphores for queries and for nodes
    out_sems: Ref  # [2], semaphores for outgoing outputs and for their previous content


class TilePhase(Phase):
    """Attention for rows with several new tokens: an entry is a tile of one row's query tokens.

    Args:
        config: static parameters.
        blocks: block sizes.
        refs: the kernel's references.
        size_index: tile size, 0 for short tiles and 1 for tall ones.
    """

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs, size_index: int) -> None:
        """Attend with the short (`size_index` 0) or tall (1) tiles that the plan, in `refs`, lists."""
        self.sequences, self.pages = 1, blocks.tile_pages
        self.tokens, self.table = blocks.tile_tokens[size_index], refs.tiles[size_index]
        super().__init__(config, blocks, refs, refs.counts[2 + size_index])

    def _scratch(self) -> _TileScratch:
        """Return shapes and dtypes for the VMEM and semaphores to allocate."""
        config, slots = self.config, self.blocks.slots
        queries, dtype = (config.num_query_heads, self.tokens), config.matmul_dtype
        sums, columns = (*queries, config.columns.sums), pltpu.VMEM((*queries, LANES), jnp.float32)
        return _TileScratch(
            queries=pltpu.VMEM((slots, *queries, config.columns.keys), dtype),
            nodes=pltpu.VMEM((slots, self.tokens, self.refs.inputs.nodes.shape[1]), jnp.int32),
            out=pltpu.VMEM(sums, dtype),
            previous=pltpu.VMEM(sums, dtype),
            state=Softmax(columns, columns, pltpu.VMEM(sums, jnp.float32)),
            query_sems=pltpu.SemaphoreType.DMA((slots, 2)),
            out_sems=pltpu.SemaphoreType.DMA((2,)),
        )

    def _column(self, entry: Scalar, column: int) -> Scalar:
        """Read an element in `WorkPlan.tiles`: tile `entry`, and a column such as `work_plan.NUM_TOKENS`."""
        last = self.table.shape[0] // work_plan.NUM_TILE_COLUMNS - 1
        return self.table[jnp.minimum(entry, last) * work_plan.NUM_TILE_COLUMNS + column]

    def _num_blocks(self, entry: Scalar) -> Scalar:
        """Return how many key blocks a tile attends to."""
        return self._column(entry, work_plan.NUM_BLOCKS)

    def _end(self, entry: Scalar) -> Scalar:
        """Return the end of the keys that a tile's tokens may see, as a position in the sequence."""
        return self._column(entry, work_plan.POSITION) + self._column(entry, work_plan.NUM_TOKENS)

    def _spans(self, entry: Scalar, block: Scalar) -> list[PageSpan]:
        """Return the pages of a tile's key block, as the only span."""
        first_page = (self._column(entry, work_plan.TILE_FIRST_BLOCK) + block) * self.pages
        num_pages = jnp.clip(pl.cdiv(self._end(entry), self.config.page_size) - first_page, 0, self.pages)
        return [PageSpan(self._column(entry, work_plan.TILE_ROW), first_page, num_pages)]

    def _tokens(self, entry: Scalar) -> Any:
        """Return the slice of the step's tokens that a tile covers, including tokens from other rows."""
        return pl.ds(pl.multiple_of(self._column(entry, work_plan.BASE_TOKEN), SUBLANES * 2), self.tokens)

    def _query_copies(self, entry: Scalar, slot: Scalar, scratch: _TileScratch) -> list[Any]:
        """Return the copies, not yet started, of a tile's queries and tree nodes to slot `slot` of `scratch`."""
        queries = self.refs.inputs.tile_queries.at[:, self._tokens(entry)]
        copies = [pltpu.make_async_copy(queries, scratch.queries.at[slot], scratch.query_sems.at[slot, 0])]
        if self.config.has_tree:
            nodes = self.refs.inputs.nodes.at[self._tokens(entry)]
            copies.append(pltpu.make_async_copy(nodes, scratch.nodes.at[slot], scratch.query_sems.at[slot, 1]))
        return copies

    def _store_copy(self, entry: Scalar, scratch: _TileScratch) -> Any:
        """Return the copy, not yet started, of a tile's outputs from `scratch.out` to HBM."""
        return pltpu.make_async_copy(scratch.out, self.refs.tile_out.at[:, self._tokens(entry)], scratch.out_sems.at[0])

    def _previous_copy(self, entry: Scalar, scratch: _TileScratch) -> Any:
        """Return the copy, not yet started, of the output at a tile's tokens from HBM to `scratch.previous`."""
        output = self.refs.tile_out.at[:, self._tokens(entry)]
        return pltpu.make_async_copy(output, scratch.previous, scratch.out_sems.at[1])

    def _compute(self, entry: Scalar, block: Scalar, work_item: WorkItem, scratch: _TileScratch) -> None:
        """Attend with a tile's tokens to one key block; after the last block, start to copy the outputs to HBM."""
        slot = lax.rem(entry, self.blocks.slots)

        @pl.when(block == 0)
        def begin() -> None:
            for copy in self._query_copies(entry, slot, scratch):
                copy.wait()

            @pl.when(entry > 0)
            def order() -> None:  # the previous tile may have written outputs that this one must keep
                self._store_copy(entry - 1, scratch).wait()

            self._previous_copy(entry, scratch).start()
            self._reset(scratch.state)

        first = (self._column(entry, work_plan.TILE_FIRST_BLOCK) + block) * self.block_tokens
        work_item.prepare(0, self._end(entry) - first)
        visible = self._visible(entry, first, scratch.nodes.at[slot])
        together = heads_per_matmul(self.config, self.tokens)

        @pl.loop(0, self.config.num_query_heads // together)
        def attend(number: Scalar) -> None:
            heads = pl.ds(number * together, together)
            kv = work_item.head_block(0, number * together // self.config.group)
            q = scratch.queries[slot, heads].reshape(together * self.tokens, self.config.columns.keys)
            scores = kv.scores(q).reshape(together, self.tokens, self.block_tokens)

            def weighted_sum(weights: Registers) -> Registers:
                rows = weights.reshape(together * self.tokens, self.block_tokens)
                return kv.weighted_sum(rows).reshape(together, self.tokens, self.config.columns.sums)

            seen = jnp.broadcast_to(visible[None], scores.shape)
            scratch.state.absorb(heads, scores, seen, weighted_sum, None)

        @pl.when(block + 1 == self._num_blocks(entry))
        def store() -> None:
            self._previous_copy(entry, scratch).wait()
            self._merge(entry, scratch)
            self._store_copy(entry, scratch).start()

    def _reset(self, state: Softmax) -> None:
        """Set the softmax state before any key: empty, or with the sinks."""
        shape = (self.tokens, LANES)
        for head in range(self.config.num_query_heads):
            sink = self.refs.inputs.tile_sinks[head] if self.config.has_sinks else MASKED
            state.max_score[head] = jnp.full(shape, sink, jnp.float32)
        state.denominator[...] = jnp.full(state.denominator.shape, 1.0 if self.config.has_sinks else 0.0, jnp.float32)
        state.values[...] = jnp.zeros(state.values.shape, jnp.float32)

    def _visible(self, entry: Scalar, first: Scalar, nodes: Ref) -> Registers:
        """Return the attention mask `[tokens, keys]` of a query tile over one key block: causal, window and draft tree.

        Args:
            entry: tile index.
            first: position of the block's first key.
            nodes: `visible_nodes` of the tile's tokens in VMEM, i32 `[tokens, columns]`.
        """
        shape = (self.tokens, self.block_tokens)
        query = (
            lax.broadcasted_iota(jnp.int32, shape, 0)
            + self._column(entry, work_plan.POSITION)
            - self._column(entry, work_plan.LEAD)
        )
        key = lax.broadcasted_iota(jnp.int32, shape, 1) + first
        visible = key <= query
        if self.config.has_tree:
            word, *by_depth = (jnp.broadcast_to(nodes[:, i : i + 1], shape) for i in range(nodes.shape[1]))
            node = key - self._column(entry, work_plan.TREE_START)
            visible &= (node < 0) | (lax.shift_right_logical(word, node & 31) & 1 == 1)
            query = by_depth[0] if by_depth else query
        if self.config.options.window is not None:
            visible &= key > query - self.config.options.window
        return visible

    def _merge(self, entry: Scalar, scratch: _TileScratch) -> None:
        """Write a tile's outputs to `scratch.out`, with the previous outputs of the tokens from other rows."""
        shape = (self.tokens, self.config.columns.sums)
        token = lax.broadcasted_iota(jnp.int32, shape, 0) - self._column(entry, work_plan.LEAD)
        is_own = (token >= 0) & (token < self._column(entry, work_plan.NUM_TOKENS))

        @pl.loop(0, self.config.num_query_heads)
        def merge_head(head: Scalar) -> None:
            previous = scratch.previous[head].astype(jnp.float32)
            scratch.out[head] = jnp.where(is_own, scratch.state.result(head), previous).astype(scratch.out.dtype)

    def _finish(self, scratch: _TileScratch) -> None:
        """Wait until the last tile's outputs are in HBM."""

        @pl.when(self.num_work_items > 0)
        def drain() -> None:
            self._store_copy(0, scratch).wait()
