"""The way of keys and values from the ring of shared memory to the products. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import Item, cast, load, spread
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Shared, first_scale
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import BLOCK_KV, Call, Tiles
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import Part


class RingReader:
    """Reads blocks from a worker's ring, for one of the warpgroups that compute."""

    def __init__(self, call: Call, tiles: Tiles, shared: Shared, lane: Any, part: Part) -> None:
        self.call, self.tiles, self.shared = call, tiles, shared
        self.lane, self.part = lane, part

    def keys(self, item: Item, block: Any, slot: Any, masked: bool) -> Any:
        """Keys as they are multiplied; with values too done what must be, before anything else is in registers."""
        shared = self.shared
        if self.call.is_quantized:
            self._widen_block(item, block, slot, masked)
            return shared.wide_k.at[self.lane]
        if masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
            self._clear_tail(item, block, shared.v.at[slot, self.part.column])
        plgpu.barrier_wait(shared.k_ready.at[slot])
        return shared.k.at[slot]

    def values(self, slot: Any, masked: bool) -> Any:
        """The columns of values of this part, as they are multiplied."""
        shared = self.shared
        if self.call.is_quantized:
            assert self.tiles.column_parts == 1, "see supports"
            return shared.wide_v.at[self.lane]
        if not masked:
            plgpu.barrier_wait(shared.v_ready.at[slot])
        return shared.v.at[slot, self.part.column]

    def give_back_keys(self, slot: Any) -> None:
        """Lets them be loaded anew."""
        self._give_back(self.shared.k_free.at[slot])

    def give_back_values(self, slot: Any) -> None:
        """Lets them be loaded anew."""
        self._give_back(self.shared.v_free.at[slot])

    def _give_back(self, free: Any) -> None:
        if not self.call.is_quantized:  # what was widened has been given back before
            plgpu.barrier_arrive(free)

    def _widen_block(self, item: Item, block: Any, slot: Any, masked: bool) -> None:
        """Multiplies keys and values with their scales, on their way from the ring to where wgmma reads them."""
        shared, column = self.shared, 2 * item.head - first_scale(item.head)
        k_scales, v_scales = (shared.scales.at[slot, :, column + i] for i in range(2))
        self._meet()  # the others may still read the last block
        plgpu.barrier_wait(shared.k_ready.at[slot])
        plgpu.barrier_wait(shared.v_ready.at[slot])
        self._widen(shared.k.at[slot], k_scales, shared.wide_k.at[self.lane], first=0)
        end = self._end_in(item, block) if masked else None
        self._widen(shared.v.at[slot, self.part.column], v_scales, shared.wide_v.at[self.lane], first=1, end=end)
        plgpu.commit_smem()  # so that both what was written and what was read lie behind
        plgpu.barrier_arrive(shared.k_free.at[slot])
        plgpu.barrier_arrive(shared.v_free.at[slot])
        self._meet()

    def _widen(self, narrow: Any, scales: Any, wide: Any, first: int, end: Any | None = None) -> None:
        """Numbers times scales, from the ring to `wide`; zeros from row `end` on.

        The warpgroups of a tile do some columns each, the first ones that of number `first`.
        """
        layout, width = plgpu.Layout.WGMMA_UPCAST_2X, self.call.tile_columns

        def multiply(columns: Any) -> None:
            numbers = load(narrow.at[:, columns], layout)
            if jnp.issubdtype(numbers.dtype, jnp.integer):
                numbers = numbers.astype(jnp.bfloat16)  # which is exact, and for which there is a quick way
            factors = spread(load(scales, layout.reduce(1)), numbers.shape, layout)
            numbers = numbers.astype(jnp.float32) * factors
            if end is not None:
                row = plgpu.broadcasted_iota(jnp.int32, numbers.shape, 0, layout=layout)
                numbers = jnp.where(row < end, numbers, jnp.zeros_like(numbers))
            wide[:, columns] = numbers.astype(self.call.dtype)

        for chunk in range(wide.shape[1] // width):
            is_own = self.part.index == (chunk + first) % self.tiles.warpgroups
            pl.when(is_own)(functools.partial(multiply, pl.ds(chunk * width, width)))

    def _meet(self) -> None:
        """The warpgroups of a tile wait for each other, if there are several."""
        if self.tiles.warpgroups > 1:
            plgpu.barrier_arrive(self.shared.meeting.at[self.lane])
            plgpu.barrier_wait(self.shared.meeting.at[self.lane])

    def _end_in(self, item: Item, block: Any) -> Any:
        """The end of the item's sequence, counted from the block's first token."""
        return item.position + item.num_tokens - block * BLOCK_KV

    def _clear_tail(self, item: Item, block: Any, v: Any) -> None:
        """Zeros in place of values past the last token: a stale NaN would pass through a weight of zero."""
        end = self._end_in(item, block)
        width = self.call.tile_columns  # at a time, for want of registers

        @pl.when(end < BLOCK_KV)
        def clear() -> None:
            @pl.when(self.part.row == 0)
            def write() -> None:
                row = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KV, width), 0, layout=plgpu.Layout.WGMMA)
                for start in range(0, v.shape[1], width):
                    chunk = v.at[:, pl.ds(start, width)]
                    values = cast(chunk[...], plgpu.Layout.WGMMA)
                    chunk[...] = jnp.where(row < end, values, jnp.zeros_like(values))
                plgpu.commit_smem()

            if self.tiles.row_parts > 1:  # those who share the values wait for the one who clears
                self._meet()
