"""Loading warpgroup, which fetches queries, keys and values. See the package."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.kernel_values import Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tile_loader import TileLoader
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import Warpgroup
from jaxserve.pallas_kernels.warpgroups import i32


class LoadingWarpgroup(Warpgroup):
    """Warpgroup that copies queries, keys and values to shared memory for its worker's computing warpgroups."""

    def __init__(
        self, config: KernelConfig, tiling: Tiling, inputs: Inputs, shared: Shared, local_worker: Scalar
    ) -> None:
        """Load what the computing warpgroups of worker `local_worker` in this thread block need."""
        super().__init__(config, tiling, inputs, shared, local_worker)
        self.loader = TileLoader(config, tiling, inputs, shared, local_worker)

    def run(self) -> None:
        """Load the queries and all key blocks of each work item in the worker's span, as soon as memory is free."""
        shared, stages = self.shared, self.tiling.stages

        def load_item(index: Scalar, block_count: Scalar) -> Scalar:
            item = self._item(index)

            @pl.when(index > self.items[0])
            def wait_for_q() -> None:
                plgpu.barrier_wait(shared.q_free.at[self.local_worker])

            self.loader.load_queries(item)

            def load_block(block: Scalar, block_count: Scalar) -> Scalar:
                slot = self._slot(block_count)
                page_ids = self.loader.page_ids(item, block)

                @pl.when(block_count >= stages)
                def wait_for_keys() -> None:
                    plgpu.barrier_wait(shared.k_free.at[slot])

                vector = self.config.vectors_per_head * item.head
                self.loader.load_pages(page_ids, block, vector, 0, shared.k.at[slot], shared.k_ready.at[slot])
                if self.config.values_in_keys:
                    return block_count + 1

                @pl.when(block_count >= stages)
                def wait_for_values() -> None:
                    plgpu.barrier_wait(shared.v_free.at[slot])

                for column in range(self.tiling.column_warpgroups):
                    self.loader.load_pages(
                        page_ids, block, vector + 1, column, shared.v.at[slot, column], shared.v_ready.at[slot]
                    )
                if self.config.is_quantized:
                    self.loader.load_scales(page_ids, block, item, shared.scales.at[slot], shared.v_ready.at[slot])
                return block_count + 1

            return lax.fori_loop(item.begin, item.end, load_block, block_count)

        block_count = lax.fori_loop(*self.items, load_item, i32(0))

        # Wait for loads that are still in flight.
        @pl.when(self.items[1] > self.items[0])
        def drain_q() -> None:
            plgpu.barrier_wait(shared.q_free.at[self.local_worker])

        @pl.loop(jnp.maximum(block_count - stages, 0), block_count)
        def drain(count: Scalar) -> None:
            plgpu.barrier_wait(shared.k_free.at[self._slot(count)])
            if not self.config.values_in_keys:
                plgpu.barrier_wait(shared.v_free.at[self._slot(count)])
