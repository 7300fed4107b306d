"""What the kernels have in common: items, the softmax over a part of one, and the way of its tokens to the output."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    BASE_TOKEN,
    FIRST_BLOCK,
    FIRST_UNIT,
    LEAD,
    NUM_BLOCKS,
    NUM_TOKENS,
    PAST_LEN,
    POSITION,
    ROW,
)

LOG2E = math.log2(math.e)
MASKED = -1e30  # finite: a row that has seen no key yet must not turn into NaN

_REQUIRED_OF_LOAD = {x.name for x in inspect.signature(plgpu.load).parameters.values() if x.default is x.empty}


class Item(NamedTuple):
    """A tile with its kv head, and the part of it that falls to one worker."""

    tile: Any
    row: Any
    head: Any
    base_token: Any  # of the step; the tile's own begin `lead` tokens later
    lead: Any
    num_tokens: Any
    position: Any
    past_len: Any
    begin: Any  # first block of the part
    end: Any  # end of its blocks
    is_first: Any  # whether the part has the item's first block
    is_last: Any


def read_item(tiles_ref: Any, tile: Any, head: Any, span_start: Any, span_end: Any) -> Item:
    """The part of an item that falls to the worker of a span."""

    def column(index: int) -> Any:
        return tiles_ref[tile, index]

    num_blocks, first_block = column(NUM_BLOCKS), column(FIRST_BLOCK)
    first_unit = column(FIRST_UNIT) + head * num_blocks
    begin = jnp.maximum(span_start - first_unit, 0)
    end = jnp.minimum(span_end - first_unit, num_blocks)
    return Item(
        tile=tile,
        row=column(ROW),
        head=head,
        base_token=column(BASE_TOKEN),
        lead=column(LEAD),
        num_tokens=column(NUM_TOKENS),
        position=column(POSITION),
        past_len=column(PAST_LEN),
        begin=first_block + begin,
        end=first_block + end,
        is_first=begin == 0,
        is_last=end == num_blocks,
    )


class Softmax(NamedTuple):
    """Of some rows of a tile, over the keys seen so far; scores in base 2."""

    values: Any  # f32[rows, columns], weighted sum
    max_score: Any  # f32[rows]
    denominator: Any  # f32[rows]

    def result(self, layout: Any, dtype: jnp.dtype) -> Any:
        """The weighted mean of the values; of rows without any weight, zeros."""
        denominator = jnp.where(self.denominator > 0, self.denominator, 1.0)
        return (self.values / spread(denominator, self.values.shape, layout)).astype(dtype)


class Unmerged(NamedTuple):
    """Of each worker the softmax over its part of an item that another began (0) and of one that it began (1)."""

    values: Any  # f32[workers, 2, column_parts, rows, H / column_parts], weighted sums
    max_score: Any  # f32[workers, 2, column_parts, rows]
    denominator: Any  # f32[workers, 2, column_parts, rows]


def copy_tokens(
    source: Any, row: Any, target: Any, token: Any, head: Any, part: Any, num_tokens: Any, size: int
) -> None:
    """Up to `size` (a power of two) tokens of a head from shared memory to the output.

    A copy has a static size: a ladder of powers of two makes any number of tokens.

    Args:
        source: rows of one part of the columns.
        row: the first of them.
        target: the output.
        token: the first one there.
        head: query head.
        part: which part of the columns it is.
        num_tokens: how many.
        size: the most there may be.
    """
    done, columns = i32(0), pl.ds(part * source.shape[1], source.shape[1])
    while size:

        @pl.when((num_tokens & size) != 0)
        def copy(done: Any = done, size: int = size) -> None:
            place = target.at[pl.ds(token + done, size), head, columns]
            plgpu.copy_smem_to_gmem(source.at[pl.ds(row + done, size)], place)

        done, size = done + (num_tokens & size), size // 2


def load(ref: Any, layout: Any) -> Any:
    """From memory to registers."""
    index = [()] if "idx" in _REQUIRED_OF_LOAD else []  # jax 0.10 wants one
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def spread(rows: Any, shape: tuple[int, int], layout: Any) -> Any:
    """A number for each row, in all columns."""
    return cast(lax.broadcast_in_dim(rows, shape, [0]), layout)


def cast(x: Any, layout: Any) -> Any:
    """`x` in a layout of registers."""
    return plgpu.layout_cast(x, layout)


def i32(x: int) -> Array:
    """A 32-bit scalar."""
    return jnp.asarray(x, jnp.int32)
