"""Loading warpgroup, which fetches queries, keys and values. See the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import first_scale
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import SCALES
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import Warpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import WorkItem
from jaxserve.pallas_kernels.warpgroups import i32


class LoadingWarpgroup(Warpgroup):
    """Warpgroup that copies queries, keys and values to shared memory for its worker's computing warpgroups."""

    def run(self) -> None:
        """Load the queries and all key blocks of each work item in the worker's span, as soon as memory is free."""
        shared, stages = self.shared, self.tiling.stages

        def load_item(index: Scalar, block_count: Scalar) -> Scalar:
            item = self._item(index)

            @pl.when(index > self.items[0])
            def wait_for_q() -> None:
                plgpu.barrier_wait(shared.q_free.at[self.local_worker])

            self._load_queries(item)

            def load_block(block: Scalar, block_count: Scalar) -> Scalar:
                slot = self._slot(block_count)
                page_ids = self._page_ids(item, block)

                @pl.when(block_count >= stages)
                def wait_for_keys() -> None:
                    plgpu.barrier_wait(shared.k_free.at[slot])

                vector = self.config.vectors_per_head * item.head
                self._load_pages(page_ids, block, vector, 0, shared.k.at[slot], shared.k_ready.at[slot])
                if self.config.values_in_keys:
                    return block_count + 1

                @pl.when(block_count >= stages)
                def wait_for_values() -> None:
                    plgpu.barrier_wait(shared.v_free.at[slot])

                for column in range(self.tiling.column_warpgroups):
                    self._load_pages(
                        page_ids, block, vector + 1, column, shared.v.at[slot, column], shared.v_ready.at[slot]
                    )
                if self.config.is_quantized:
                    self._load_scales(page_ids, block, item, shared.scales.at[slot], shared.v_ready.at[slot])
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

    def _load_queries(self, item: WorkItem) -> None:
        """Start copies of a work item's queries to shared memory: row `g * tokens + t` is token t of query head g."""
        tokens = self.tiling.tokens

        @pl.loop(0, self.config.group)
        def load_head(g: Scalar) -> None:
            plgpu.copy_gmem_to_smem(
                self.inputs.q.at[pl.ds(item.base_token, tokens), item.head * self.config.group + g],
                self.shared.q.at[self.local_worker, pl.ds(g * tokens, tokens)],
                self.shared.q_ready.at[self.local_worker],
            )

    def _page_ids(self, item: WorkItem, block: Scalar) -> list[Scalar]:
        """Return the ids of the pages that contain a key block: one id if pages are larger than blocks.

        The block's first page replaces pages past the row's end, whose ids the page table may lack.

        Args:
            item: work item.
            block: the key block's index in the sequence.
        """
        size, block_kv = self.config.page_size, self.config.block_kv
        if size > block_kv:
            return [self.inputs.page_table[item.table_row, lax.div(block, i32(size // block_kv))]]
        num_pages = lax.div(item.key_end + (size - 1), i32(size))
        first = block * (block_kv // size)
        columns = [jnp.where(first + i < num_pages, first + i, first) for i in range(block_kv // size)]
        return [self.inputs.page_table[item.table_row, column] for column in columns]

    def _load_pages(
        self, page_ids: list[Scalar], block: Scalar, vector: Scalar, column: int, buffer: Ref, ready: Ref
    ) -> None:
        """Start copies of one head's keys or values in a block to shared memory.

        Args:
            page_ids: pages that contain the block.
            block: the key block's index in the sequence.
            vector: index among a token's vectors: `2 * head` for keys, `2 * head + 1` for values, 0 for latents.
            column: the columns' index among groups with as many columns as the buffer.
            buffer: shared memory, `[block_kv, columns]`.
            ready: barrier at which the copies arrive.
        """
        pages, columns = self.inputs.kv_pages.at[self.inputs.layer[0]], pl.ds(column * buffer.shape[1], buffer.shape[1])
        self._copy_block(
            page_ids, block, lambda page_id, tokens: pages.at[page_id, tokens, vector, columns], buffer, ready
        )

    def _load_scales(self, page_ids: list[Scalar], block: Scalar, item: WorkItem, buffer: Ref, ready: Ref) -> None:
        """Start copies of a block's scales, for the item's KV head and its neighbours, to shared memory.

        Args:
            page_ids: pages that contain the block.
            block: the key block's index in the sequence.
            item: work item.
            buffer: shared memory, `[block_kv, SCALES]`.
            ready: barrier at which the copies arrive.
        """
        scales, heads = self.inputs.scales.at[self.inputs.layer[0]], pl.ds(first_scale(item.head), SCALES)
        self._copy_block(page_ids, block, lambda page_id, tokens: scales.at[page_id, tokens, heads], buffer, ready)

    def _copy_block(
        self, page_ids: list[Scalar], block: Scalar, source: Callable[[Scalar, Any], Ref], buffer: Ref, ready: Ref
    ) -> None:
        """Start TMA copies of a block's tokens from their pages to shared memory.

        Args:
            page_ids: pages that contain the block.
            block: the key block's index in the sequence.
            source: function that returns global memory, given a page id and a slice of the page's tokens.
            buffer: shared memory, `[block_kv, columns]`.
            ready: barrier at which the copies arrive.
        """
        size, block_kv = self.config.page_size, self.config.block_kv
        if size > block_kv:
            offset = lax.rem(block, i32(size // block_kv)) * block_kv
            plgpu.copy_gmem_to_smem(source(page_ids[0], pl.ds(offset, block_kv)), buffer, ready)
            return
        for i, page_id in enumerate(page_ids):
            plgpu.copy_gmem_to_smem(source(page_id, slice(None)), buffer.at[pl.ds(i * size, size)], ready)
