"""Work items, the softmax over a split, and copies of tokens to the output, for both kernels."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import (
    BASE_TOKEN,
    FIRST_BLOCK,
    FIRST_HEAD,
    FIRST_UNIT,
    KEY_END,
    LEAD,
    NUM_BLOCKS,
    NUM_TOKENS,
    POSITION,
    TABLE_ROW,
    TREE_START,
)

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite, so that a row that has seen no key yet does not turn into NaN

# Register layout for eight rows; each warp holds eight columns in every 32.
EIGHTS = plgpu.Layout.TILED(plgpu.Tiling(((8, 32), (8, 8), (2,))), (-4,), (-3, -2), -1)

_REQUIRED_OF_LOAD = {x.name for x in inspect.signature(plgpu.load).parameters.values() if x.default is x.empty}


class WorkItem(NamedTuple):
    """A query tile with one KV head, and the part (split) of its key blocks that one worker computes."""

    tile: Any
    table_row: Any  # row in the page table
    head: Any
    base_token: Any  # index in the step; the tile's own tokens begin `lead` tokens later
    lead: Any
    num_tokens: Any
    position: Any
    key_end: Any  # end of the keys that the tile sees
    first_head: Any  # head of the tile's first token if heads are tokens
    tree_start: Any  # position of the first node in the row's tree
    begin: Any  # first block in the split
    end: Any  # end of the split's blocks
    is_first: Any  # True if the split has the item's first block
    is_last: Any


def read_work_item(tiles_ref: Any, tile: Any, head: Any, span_start: Any, span_end: Any) -> WorkItem:
    """Return a work item; its split is the part inside a worker's span."""

    def column(index: int) -> Any:
        return tiles_ref[tile, index]

    num_blocks, first_block = column(NUM_BLOCKS), column(FIRST_BLOCK)
    first_unit = column(FIRST_UNIT) + head * num_blocks
    begin = jnp.maximum(span_start - first_unit, 0)
    end = jnp.minimum(span_end - first_unit, num_blocks)
    return WorkItem(
        tile=tile,
        table_row=column(TABLE_ROW),
        head=head,
        base_token=column(BASE_TOKEN),
        lead=column(LEAD),
        num_tokens=column(NUM_TOKENS),
        position=column(POSITION),
        key_end=column(KEY_END),
        first_head=column(FIRST_HEAD),
        tree_start=column(TREE_START),
        begin=first_block + begin,
        end=first_block + end,
        is_first=begin == 0,
        is_last=end == num_blocks,
    )


class Softmax(NamedTuple):
    """Softmax state for some rows of a tile, over the keys seen so far; scores in base 2."""

    values: Any  # f32[rows, columns], weighted sum
    max_score: Any  # f32[rows]
    denominator: Any  # f32[rows]

    def result(self, layout: Any, dtype: jnp.dtype) -> Any:
        """Return the weighted mean of the values, zeros for rows without any weight."""
        denominator = jnp.where(self.denominator > 0, self.denominator, 1.0)
        return (self.values / spread(denominator, self.values.shape, layout)).astype(dtype)


class SplitBuffers(NamedTuple):
    """Two unmerged splits per worker: from a work item that another worker began (0) or that it began itself (1)."""

    values: Any  # f32[workers, 2, column_warpgroups, rows, columns], weighted sums
    max_score: Any  # f32[workers, 2, column_warpgroups, rows]
    denominator: Any  # f32[workers, 2, column_warpgroups, rows]


def copy_tokens(
    source: Any, row: Any, target: Any, token: Any, head: Any, column: Any, num_tokens: Any, size: int
) -> None:
    """Copy the first `num_tokens` tokens for a head from shared memory to the output.

    Copies must have static sizes, so the tokens are copied in powers of two, which add up to any number.

    Args:
        source: rows in one column group.
        row: first row to copy.
        target: output.
        token: first token in the output.
        head: query head.
        column: index of the column group.
        num_tokens: number of tokens to copy.
        size: upper bound for `num_tokens`, a power of two.
    """
    done, columns = i32(0), pl.ds(column * source.shape[1], source.shape[1])
    while size:

        @pl.when((num_tokens & size) != 0)
        def copy(done: Any = done, size: int = size) -> None:
            tokens = target.at[pl.ds(token + done, size), head, columns]
            plgpu.copy_smem_to_gmem(source.at[pl.ds(row + done, size)], tokens)

        done, size = done + (num_tokens & size), size // 2


def load(ref: Any, layout: Any) -> Any:
    """Load from memory to registers."""
    index = [()] if "idx" in _REQUIRED_OF_LOAD else []  # jax 0.10 requires the argument
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def spread(rows: Any, shape: tuple[int, int], layout: Any) -> Any:
    """Broadcast one value per row to all columns."""
    return cast(lax.broadcast_in_dim(rows, shape, [0]), layout)


def cast(x: Any, layout: Any) -> Any:
    """Convert `x` to a register layout."""
    return plgpu.layout_cast(x, layout)


def i32(x: int) -> Array:
    """Return a 32-bit scalar."""
    return jnp.asarray(x, jnp.int32)
