"""Reads of keys and values from the ring of shared memory, up to the products. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import EIGHTS, Item, load, spread
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Shared, first_scale
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import Call, Tiles
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import TilePart


class RingReader:
    """Reader of a worker's ring for one of its computing warpgroups."""

    def __init__(self, call: Call, tiles: Tiles, shared: Shared, local_worker: Any, part: TilePart) -> None:
        self.call, self.tiles, self.shared = call, tiles, shared
        self.local_worker, self.part = local_worker, part

    def keys(self, item: Item, block: Any, slot: Any, masked: bool) -> Any:
        """Return the keys of a block; also prepares its values if that must happen before registers are in use."""
        shared = self.shared
        if self.call.is_quantized:
            self._dequantise_block(item, block, slot, masked)
            return shared.scaled_k.at[self.local_worker]
        if self.call.values_in_keys:
            plgpu.barrier_wait(shared.k_ready.at[slot])
            if masked:
                self._clear_tail(item, block, self._values_in_keys(slot))
            return shared.k.at[slot]
        if masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
            self._clear_tail(item, block, shared.v.at[slot, self.part.column])
        plgpu.barrier_wait(shared.k_ready.at[slot])
        return shared.k.at[slot]

    def _values_in_keys(self, slot: Any) -> Any:
        """Return this part's columns of values that are the beginnings of keys."""
        columns = self.call.part_columns
        return self.shared.k.at[slot, :, pl.ds(self.part.column * columns, columns)]

    def values(self, slot: Any, masked: bool) -> Any:
        """Return this part's columns of the values of a block."""
        shared = self.shared
        if self.call.is_quantized:
            assert self.tiles.column_parts == 1, "see supports"
            return shared.scaled_v.at[self.local_worker]
        if self.call.values_in_keys:
            return self._values_in_keys(slot)
        if not masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
        return shared.v.at[slot, self.part.column]

    def give_back_keys(self, slot: Any) -> None:
        """Let the slot be refilled with keys, if the values are not in them."""
        if not self.call.values_in_keys:
            self._give_back(self.shared.k_free.at[slot])

    def give_back_values(self, slot: Any) -> None:
        """Let the slot be refilled with values."""
        self._give_back(self.shared.k_free.at[slot] if self.call.values_in_keys else self.shared.v_free.at[slot])

    def _give_back(self, free: Any) -> None:
        if not self.call.is_quantized:  # _dequantise_block has already freed the slots
            plgpu.barrier_arrive(free)

    def _dequantise_block(self, item: Item, block: Any, slot: Any, masked: bool) -> None:
        """Multiply keys and values with their scales on their way from the ring to where wgmma reads them."""
        shared, column = self.shared, 2 * item.head - first_scale(item.head)
        k_scales, v_scales = (shared.scales.at[slot, :, column + i] for i in range(2))
        self._meet()  # other warpgroups may still read the previous block
        plgpu.barrier_wait(shared.k_ready.at[slot])
        plgpu.barrier_wait(shared.v_ready.at[slot])
        self._dequantise(shared.k.at[slot], k_scales, shared.scaled_k.at[self.local_worker], first=0)
        end = self._end_in(item, block) if masked else None
        self._dequantise(
            shared.v.at[slot, self.part.column], v_scales, shared.scaled_v.at[self.local_worker], first=1, end=end
        )
        plgpu.commit_smem()  # completes both the writes and the reads
        plgpu.barrier_arrive(shared.k_free.at[slot])
        plgpu.barrier_arrive(shared.v_free.at[slot])
        self._meet()

    def _dequantise(self, quantised: Any, scales: Any, scaled: Any, first: int, end: Any | None = None) -> None:
        """Write products of elements and scales from the ring to `scaled`, zeros from row `end` on.

        The warpgroups of a tile take the chunks of columns in turn, beginning with warpgroup `first`.
        """
        layout, width = plgpu.Layout.WGMMA_UPCAST_2X, self.call.tile_columns

        def multiply(columns: Any) -> None:
            elements = load(quantised.at[:, columns], layout)
            if jnp.issubdtype(elements.dtype, jnp.integer):
                elements = elements.astype(jnp.bfloat16)  # exact, and a fast conversion
            factors = spread(load(scales, layout.reduce(1)).astype(jnp.float32), elements.shape, layout)
            elements = elements.astype(jnp.float32) * factors
            if end is not None:
                row = plgpu.broadcasted_iota(jnp.int32, elements.shape, 0, layout=layout)
                elements = jnp.where(row < end, elements, jnp.zeros_like(elements))
            scaled[:, columns] = elements.astype(self.call.dtype)

        for chunk in range(scaled.shape[1] // width):
            is_own = self.part.index == (chunk + first) % self.tiles.warpgroups
            pl.when(is_own)(functools.partial(multiply, pl.ds(chunk * width, width)))

    def _meet(self) -> None:
        """Wait for the other warpgroups of the tile, if there are any."""
        if self.tiles.warpgroups > 1:
            plgpu.barrier_arrive(self.shared.meeting.at[self.local_worker])
            plgpu.barrier_wait(self.shared.meeting.at[self.local_worker])

    def _end_in(self, item: Item, block: Any) -> Any:
        """Return the end of the item's sequence, counted from the block's first token."""
        return item.key_end - block * self.call.block_kv

    def _clear_tail(self, item: Item, block: Any, v: Any) -> None:
        """Replace values past the last token by zeros: a stale NaN would pass through a weight of zero."""
        end, block_kv = self._end_in(item, block), self.call.block_kv
        width = self.call.tile_columns  # columns at a time, limited by registers

        @pl.when(end < block_kv)
        def clear() -> None:
            @pl.when(self.part.row == 0)
            def write() -> None:
                layout = EIGHTS if block_kv % WARPGROUP_ROWS else plgpu.Layout.WGMMA
                row = plgpu.broadcasted_iota(jnp.int32, (block_kv, width), 0, layout=layout)
                for start in range(0, v.shape[1], width):
                    chunk = v.at[:, pl.ds(start, width)]
                    values = load(chunk, layout)
                    chunk[...] = jnp.where(row < end, values, jnp.zeros_like(values))
                plgpu.commit_smem()

            # Warpgroups that read these columns, as values or in the keys, wait for the one that clears them.
            if self.tiles.row_parts > 1 or self.call.values_in_keys:
                self._meet()
