"""The attention kernel for GPUs with warp-level matrix instructions. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import launches
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.outputs import copy_tokens
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.softmax_warpgroup import SoftmaxWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tile_loader import TileLoader
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import TileSlice
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import Softmax, WorkItem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_mma.memory import shared_memory
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_mma.products import SUMS, Products, plgpu
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_mma.tiling import MmaConfig
from jaxserve.pallas_kernels.warpgroups import i32, store

_VALUE_TOKENS = 16  # tokens whose values registers hold at a time


class _NoBarrier:
    """Barriers that cp.async does not need."""

    @property
    def at(self) -> _NoBarrier:
        return self

    def __getitem__(self, _: Scalar) -> _NoBarrier:
        return self


class FlatLoader(TileLoader):
    """Copies of matrices with one row per token, `[tokens, Q * H]` and `[L, N * P, vectors * H]`.

    By cp.async each copy is a group. Warpgroups wait for groups in order.
    """

    config: MmaConfig

    def copy(self, source: Ref, target: Ref, ready: Ref) -> None:
        """Start a copy to shared memory; its source lies inside its array."""
        if self.config.has_tma:
            plgpu.copy_gmem_to_smem(source, target, ready)
        else:
            plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def queries(self, tokens: Any, head: Scalar) -> Ref:
        """Return one head's queries in global memory, for a slice of the tokens."""
        size = self.config.key_dim
        return self.inputs.q.at[tokens, pl.ds(head * size, size)]

    def vectors(self, page_id: Scalar, tokens: Any, vector: Scalar, columns: Any) -> Ref:
        """Return the tokens' vectors with this index in global memory, for a slice of a page's tokens."""
        rows = pl.ds(page_id * self.config.page_size + tokens.start, tokens.size)
        return self.inputs.kv_pages.at[self.inputs.layer[0], rows, pl.ds(vector * columns.size, columns.size)]


