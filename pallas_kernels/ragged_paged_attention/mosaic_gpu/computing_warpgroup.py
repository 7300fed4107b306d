"""Computing warpgroups: matmuls, masks and softmax. See the package."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.outputs import copy_tokens
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.ring_reader import RingReader
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.softmax_warpgroup import SoftmaxWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import TileSlice
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import Softmax, WorkItem
from jaxserve.pallas_kernels.warpgroups import i32, store


class ComputingWarpgroup(SoftmaxWarpgroup):
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
        index, columns = lax.rem(thread, warpgroups), i32(tiling.column_warpgroups)
        part = TileSlice(index, lax.div(index, columns) * WARPGROUP_ROWS, lax.rem(index, columns))
        super().__init__(config, tiling, inputs, shared, lax.div(thread, warpgroups), part, plgpu.Layout.WGMMA)
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
            self._write(item, state)
            return block_count + item.end - item.begin

        lax.fori_loop(*self.items, compute_item, i32(0))

    def _absorb_block(self, item: WorkItem, block: Scalar, slot: Scalar, state: Softmax, masked: bool) -> Softmax:
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
        store(p, weights)
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
        store(out.at[pl.ds(shift, WARPGROUP_ROWS)], columns)
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
            copy_tokens(
                config, out, shift + segment * tokens + begin, self.inputs.out, token, head, index, num_tokens, tokens
            )

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
