"""Computing warpgroups of a worker: products, masks and softmax. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import (
    LOG2E,
    MASKED,
    Item,
    Softmax,
    cast,
    copy_tokens,
    i32,
    load,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    Call,
    Tiles,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.ring import RingReader
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import Warpgroup, tile_part

_ROWS = plgpu.Layout.WGMMA.reduce(1)


class ComputingWarpgroup(Warpgroup):
    """Warpgroup that attends with some rows of each tile over some columns of the values."""

    def __init__(self, call: Call, tiles: Tiles, inputs: Inputs, shared: Shared, thread: Any) -> None:
        warpgroups = i32(tiles.warpgroups)
        super().__init__(call, tiles, inputs, shared, lax.div(thread, warpgroups))
        self.part = tile_part(tiles, lax.rem(thread, warpgroups))
        self.ring = RingReader(call, tiles, shared, self.local_worker, self.part)

    def run(self) -> None:
        """Attend with this warpgroup's part of each tile."""

        def compute_item(index: Any, block_count: Any) -> Any:
            item = self._item(index)
            plgpu.barrier_wait(self.shared.q_ready.at[self.local_worker])
            state = self._attend_item(item, block_count)
            plgpu.barrier_arrive(self.shared.q_free.at[self.local_worker])

            @pl.when(item.is_first & item.is_last)
            def finish() -> None:
                self._store(item, state)

            @pl.when(~(item.is_first & item.is_last))
            def leave_to_merge() -> None:
                place = self.index, jnp.where(item.is_first, 1, 0), self.part.column, self.part.rows
                self.inputs.values[place] = state.values
                self.inputs.max_score[place] = state.max_score
                self.inputs.denominator[place] = state.denominator

            return block_count + item.end - item.begin

        lax.fori_loop(*self.items, compute_item, i32(0))

    def _attend_item(self, item: Item, block_count: Any) -> Softmax:
        """Return the softmax over the blocks of one work item; blocks are masked only where necessary."""
        call = self.call
        state = self._start(item)
        # Blocks before full_end are seen in full by all tokens of the tile.
        num_seen = jnp.minimum(item.position + 1, item.tree_start) if call.has_tree else item.position + 1
        block_kv = i32(call.block_kv)
        full_end = jnp.clip(lax.div(num_seen, block_kv), item.begin, item.end)
        full_begin = item.begin
        if call.options.window is not None:
            first_key = jnp.maximum(item.key_end - call.options.window, 0)  # the first that the last token sees
            first_full = lax.div(first_key + (call.block_kv - 1), block_kv)
            full_begin = jnp.clip(first_full, item.begin, full_end)

        def absorb(block: Any, state: Softmax, masked: bool) -> Softmax:
            slot = self._slot(block_count + block - item.begin)
            return self._absorb_block(item, block, slot, state, masked)

        if call.options.window is not None:
            state = lax.fori_loop(item.begin, full_begin, functools.partial(absorb, masked=True), state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(absorb, masked=False), state)
        return lax.fori_loop(full_end, item.end, functools.partial(absorb, masked=True), state)

    def _start(self, item: Item) -> Softmax:
        """Return the softmax before any key: empty, or holding the sinks in the split that begins the work item."""
        max_score = cast(jnp.full((WARPGROUP_ROWS,), MASKED, jnp.float32), _ROWS)
        denominator = cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _ROWS)
        if self.call.has_sinks:
            sinks = load(self.inputs.sink_rows.at[item.head, self.part.rows], _ROWS)
            max_score = jnp.where(item.is_first, sinks, max_score)
            denominator = jnp.where(item.is_first, jnp.full_like(denominator, 1), denominator)
        values = cast(jnp.zeros((WARPGROUP_ROWS, self.call.part_columns), jnp.float32), plgpu.Layout.WGMMA)
        return Softmax(values, max_score, denominator)

    def _absorb_block(self, item: Item, block: Any, slot: Any, state: Softmax, masked: bool) -> Softmax:
        """Return the softmax after one more block of keys."""
        k = self.ring.keys(item, block, slot, masked)
        # Zero, as the compiler cannot know: else it keeps the addresses of all parts of a query, for which a wide head
        # leaves no registers, from one block to the next.
        zero = jnp.minimum(block, 0) if self.call.is_wide else 0
        scores = _scores(self.shared.q.at[self.local_worker + zero, self.part.rows], k)
        self.ring.give_back_keys(slot)
        scores = self._scale_and_mask(scores, item, block, masked)
        max_score = jnp.maximum(state.max_score, scores.max(axis=1))
        rescale = jnp.exp2(state.max_score - max_score)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(max_score, scores.shape, [0]))
        denominator = state.denominator * rescale + weights.sum(axis=1)
        weights = weights.astype(self.call.dtype)
        v = self.ring.values(slot, masked)
        values = state.values * lax.broadcast_in_dim(rescale, state.values.shape, [0])
        values = self._add_values(values, weights, v)
        self.ring.give_back_values(slot)
        return Softmax(values, max_score, denominator)

    def _scale_and_mask(self, scores: Any, item: Item, block: Any, masked: bool) -> Any:
        """Return scores in base 2, soft-capped; a score that its query does not see is MASKED."""
        scale, soft_cap, window = self.call.options.scale, self.call.options.soft_cap, self.call.options.window
        if soft_cap is None:
            scores *= scale * LOG2E
        else:
            # tanh by its definition: the approximate instruction has only 11 bits.
            growth = jnp.exp2(scores * (2 * LOG2E * scale / soft_cap))
            scores = (soft_cap * LOG2E) * (1 - 2 / (growth + 1))
        if not masked:
            return scores
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        key += block * self.call.block_kv
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=_ROWS) + self.part.row
        token = (row & (self.tiles.tokens - 1)) - item.lead + item.first_head
        if self.call.token_heads > 1:
            token = lax.div(token, jnp.full_like(token, self.call.token_heads))
        query = lax.broadcast_in_dim(item.position + token, scores.shape, [0])
        visible = key <= query
        if self.call.has_tree:
            word, *by_depth = (self._tree_column(item, i, key.shape) for i in range(1 if window is None else 2))
            node = key - item.tree_start
            visible &= (node < 0) | (lax.shift_right_logical(word, node & 31) & 1 == 1)
            query = by_depth[0] if by_depth else query
        if window is not None:
            visible &= key > query - window
        return jnp.where(visible, scores, MASKED)

    def _tree_column(self, item: Item, column: int, shape: tuple[int, int]) -> Any:
        """Return a column of the nodes that each query sees, for all keys of a block."""
        return lax.broadcast_in_dim(
            load(self.inputs.tree_rows.at[item.tile, column, self.part.rows], _ROWS), shape, [0]
        )

    def _add_values(self, values: Any, weights: Any, v: Any) -> Any:
        """Return `values + weights @ v`."""
        if self.call.interpret is None:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(values))
        p = self.shared.p.at[self.local_worker * self.tiles.warpgroups + self.part.index]
        p[...] = weights
        plgpu.commit_smem()

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, p, v)
            return acc[...]

        return values + pl.run_scoped(multiply, plgpu.ACC(values.shape, jnp.float32))

    def _store(self, item: Item, state: Softmax) -> None:
        """Write this part of the tile to the output, by way of shared memory; live tokens only."""
        width = self.call.out_columns
        num_chunks = self.call.part_columns // width
        for chunk in range(num_chunks):
            values = lax.slice(state.values, (0, chunk * width), (WARPGROUP_ROWS, (chunk + 1) * width))
            columns = state._replace(values=values).result(plgpu.Layout.WGMMA, self.call.dtype)
            self._store_columns(item, columns, self.part.column * num_chunks + chunk)

    def _store_columns(self, item: Item, columns: Any, index: Any) -> None:
        """Write the index-th group of columns of the tile to the output."""
        call, tiles, part = self.call, self.tiles, self.part
        out = self.shared.out.at[self.local_worker * tiles.warpgroups + part.index]
        shift = call.out_shift - item.lead  # the first stored token lies at a multiple of eight
        out[pl.ds(shift, WARPGROUP_ROWS)] = columns
        plgpu.commit_smem()
        tokens = min(tiles.tokens, WARPGROUP_ROWS)  # tokens of one head in one part

        @pl.loop(0, WARPGROUP_ROWS // tokens)
        def store_head(segment: Any) -> None:
            row = part.row + segment * tokens
            g, first = lax.div(row, i32(tiles.tokens)), lax.rem(row, i32(tiles.tokens))
            begin = jnp.maximum(item.lead - first, 0)  # index among this head's tokens in this part
            end = jnp.clip(item.lead + item.num_tokens - first, begin, tokens)
            num_tokens = jnp.where(g < call.group, end - begin, 0)
            token, head = item.base_token + first + begin, item.head * call.group + g
            copy_tokens(out, shift + segment * tokens + begin, self.inputs.out, token, head, index, num_tokens, tokens)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scores(q: Any, k: Any) -> Any:
    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, k.shape[0]), jnp.float32))