class MmaWarpgroup(SoftmaxWarpgroup):
    """Warpgroup that copies its worker's queries, keys and values, some blocks ahead, and computes the outputs.

    Args:
        config: static parameters.
        tiling: tile sizes.
        inputs: arrays in global memory.
        shared: the thread block's shared memory and barriers.
    """

    config: MmaConfig

    def __init__(self, config: MmaConfig, tiling: Tiling, inputs: Inputs, shared: Shared) -> None:
        """Determine the span of the worker in this thread block."""
        worker = 0
        if not config.has_tma:
            shared = shared._replace(q_ready=_NoBarrier(), k_ready=_NoBarrier())
        super().__init__(config, tiling, inputs, shared, worker, TileSlice(worker, worker, worker), SUMS)
        self.products = Products(config.dtype, config.interpret)
        self.loader = FlatLoader(config, tiling, inputs, shared, worker)

    def run(self) -> None:
        """Compute all work items in the worker's span.

        Complete work items go to the output, splits to the buffers that the merging kernel reads.
        """

        def compute_item(index: Scalar, block_count: Scalar) -> Scalar:
            item = self._item(index)
            self._finish_reads()
            self.loader.load_queries(item)
            for ahead in range(self.tiling.stages - 1):
                self._load_block(item, item.begin + ahead, self._slot(block_count + ahead))
            if self.config.has_tma:
                plgpu.barrier_wait(self.shared.q_ready.at[0])
            state = self._attend_item(item, block_count)
            self._write(item, state)
            return block_count + item.end - item.begin

        lax.fori_loop(*self.items, compute_item, i32(0))

    def _load_block(self, item: WorkItem, block: Scalar, slot: Scalar) -> None:
        """Start the copies of a block's keys and values, if the split has the block."""

        @pl.when(block < item.end)
        def load() -> None:
            self._finish_reads()
            page_ids, ready = self.loader.page_ids(item, block), self.shared.k_ready.at[slot]
            self.loader.load_pages(page_ids, block, 2 * item.head, 0, self.shared.k.at[slot], ready)
            self.loader.load_pages(page_ids, block, 2 * item.head + 1, 0, self.shared.v.at[slot, 0], ready)

    def _finish_reads(self) -> None:
        """Let copies that start now overwrite shared memory that this warpgroup has read."""
        if self.config.has_tma:  # Pallas' barrier between reads and a copy is enough for cp.async
            plgpu.commit_smem()

    def _wait(self, item: WorkItem, block: Scalar, slot: Scalar) -> None:
        """Wait until a block is loaded; later blocks may still be on their way."""
        if self.config.has_tma:
            plgpu.barrier_wait(self.shared.k_ready.at[slot])
            return
        num_later = jnp.minimum(item.end - 1 - block, self.tiling.stages - 1)
        for count in range(self.tiling.stages):

            @pl.when(num_later == count)
            def wait(count: int = count) -> None:
                plgpu.wait_gmem_to_smem(count * self.config.num_block_copies)

    def _absorb_block(self, item: WorkItem, block: Scalar, slot: Scalar, state: Softmax, masked: bool) -> Softmax:
        stages, products, width = self.tiling.stages, self.products, self.config.out_columns
        ahead = lax.rem(slot + (stages - 1), i32(stages))  # the slot of the previous block
        self._load_block(item, block + (stages - 1), ahead)
        self._wait(item, block, slot)
        scores = self._zeros(self.config.block_kv)
        for start in range(0, self.config.key_dim, width):
            columns = pl.ds(start, width)
            q = products.left(self.shared.q.at[0, :, columns])
            scores = products.add(scores, q, products.right_transposed(self.shared.k.at[slot, :, columns]))
        scores = self._scale_and_mask(scores, item, block, masked)
        max_score = jnp.maximum(state.max_score, scores.max(axis=1))
        rescale = jnp.exp2(state.max_score - max_score)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(max_score, scores.shape, [0]))
        denominator = state.denominator * rescale + weights.sum(axis=1)
        weights = products.as_left(weights)
        values = []
        for index, before in enumerate(state.values):
            sums = before * lax.broadcast_in_dim(rescale, before.shape, [0])
            for first in range(0, self.config.block_kv, _VALUE_TOKENS):
                part = lax.slice(weights, (0, first), (weights.shape[0], first + _VALUE_TOKENS))
                tokens, columns = pl.ds(first, _VALUE_TOKENS), pl.ds(index * width, width)
                v = products.right(self.shared.v.at[slot, 0, tokens, columns])
                if masked:
                    v = self._clear_tail(v, item.key_end - block * self.config.block_kv - first)
                sums = products.add(sums, part, v)
            values.append(sums)
        return Softmax(tuple(values), max_score, denominator)

    def _clear_tail(self, v: Registers, end: Scalar) -> Registers:
        """Return values with zeros from token `end` on: a stale NaN times a weight of zero would be NaN."""
        token = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=self.products.rhs)
        return jnp.where(token < end, v, jnp.zeros_like(v))

    def _no_values(self) -> tuple[Registers, ...]:
        width = self.config.out_columns
        return tuple(self._zeros(width) for _ in range(self.config.value_dim // width))

    def _store_values(self, split: tuple[Any, ...], values: tuple[Registers, ...]) -> None:
        width = self.config.out_columns
        for index, sums in enumerate(values):
            store(self.inputs.values.at[(*split, pl.ds(index * width, width))], sums)

    def _store(self, item: WorkItem, state: Softmax) -> None:
        """Write the outputs of the tile's own tokens to global memory via shared memory."""
        out, tokens = self.shared.out.at[0], self.tiling.tokens
        for index, sums in enumerate(state.values):
            store(out, state._replace(values=sums).result(SUMS, self.config.dtype))

            @pl.loop(0, self.config.group)
            def store_head(g: Scalar, index: int = index) -> None:
                token, head = item.base_token + item.lead, item.head * self.config.group + g
                row = g * tokens + item.lead
                copy_tokens(self.config, out, row, self.inputs.out, token, head, index, item.num_tokens, tokens)


def _attend_kernel(config: MmaConfig, tiling: Tiling, *refs: Ref) -> None:
    """Run the one warpgroup of a thread block.

    Args:
        config: static parameters.
        tiling: tile sizes.
        *refs: the fields of `Inputs`, then of `Shared`.
    """
    inputs, shared = Inputs(*refs[: len(Inputs._fields)]), Shared(*refs[len(Inputs._fields) :])
    MmaWarpgroup(config, tiling, inputs, shared).run()


def _flat(array: Array) -> Array:
    """Return queries, `[T, Q, H]`, or a pool, `[L, N, P, vectors, H]`, as matrices with one row per token."""
    if array.ndim == 3:
        return array.reshape(array.shape[0], -1)
    L, N, P, vectors, H = array.shape
    return array.reshape(L, N * P, vectors * H)


attend = functools.partial(launches.attend, launches.Kernel(_attend_kernel, shared_memory, lambda _: 1, _flat))
