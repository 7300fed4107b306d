"""Computing warpgroups: matmuls, masks and softmax. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.ring_reader import RingReader
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import Warpgroup, tile_slice
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import (
    LOG2E,
    MASKED,
    Softmax,
    WorkItem,
    cast,
    copy_tokens,
    i32,
    load,
)

_ROWS = plgpu.Layout.WGMMA.reduce(1)


class ComputingWarpgroup(Warpgroup):
    """Warpgroup that computes 64 rows in each tile and some columns of its values."""

    def __init__(self, config: KernelConfig, tiling: Tiling, inputs: Inputs, shared: Shared, thread: Any) -> None:
        warpgroups = i32(tiling.warpgroups)
        super().__init__(config, tiling, inputs, shared, lax.div(thread, warpgroups))
        self.slice = tile_slice(tiling, lax.rem(thread, warpgroups))
        self.ring = RingReader(config, tiling, shared, self.local_worker, self.slice)

    def run(self) -> None:
        """Attend with this warpgroup's slice of each tile."""

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
                split = self.index, jnp.where(item.is_first, 1, 0), self.slice.column, self.slice.rows
                self.inputs.values[split] = state.values
                self.inputs.max_score[split] = state.max_score
                self.inputs.denominator[split] = state.denominator

            return block_count + item.end - item.begin

        lax.fori_loop(*self.items, compute_item, i32(0))

    def _attend_item(self, item: WorkItem, block_count: Any) -> Softmax:
        """Return the softmax over a work item's blocks; only blocks that need a mask are masked."""
        config = self.config
        state = self._start(item)
        # Apart from the window, every token in the tile sees all keys in the blocks before full_end.
        num_seen = jnp.minimum(item.position + 1, item.tree_start) if config.has_tree else item.position + 1
        block_kv = i32(config.block_kv)
        full_end = jnp.clip(lax.div(num_seen, block_kv), item.begin, item.end)
        full_begin = item.begin
        if config.options.window is not None:
            first_key = jnp.maximum(item.key_end - config.options.window, 0)  # the first that the last token sees
            first_full = lax.div(first_key + (config.block_kv - 1), block_kv)
            full_begin = jnp.clip(first_full, item.begin, full_end)

        def absorb(block: Any, state: Softmax, masked: bool) -> Softmax:
            slot = self._slot(block_count + block - item.begin)
            return self._absorb_block(item, block, slot, state, masked)

        if config.options.window is not None:
            state = lax.fori_loop(item.begin, full_begin, functools.partial(absorb, masked=True), state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(absorb, masked=False), state)
        return lax.fori_loop(full_end, item.end, functools.partial(absorb, masked=True), state)

    def _start(self, item: WorkItem) -> Softmax:
        """Return the softmax before any key: empty, or with the sinks in the work item's first split."""
        max_score = cast(jnp.full((WARPGROUP_ROWS,), MASKED, jnp.float32), _ROWS)
        denominator = cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _ROWS)
        if self.config.has_sinks:
            sinks = load(self.inputs.sink_rows.at[item.head, self.slice.rows], _ROWS)
            max_score = jnp.where(item.is_first, sinks, max_score)
            denominator = jnp.where(item.is_first, jnp.full_like(denominator, 1), denominator)
        values = cast(jnp.zeros((WARPGROUP_ROWS, self.config.warpgroup_columns), jnp.float32), plgpu.Layout.WGMMA)
        return Softmax(values, max_score, denominator)

    def _absorb_block(self, item: WorkItem, block: Any, slot: Any, state: Softmax, masked: bool) -> Softmax:
        """Return the softmax after one more key block."""
        k = self.ring.keys(item, block, slot, masked)
        # Always zero, unknown to the compiler: else it keeps the addresses for all parts of a query between blocks, and
        # wide heads leave no registers for them.
        zero = jnp.minimum(block, 0) if self.config.is_wide else 0
        scores = _scores(self.shared.q.at[self.local_worker + zero, self.slice.rows], k)
        self.ring.release_keys(slot)
        scores = self._scale_and_mask(scores, item, block, masked)
        max_score = jnp.maximum(state.max_score, scores.max(axis=1))
        rescale = jnp.exp2(state.max_score - max_score)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(max_score, scores.shape, [0]))
        denominator = state.denominator * rescale + weights.sum(axis=1)
        weights = weights.astype(self.config.dtype)
        v = self.ring.values(slot, masked)
        values = state.values * lax.broadcast_in_dim(rescale, state.values.shape, [0])
        values = self._add_values(values, weights, v)
        self.ring.release_values(slot)
        return Softmax(values, max_score, denominator)

    def _scale_and_mask(self, scores: Any, item: WorkItem, block: Any, masked: bool) -> Any:
        """Return soft-capped scores in base 2; a score that its query does not see is MASKED."""
        scale, soft_cap, window = self.config.options.scale, self.config.options.soft_cap, self.config.options.window
        if soft_cap is None:
            scores *= scale * LOG2E
        else:
            # tanh by its definition: the approximate instruction has only 11 bits.
            growth = jnp.exp2(scores * (2 * LOG2E * scale / soft_cap))
            scores = (soft_cap * LOG2E) * (1 - 2 / (growth + 1))
        if not masked:
            return scores
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        key += block * self.config.block_kv
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=_ROWS) + self.slice.row
        token = (row & (self.tiling.tokens - 1)) - item.lead + item.first_head
        if self.config.token_heads > 1:
            token = lax.div(token, jnp.full_like(token, self.config.token_heads))
        query = lax.broadcast_in_dim(item.position + token, scores.shape, [0])
        visible = key <= query
        if self.config.has_tree:
            word, *by_depth = (
                self._broadcast_tree_column(item, i, key.shape) for i in range(1 if window is None else 2)
            )
            node = key - item.tree_start
            visible &= (node < 0) | (lax.shift_right_logical(word, node & 31) & 1 == 1)
            query = by_depth[0] if by_depth else query
        if window is not None:
            visible &= key > query - window
        return jnp.where(visible, scores, MASKED)

    def _broadcast_tree_column(self, item: WorkItem, column: int, shape: tuple[int, int]) -> Any:
        """Broadcast a column from `visible_nodes`, one element per query, over the keys in a block."""
        return lax.broadcast_in_dim(
            load(self.inputs.tree_rows.at[item.tile, column, self.slice.rows], _ROWS), shape, [0]
        )

    def _add_values(self, values: Any, weights: Any, v: Any) -> Any:
        """Return `values + weights @ v`."""
        if self.config.interpret is None:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(values))
        p = self.shared.p.at[self.local_worker * self.tiling.warpgroups + self.slice.index]
        p[...] = weights
        plgpu.commit_smem()

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, p, v)
            return acc[...]

        return values + pl.run_scoped(multiply, plgpu.ACC(values.shape, jnp.float32))

    def _store(self, item: WorkItem, state: Softmax) -> None:
        """Write the live tokens in this warpgroup's slice to the output, through shared memory."""
        width = self.config.out_columns
        num_chunks = self.config.warpgroup_columns // width
        for chunk in range(num_chunks):
            values = lax.slice(state.values, (0, chunk * width), (WARPGROUP_ROWS, (chunk + 1) * width))
            columns = state._replace(values=values).result(plgpu.Layout.WGMMA, self.config.dtype)
            self._store_columns(item, columns, self.slice.column * num_chunks + chunk)

    def _store_columns(self, item: WorkItem, columns: Any, index: Any) -> None:
        """Write column group `index` to the output."""
        config, tiling, part = self.config, self.tiling, self.slice
        out = self.shared.out.at[self.local_worker * tiling.warpgroups + part.index]
        shift = config.out_shift - item.lead  # the first stored token lies at a multiple of eight
        out[pl.ds(shift, WARPGROUP_ROWS)] = columns
        plgpu.commit_smem()
        tokens = min(tiling.tokens, WARPGROUP_ROWS)  # tokens per head in one part

        @pl.loop(0, WARPGROUP_ROWS // tokens)
        def store_head(segment: Any) -> None:
            row = part.row + segment * tokens
            g, first = lax.div(row, i32(tiling.tokens)), lax.rem(row, i32(tiling.tokens))
            begin = jnp.maximum(item.lead - first, 0)  # index among this head's tokens in this part
            end = jnp.clip(item.lead + item.num_tokens - first, begin, tokens)
            num_tokens = jnp.where(g < config.group, end - begin, 0)
            token, head = item.base_token + first + begin, item.head * config.group + g
            copy_tokens(out, shift + segment * tokens + begin, self.inputs.out, token, head, index, num_tokens, tokens)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scores(q: Any, k: Any) -> Any:
    def multiply(acc: Any) -> Any:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, k.shape[0]), jnp.float32))
