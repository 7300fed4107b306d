"""Keys and values in the shared-memory ring, as wgmma reads them. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Shared, first_scale
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import TileSlice
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import EIGHTS, WorkItem
from jaxserve.pallas_kernels.warpgroups import load, spread, store


class RingReader:
    """One computing warpgroup's access to keys and values in its worker's shared-memory ring.

    It waits until blocks are loaded, dequantises them, clears stale tokens, and releases their slots.

    Args:
        config: static parameters.
        tiling: tile sizes.
        shared: the thread block's shared memory and barriers.
        local_worker: the worker's index in the thread block.
        tile_slice: rows and value columns that the warpgroup computes.
    """

    def __init__(
        self, config: KernelConfig, tiling: Tiling, shared: Shared, local_worker: Scalar, tile_slice: TileSlice
    ) -> None:
        """Read the ring that worker `local_worker` has in this thread block's shared memory."""
        self.config, self.tiling, self.shared = config, tiling, shared
        self.local_worker, self.slice = local_worker, tile_slice

    def keys(self, item: WorkItem, block: Scalar, slot: Scalar, masked: bool) -> Ref:
        """Wait for a block's keys and return them in shared memory, `[block_kv, key_dim]`, in the matmul dtype.

        Also dequantise or clear the block's values, if necessary: this must happen before registers hold scores.

        Args:
            item: work item.
            block: the key block's index in the sequence.
            slot: ring slot with the block.
            masked: True if the block may contain tokens past the last visible key, whose values are set to zero.
        """
        shared = self.shared
        if self.config.is_quantized:
            self._dequantise_block(item, block, slot, masked)
            return shared.scaled_k.at[self.local_worker]
        if self.config.values_in_keys:
            plgpu.barrier_wait(shared.k_ready.at[slot])
            if masked:
                self._clear_tail(item, block, self._values_in_keys(slot))
            return shared.k.at[slot]
        if masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
            self._clear_tail(item, block, shared.v.at[slot, self.slice.column])
        plgpu.barrier_wait(shared.k_ready.at[slot])
        return shared.k.at[slot]

    def _values_in_keys(self, slot: Scalar) -> Ref:
        """Return this warpgroup's value columns of the latents in a ring slot, `[block_kv, columns]`.

        A latent is the key, and its first elements are the value.
        """
        columns = self.config.warpgroup_columns
        return self.shared.k.at[slot, :, pl.ds(self.slice.column * columns, columns)]

    def values(self, slot: Scalar, masked: bool) -> Ref:
        """Wait for a block's values and return this warpgroup's columns in shared memory, `[block_kv, columns]`.

        Args:
            slot: ring slot with the block.
            masked: as in the preceding call of `keys`.
        """
        shared = self.shared
        if self.config.is_quantized:
            assert self.tiling.column_warpgroups == 1, "`_unsupported_heads` refuses wider heads"
            return shared.scaled_v.at[self.local_worker]
        if self.config.values_in_keys:
            return self._values_in_keys(slot)
        if not masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
        return shared.v.at[slot, self.slice.column]

    def release_keys(self, slot: Scalar) -> None:
        """Let the loading warpgroup overwrite the keys in a ring slot, unless they contain the values."""
        if not self.config.values_in_keys:
            self._release(self.shared.k_free.at[slot])

    def release_values(self, slot: Scalar) -> None:
        """Let the loading warpgroup overwrite the values in a ring slot."""
        self._release(self.shared.k_free.at[slot] if self.config.values_in_keys else self.shared.v_free.at[slot])

    def _release(self, free: Ref) -> None:
        """Arrive at a slot's barrier `free`; the loading warpgroup waits for all computing warpgroups there."""
        if not self.config.is_quantized:  # _dequantise_block has already freed the slots
            plgpu.barrier_arrive(free)

    def _dequantise_block(self, item: WorkItem, block: Scalar, slot: Scalar, masked: bool) -> None:
        """Write a block's keys and values times their scales to `shared.scaled_k` and `shared.scaled_v`.

        The tile's warpgroups divide the columns and wait for each other before and after.

        Args:
            item: work item.
            block: the key block's index in the sequence.
            slot: ring slot with the quantised block, which is released.
            masked: True to write zeros as values of tokens past the last visible key.
        """
        shared, column = self.shared, 2 * item.head - first_scale(item.head)
        k_scales, v_scales = (shared.scales.at[slot, :, column + i] for i in range(2))
        self._meet()  # other warpgroups may still read the previous block
        plgpu.barrier_wait(shared.k_ready.at[slot])
        plgpu.barrier_wait(shared.v_ready.at[slot])
        self._dequantise(shared.k.at[slot], k_scales, shared.scaled_k.at[self.local_worker], first=0)
        end = self._end_in(item, block) if masked else None
        self._dequantise(
            shared.v.at[slot, self.slice.column], v_scales, shared.scaled_v.at[self.local_worker], first=1, end=end
        )
        plgpu.commit_smem()  # completes both the writes and the reads
        plgpu.barrier_arrive(shared.k_free.at[slot])
        plgpu.barrier_arrive(shared.v_free.at[slot])
        self._meet()

    def _dequantise(self, quantised: Ref, scales: Ref, scaled: Ref, first: int, end: Any | None = None) -> None:
        """Multiply this warpgroup's column chunks of a quantised block by the tokens' scales.

        Args:
            quantised: elements in the ring, `[block_kv, columns]`.
            scales: scale per token in shared memory, `[block_kv]`.
            scaled: shared memory for the results in the matmul dtype, `[block_kv, columns]`.
            first: warpgroup that has the first chunk; the tile's warpgroups take turns.
            end: row from which on zeros are written; None for no such row.
        """
        layout, width = plgpu.Layout.WGMMA_UPCAST_2X, self.config.tile_columns

        def multiply(columns: Any) -> None:
            """Multiply a slice of the columns."""
            elements = load(quantised.at[:, columns], layout)
            if jnp.issubdtype(elements.dtype, jnp.integer):
                elements = elements.astype(jnp.bfloat16)  # exact, and a fast conversion
            factors = spread(load(scales, layout.reduce(1)).astype(jnp.float32), elements.shape, layout)
            elements = elements.astype(jnp.float32) * factors
            if end is not None:
                row = plgpu.broadcasted_iota(jnp.int32, elements.shape, 0, layout=layout)
                elements = jnp.where(row < end, elements, jnp.zeros_like(elements))
            store(scaled.at[:, columns], elements.astype(self.config.dtype))

        for chunk in range(scaled.shape[1] // width):
            is_turn = self.slice.index == (chunk + first) % self.tiling.warpgroups
            pl.when(is_turn)(functools.partial(multiply, pl.ds(chunk * width, width)))

    def _meet(self) -> None:
        """Wait until all computing warpgroups of the tile have reached this call."""
        if self.tiling.warpgroups > 1:
            plgpu.barrier_arrive(self.shared.meeting.at[self.local_worker])
            plgpu.barrier_wait(self.shared.meeting.at[self.local_worker])

    def _end_in(self, item: WorkItem, block: Scalar) -> Scalar:
        """Count the tokens from the block's first token to the last key that the work item sees."""
        return item.key_end - block * self.config.block_kv

    def _clear_tail(self, item: WorkItem, block: Scalar, v: Ref) -> None:
        """Set a block's values past the last visible key to zero: a stale NaN times a zero weight would be NaN.

        Args:
            item: work item.
            block: the key block's index in the sequence.
            v: values in shared memory, `[block_kv, columns]`.
        """
        end, block_kv = self._end_in(item, block), self.config.block_kv
        width = self.config.tile_columns  # columns at a time, limited by registers

        @pl.when(end < block_kv)
        def clear() -> None:
            @pl.when(self.slice.row == 0)
            def write() -> None:
                layout = EIGHTS if block_kv % WARPGROUP_ROWS else plgpu.Layout.WGMMA
                row = plgpu.broadcasted_iota(jnp.int32, (block_kv, width), 0, layout=layout)
                for start in range(0, v.shape[1], width):
                    chunk = v.at[:, pl.ds(start, width)]
                    values = load(chunk, layout)
                    store(chunk, jnp.where(row < end, values, jnp.zeros_like(values)))
                plgpu.commit_smem()

            # Warpgroups that read these columns, as values or in the keys, wait for the warpgroup that clears them.
            if self.tiling.row_warpgroups > 1 or self.config.values_in_keys:
                self._meet()
