"""Work items and the softmax over a split, for both kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import work_plan
from jaxserve.pallas_kernels.warpgroups import spread

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a row that has seen no key yet does not turn into NaN

# Register layout for eight rows; each warp holds eight columns in every 32.
EIGHTS = plgpu.Layout.TILED(plgpu.Tiling(((8, 32), (8, 8), (2,))), (-4,), (-3, -2), -1)


class WorkItem(NamedTuple):
    """A query tile with one KV head, and the key blocks of it that one worker computes (the worker's split)."""

    tile: Scalar  # tile index in the plan
    table_row: Scalar  # the row's index in the page table
    head: Scalar  # KV head
    base_token: Scalar  # index in the step; the tile's own tokens begin `lead` tokens later
    lead: Scalar
    num_tokens: Scalar  # number of the tile's own tokens
    position: Scalar  # position of the tile's first own token in its sequence
    key_end: Scalar  # end of the keys that the tile's last token sees
    first_head: Scalar  # query head of the tile's first own token, if query heads are processed as tokens
    tree_start: Scalar  # position of the first node in the row's draft tree
    begin: Scalar  # first key block in the split, counted from the sequence's start
    end: Scalar  # the split's end
    is_first: Scalar  # True if the split has the item's first key block
    is_last: Scalar  # True if the split has the item's last key block


def read_work_item(tiles_ref: Ref, tile: Scalar, head: Scalar, span_start: Scalar, span_end: Scalar) -> WorkItem:
    """Read one work item from the plan, with the key blocks that are inside a worker's span of units.

    Args:
        tiles_ref: `WorkPlan.tiles` in global memory, `[tiles, 11]`.
        tile: tile index.
        head: KV head.
        span_start: first unit in the worker's span.
        span_end: the span's end.
    """

    def column(index: int) -> Scalar:
        return tiles_ref[tile, index]

    num_blocks, first_block = column(work_plan.NUM_BLOCKS), column(work_plan.FIRST_BLOCK)
    first_unit = column(work_plan.FIRST_UNIT) + head * num_blocks
    begin = jnp.maximum(span_start - first_unit, 0)
    end = jnp.minimum(span_end - first_unit, num_blocks)
    return WorkItem(
        tile=tile,
        table_row=column(work_plan.TABLE_ROW),
        head=head,
        base_token=column(work_plan.BASE_TOKEN),
        lead=column(work_plan.LEAD),
        num_tokens=column(work_plan.NUM_TOKENS),
        position=column(work_plan.POSITION),
        key_end=column(work_plan.KEY_END),
        first_head=column(work_plan.FIRST_HEAD),
        tree_start=column(work_plan.TREE_START),
        begin=first_block + begin,
        end=first_block + end,
        is_first=begin == 0,
        is_last=end == num_blocks,
    )


class Softmax(NamedTuple):
    """State of an online softmax for some query rows, over the keys seen so far; scores are in base 2.

    The fields are registers; or references to states in global memory, `[workers, 2, column_warpgroups, rows, ...]`.
    These are unmerged splits, two per worker: from a work item that another worker began (0), or that it began (1).
    """

    values: Any  # f32[rows, columns], sum of the values times their weights
    max_score: Any  # f32[rows]
    denominator: Any  # f32[rows], sum of the weights

    def result(self, layout: Any, dtype: jnp.dtype) -> Registers:
        """Return the attention outputs `[rows, columns]`, zeros for rows that have seen no key.

        Args:
            layout: register layout of `values`.
            dtype: output dtype.
        """
        denominator = jnp.where(self.denominator > 0, self.denominator, 1.0)
        return (self.values / spread(denominator, self.values.shape, layout)).astype(dtype)
