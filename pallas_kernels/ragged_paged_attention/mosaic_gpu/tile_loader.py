"""Copies of queries, keys and values to shared memory, page by page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared, first_scale
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import SCALES, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import WorkItem
from jaxserve.pallas_kernels.warpgroups import i32


class TileLoader:
    """One worker's copies from global to shared memory.

    Args:
        config: static parameters.
        tiling: tile sizes.
        inputs: arrays in global memory.
        shared: the thread block's shared memory and barriers.
        local_worker: the worker's index in the thread block.
    """

    def __init__(
        self, config: KernelConfig, tiling: Tiling, inputs: Inputs, shared: Shared, local_worker: Scalar
    ) -> None:
        """Load to the shared memory of worker `local_worker` in this thread block."""
        self.config, self.tiling, self.inputs, self.shared = config, tiling, inputs, shared
        self.local_worker = local_worker

    def copy(self, source: Ref, target: Ref, ready: Ref) -> None:
        """Start a copy to shared memory, which arrives at the barrier `ready`."""
        plgpu.copy_gmem_to_smem(source, target, ready)

    def queries(self, tokens: Any, head: Scalar) -> Ref:
        """Return one head's queries in global memory, for a slice of the tokens."""
        return self.inputs.q.at[tokens, head]

    def vectors(self, page_id: Scalar, tokens: Any, vector: Scalar, columns: Any) -> Ref:
        """Return some columns of vectors in global memory, one per token, for a slice of a page's tokens."""
        return self.inputs.kv_pages.at[self.inputs.layer[0], page_id, tokens, vector, columns]

    def load_queries(self, item: WorkItem) -> None:
        """Start copies of a work item's queries to shared memory: row `g * tokens + t` is token t of query head g."""
        tokens = self.tiling.tokens

        @pl.loop(0, self.config.group)
        def load_head(g: Scalar) -> None:
            self.copy(
                self.queries(pl.ds(item.base_token, tokens), item.head * self.config.group + g),
                self.shared.q.at[self.local_worker, pl.ds(g * tokens, tokens)],
                self.shared.q_ready.at[self.local_worker],
            )

    def page_ids(self, item: WorkItem, block: Scalar) -> list[Scalar]:
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

    def load_pages(
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
        columns = pl.ds(column * buffer.shape[1], buffer.shape[1])
        self._copy_block(
            page_ids, block, lambda page_id, tokens: self.vectors(page_id, tokens, vector, columns), buffer, ready
        )

    def load_scales(self, page_ids: list[Scalar], block: Scalar, item: WorkItem, buffer: Ref, ready: Ref) -> None:
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
            self.copy(source(page_ids[0], pl.ds(offset, block_kv)), buffer, ready)
            return
        for i, page_id in enumerate(page_ids):
            self.copy(source(page_id, pl.ds(0, size)), buffer.at[pl.ds(i * size, size)], ready)
