"""Base class for warpgroups that compute attention: the loop over key blocks, masks, and the softmax state."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.warpgroup import TileSlice, Warpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import LOG2E, MASKED, Softmax, WorkItem
from jaxserve.pallas_kernels.warpgroups import i32, load, store


class SoftmaxWarpgroup(Warpgroup):
    """Warpgroup that computes 64 rows of each tile's outputs.

    Attributes:
        slice: rows and value columns that it computes.
        layout: register layout of scores and values, as the matrix instructions leave them.
    """

    def __init__(
        self,
        config: KernelConfig,
        tiling: Tiling,
        inputs: Inputs,
        shared: Shared,
        local_worker: Scalar,
        tile_slice: TileSlice,
        layout: Any,
    ) -> None:
        """Compute a tile slice for worker `local_worker` in this thread block."""
        super().__init__(config, tiling, inputs, shared, local_worker)
        self.slice, self.layout, self.row_layout = tile_slice, layout, layout.reduce(1)

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
        max_score = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), MASKED, jnp.float32), self.row_layout)
        denominator = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), self.row_layout)
        if self.config.has_sinks:
            sinks = load(self.inputs.sink_rows.at[item.head, self.slice.rows], self.row_layout)
            max_score = jnp.where(item.is_first, sinks, max_score)
            denominator = jnp.where(item.is_first, jnp.full_like(denominator, 1), denominator)
        return Softmax(self._no_values(), max_score, denominator)

    def _no_values(self) -> Any:
        """Return zeros as sums."""
        return self._zeros(self.config.warpgroup_columns)

    def _zeros(self, num_columns: int) -> Registers:
        """Return zeros for each row."""
        return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, num_columns), jnp.float32), self.layout)

    @abstractmethod
    def _absorb_block(self, item: WorkItem, block: Scalar, slot: Scalar, state: Softmax, masked: bool) -> Softmax:
        """Return the softmax state after one more key block.

        Args:
            item: work item.
            block: the key block's index in the sequence.
            slot: ring slot with the block's keys and values.
            state: state after the previous blocks.
            masked: True if some of the tile's tokens do not see all keys in the block.
        """

    @abstractmethod
    def _store(self, item: WorkItem, state: Softmax) -> None:
        """Write the outputs of a complete work item's own tokens to global memory."""

    def _write(self, item: WorkItem, state: Softmax) -> None:
        """Write a complete work item to the output, a split to the buffers that the merging kernel reads."""

        @pl.when(item.is_first & item.is_last)
        def finish() -> None:
            self._store(item, state)

        @pl.when(~(item.is_first & item.is_last))
        def leave() -> None:
            self._leave_to_merge(item, state)

    def _leave_to_merge(self, item: WorkItem, state: Softmax) -> None:
        """Write the state of a split to the buffers that the merging kernel reads."""
        split = self.index, jnp.where(item.is_first, 1, 0), self.slice.column, self.slice.rows
        self._store_values(split, state.values)
        store(self.inputs.max_score.at[split], state.max_score)
        store(self.inputs.denominator.at[split], state.denominator)

    def _store_values(self, split: tuple[Any, ...], values: Any) -> None:
        """Write a split's sums of values, `[64, columns]`, to global memory."""
        store(self.inputs.values.at[split], values)

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
        key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=self.layout)
        key += block * self.config.block_kv
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=self.row_layout) + self.slice.row
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
            load(self.inputs.tree_rows.at[item.tile, column, self.slice.rows], self.row_layout), shape, [0]
        )
