"""Attention for rows with several new tokens, one query tile after the other. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import (
    BlockSizes,
    KernelConfig,
    heads_per_matmul,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import LANES, SUBLANES
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.pages import WorkItem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.phase import PageSpan, Phase
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.softmax import MASKED, Softmax
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.work_plan import (
    BASE_TOKEN,
    LEAD,
    NUM_BLOCKS,
    NUM_TILE_COLUMNS,
    NUM_TOKENS,
    POSITION,
    TILE_FIRST_BLOCK,
    TILE_ROW,
    TREE_START,
)


class _TileScratch(NamedTuple):
    queries: Any  # [slots, Q, tokens, keys]
    nodes: Any  # i32[slots, tokens, columns]
    out: Any  # [Q, tokens, sums]
    previous: Any  # the output's previous content at the tile
    state: Softmax  # [Q, tokens, ...]
    query_sems: Any  # semaphores for queries and for nodes
    out_sems: Any  # semaphores for outgoing outputs and for their previous content


class TilePhase(Phase):
    """Phase for rows with several new tokens: an entry is a tile of one row's query tokens."""

    def __init__(self, config: KernelConfig, blocks: BlockSizes, refs: Refs, kind: int) -> None:
        self.sequences, self.pages = 1, blocks.tile_pages
        self.tokens, self.table = blocks.tile_tokens[kind], refs.tiles[kind]
        super().__init__(config, blocks, refs, refs.counts[2 + kind])

    def _scratch(self) -> _TileScratch:
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

    def _column(self, entry: Any, column: int) -> Any:
        last = self.table.shape[0] // NUM_TILE_COLUMNS - 1
        return self.table[jnp.minimum(entry, last) * NUM_TILE_COLUMNS + column]

    def _num_blocks(self, entry: Any) -> Any:
        return self._column(entry, NUM_BLOCKS)

    def _end(self, entry: Any) -> Any:
        """Return the position after the last key that the tile's tokens may see."""
        return self._column(entry, POSITION) + self._column(entry, NUM_TOKENS)

    def _spans(self, entry: Any, block: Any) -> list[PageSpan]:
        first_page = (self._column(entry, TILE_FIRST_BLOCK) + block) * self.pages
        num_pages = jnp.clip(pl.cdiv(self._end(entry), self.config.page_size) - first_page, 0, self.pages)
        return [PageSpan(self._column(entry, TILE_ROW), first_page, num_pages)]

    def _tokens(self, entry: Any) -> Any:
        """Return the tile's tokens as a slice of the step."""
        return pl.ds(pl.multiple_of(self._column(entry, BASE_TOKEN), SUBLANES * 2), self.tokens)

    def _query_copies(self, entry: Any, slot: Any, scratch: _TileScratch) -> list[Any]:
        queries = self.refs.inputs.tile_queries.at[:, self._tokens(entry)]
        copies = [pltpu.make_async_copy(queries, scratch.queries.at[slot], scratch.query_sems.at[slot, 0])]
        if self.config.has_tree:
            nodes = self.refs.inputs.nodes.at[self._tokens(entry)]
            copies.append(pltpu.make_async_copy(nodes, scratch.nodes.at[slot], scratch.query_sems.at[slot, 1]))
        return copies

    def _store_copy(self, entry: Any, scratch: _TileScratch) -> Any:
        return pltpu.make_async_copy(scratch.out, self.refs.tile_out.at[:, self._tokens(entry)], scratch.out_sems.at[0])

    def _previous_copy(self, entry: Any, scratch: _TileScratch) -> Any:
        output = self.refs.tile_out.at[:, self._tokens(entry)]
        return pltpu.make_async_copy(output, scratch.previous, scratch.out_sems.at[1])

    def _compute(self, entry: Any, block: Any, work_item: WorkItem, scratch: _TileScratch) -> None:
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

        first = (self._column(entry, TILE_FIRST_BLOCK) + block) * self.block_tokens
        work_item.prepare(0, self._end(entry) - first)
        visible = self._visible(entry, first, scratch.nodes.at[slot])
        together = heads_per_matmul(self.config, self.tokens)

        @pl.loop(0, self.config.num_query_heads // together)
        def attend(number: Any) -> None:
            heads = pl.ds(number * together, together)
            own = work_item.head_block(0, number * together // self.config.group)
            q = scratch.queries[slot, heads].reshape(together * self.tokens, self.config.columns.keys)
            scores = own.scores(q).reshape(together, self.tokens, self.block_tokens)

            def add_up(weights: Any) -> Any:
                rows = weights.reshape(together * self.tokens, self.block_tokens)
                return own.weighted_sum(rows).reshape(together, self.tokens, self.config.columns.sums)

            seen = jnp.broadcast_to(visible[None], scores.shape)
            scratch.state.absorb(heads, scores, seen, add_up, None)

        @pl.when(block + 1 == self._num_blocks(entry))
        def store() -> None:
            self._previous_copy(entry, scratch).wait()
            self._merge(entry, scratch)
            self._store_copy(entry, scratch).start()

    def _reset(self, state: Softmax) -> None:
        shape = (self.tokens, LANES)
        for head in range(self.config.num_query_heads):
            sink = self.refs.inputs.tile_sinks[head] if self.config.has_sinks else MASKED
            state.max_score[head] = jnp.full(shape, sink, jnp.float32)
        state.denominator[...] = jnp.full(state.denominator.shape, 1.0 if self.config.has_sinks else 0.0, jnp.float32)
        state.values[...] = jnp.zeros(state.values.shape, jnp.float32)

    def _visible(self, entry: Any, first: Any, nodes: Any) -> Any:
        """Return the attention mask `[tokens, keys]` of a query tile over one key block: causal, window and draft tree.

        Args:
            entry: index of the tile.
            first: position of the block's first key.
            nodes: the tile tokens' bit masks of visible tree nodes, and their positions if there is a window.
        """
        shape = (self.tokens, self.block_tokens)
        query = lax.broadcasted_iota(jnp.int32, shape, 0) + self._column(entry, POSITION) - self._column(entry, LEAD)
        key = lax.broadcasted_iota(jnp.int32, shape, 1) + first
        visible = key <= query
        if self.config.has_tree:
            word, *by_depth = (jnp.broadcast_to(nodes[:, i : i + 1], shape) for i in range(nodes.shape[1]))
            node = key - self._column(entry, TREE_START)
            visible &= (node < 0) | (lax.shift_right_logical(word, node & 31) & 1 == 1)
            query = by_depth[0] if by_depth else query
        if self.config.options.window is not None:
            visible &= key > query - self.config.options.window
        return visible

    def _merge(self, entry: Any, scratch: _TileScratch) -> None:
        """Put the tile's results into `scratch.out`; other tokens in its memory tiles keep their previous outputs."""
        shape = (self.tokens, self.config.columns.sums)
        token = lax.broadcasted_iota(jnp.int32, shape, 0) - self._column(entry, LEAD)
        is_own = (token >= 0) & (token < self._column(entry, NUM_TOKENS))

        @pl.loop(0, self.config.num_query_heads)
        def merge_head(head: Any) -> None:
            previous = scratch.previous[head].astype(jnp.float32)
            scratch.out[head] = jnp.where(is_own, scratch.state.result(head), previous).astype(scratch.out.dtype)

    def _finish(self, scratch: _TileScratch) -> None:
        @pl.when(self.num_work_items > 0)
        def drain() -> None:
            self._store_copy(0, scratch).wait()
