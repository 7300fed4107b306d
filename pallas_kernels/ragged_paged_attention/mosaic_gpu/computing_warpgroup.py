"""Computing warpgroups: matmuls, masks and softmax. See the package."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.ring_reader import RingReader
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import TileSlice, Warpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import (
    LOG2E,
    MASKED,
    Softmax,
    WorkItem,
    copy_tokens,
)
from jaxserve.pallas_kernels.warpgroups import i32, load

_ROWS = plgpu.Layout.WGMMA.reduce(1)


class ComputingWarpgroup(Warpgroup):
    """Warpgroup that computes 64 rows of each tile's outputs: scores, softmax and weighted sums of some value columns.

    Args:
        config: static parameters.
        tiling: tile sizes.
        inputs: arrays in global memory.
        shared: the thread block's shared memory and barriers.
        thread: the warpgroup's index among the thread block's computing ones.
    """

    def __init__(self, config: KernelConfig, tiling: Tiling, inputs: Inputs, shared: Shared, thread: Scalar) -> None:
        """Determine the worker and tile slice for the `thread`-th computing warpgroup in the thread block."""
        warpgroups = i32(tiling.warpgroups)
        super().__init__(config, tiling, inputs, shared, lax.div(thread, warpgroups))
        index, columns = lax.rem(thread, warpgroups), i32(tiling.column_warpgroups)
        self.slice = TileSlice(index, lax.div(index, columns) * WARPGROUP_ROWS, lax.rem(index, columns))
        self.ring = RingReader(config, tiling, shared, self.local_worker, self.slice)

    def run(self) -> None:
        """Compute this warpgroup's slice of all work items in its worker's span.

        Complete work items go to the output, splits to the buffers that the merging kernel reads.
        """

        def compute_item(index: Scalar, block_count: Scalar) -> Scalar:
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

    def _attend_item(self, item: WorkItem, block_count: Scalar) -> Softmax:
        """Return the softmax state after all key blocks of a work item; only some blocks need a mask.

        Args:
            item: work item.
            block_count: number of key blocks that the worker has processed before, which determines the ring slots.
        """
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

        def absorb(block: Scalar, state: Softmax, masked: bool) -> Softmax:
            slot = self._slot(block_count + block - item.begin)
            return self._absorb_block(item, block, slot, state, masked)

        if config.options.window is not None:
            state = lax.fori_loop(item.begin, full_begin, functools.partial(absorb, masked=True), state)
        state = lax.fori_loop(full_begin, full_end, functools.partial(absorb, masked=False), state)
        return lax.fori_loop(full_end, item.end, functools.partial(absorb, masked=True), state)

    def _start(self, item: WorkItem) -> Softmax:
        """Return the softmax state before any key: empty, or with the sinks in the work item's first split."""
        max_score = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), MASKED, jnp.float32), _ROWS)
        denominator = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), _ROWS)
        if self.config.has_sinks:
            sinks = load(self.inputs.sink_rows.at[item.head, self.slice.rows], _ROWS)
            max_score = jnp.where(item.is_first, sinks, max_score)
            denominator = jnp.where(item.is_first, jnp.full_like(denominator, 1), denominator)
        values = jnp.zeros((WARPGROUP_ROWS, self.config.warpgroup_columns), jnp.float32)
        return Softmax(plgpu.layout_cast(values, plgpu.Layout.WGMMA), max_score, denominator)

    def _absorb_block(self, item: WorkItem, block: Scalar, slot: Scalar, state: Softmax, masked: bool) -> Softmax:
        """Return the softmax state after one more key block.

        Args:
            item: work item.
            block: the key block's index in the sequence.
            slot: ring slot with the block's keys and values.
            state: state after the previous blocks.
            masked: True if some of the tile's tokens do not see all keys in the block.
        """
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

    def _scale_and_mask(self, scores: Registers, item: WorkItem, block: Scalar, masked: bool) -> Registers:
        """Scale and soft-cap scores, and replace scores of keys that their query does not see by MASKED.

        Args:
            scores: products of queries and keys, f32 `[64, block_kv]`.
            item: work item.
            block: the key block's index in the sequence.
            masked: False if all tokens see all keys in the block.

        Returns:
            Scores in base 2 (times log2(e)).
        """
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

    def _broadcast_tree_column(self, item: WorkItem, column: int, shape: tuple[int, int]) -> Registers:
        """Load a column of `visible_nodes`, one int32 per query row, and broadcast it over a block's keys.

        Args:
            item: work item.
            column: 0 for the words with the visible nodes, 1 for the positions by depth.
            shape: shape of the result, `(64, block_kv)`.
        """
        return lax.broadcast_in_dim(
            load(self.inputs.tree_rows.at[item.tile, column, self.slice.rows], _ROWS), shape, [0]
        )

    def _add_values(self, values: Registers, weights: Registers, v: Ref) -> Registers:
        """Return `values + weights @ v`, by wgmma.

        Args:
            values: f32 `[64, columns]`.
            weights: softmax weights, `[64, block_kv]`.
            v: values in shared memory, `[block_kv, columns]`.
        """
        if self.config.interpret is None:
            return pl.run_state(lambda acc: plgpu.wgmma(acc, weights, v))(plgpu.ACC.init(values))
        p = self.shared.p.at[self.local_worker * self.tiling.warpgroups + self.slice.index]
        p[...] = weights
        plgpu.commit_smem()

        def multiply(acc: Ref) -> Registers:
            plgpu.wgmma(acc, p, v)
            return acc[...]

        return values + pl.run_scoped(multiply, plgpu.ACC(values.shape, jnp.float32))

    def _store(self, item: WorkItem, state: Softmax) -> None:
        """Write the outputs of the tile's own tokens, in this warpgroup's slice, to global memory via shared memory."""
        width = self.config.out_columns
        num_chunks = self.config.warpgroup_columns // width
        for chunk in range(num_chunks):
            values = lax.slice(state.values, (0, chunk * width), (WARPGROUP_ROWS, (chunk + 1) * width))
            columns = state._replace(values=values).result(plgpu.Layout.WGMMA, self.config.dtype)
            self._store_columns(item, columns, self.slice.column * num_chunks + chunk)

    def _store_columns(self, item: WorkItem, columns: Registers, index: Scalar) -> None:
        """Write some columns of this warpgroup's outputs to global memory via shared memory.

        Args:
            item: work item.
            columns: outputs, `[64, out_columns]`.
            index: the columns' index among the output's groups with `out_columns` columns.
        """
        config, tiling, part = self.config, self.tiling, self.slice
        out = self.shared.out.at[self.local_worker * tiling.warpgroups + part.index]
        shift = config.out_shift - item.lead  # the first stored token lies at a multiple of eight
        out[pl.ds(shift, WARPGROUP_ROWS)] = columns
        plgpu.commit_smem()
        tokens = min(tiling.tokens, WARPGROUP_ROWS)  # tokens per head in one part

        @pl.loop(0, WARPGROUP_ROWS // tokens)
        def store_head(segment: Scalar) -> None:
            row = part.row + segment * tokens
            g, first = lax.div(row, i32(tiling.tokens)), lax.rem(row, i32(tiling.tokens))
            begin = jnp.maximum(item.lead - first, 0)  # index among this head's tokens in this part
            end = jnp.clip(item.lead + item.num_tokens - first, begin, tokens)
            num_tokens = jnp.where(g < config.group, end - begin, 0)
            token, head = item.base_token + first + begin, item.head * config.group + g
            copy_tokens(out, shift + segment * tokens + begin, self.inputs.out, token, head, index, num_tokens, tokens)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scores(q: Ref, k: Ref) -> Registers:
    """Return `q @ k.T` in float32, `[64, block_kv]`, by wgmma.

    Args:
        q: queries in shared memory, `[64, key_dim]`.
        k: keys in shared memory, `[block_kv, key_dim]`.
    """

    def multiply(acc: Ref) -> Registers:
        plgpu.wgmma(acc, q, k.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, k.shape[0]), jnp.float32))
