"""What warpgroups that load and such that compute both know. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import Item, i32, read_item
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    END_ITEM,
    FIRST_ITEM,
    SPAN_END,
    SPAN_START,
    WARPGROUP_ROWS,
    Call,
    Tiles,
)


class Warpgroup:
    """One of those that work on the span of a worker.

    Attributes:
        lane: the worker among those of the block of threads.
        index: the worker among all.
    """

    def __init__(self, call: Call, tiles: Tiles, inputs: Inputs, shared: Shared, lane: Any) -> None:
        self.call, self.tiles, self.inputs, self.shared = call, tiles, inputs, shared
        index = lane * tiles.num_cores + lax.axis_index("block")
        self.lane, self.index = lane, index
        self.items = (inputs.workers[index, FIRST_ITEM], inputs.workers[index, END_ITEM])
        self.span_start, self.span_end = inputs.workers[index, SPAN_START], inputs.workers[index, SPAN_END]

    def _item(self, index: Any) -> Item:
        tile = lax.div(index, i32(self.call.num_kv_heads))
        head = lax.rem(index, i32(self.call.num_kv_heads))
        return read_item(self.inputs.tiles, tile, head, self.span_start, self.span_end)

    def _slot(self, block_count: Any) -> Any:
        """The part of the ring that the worker's next block is in."""
        return self.lane * self.tiles.stages + lax.rem(block_count, i32(self.tiles.stages))


class Part(NamedTuple):
    """What one warpgroup computes of a tile."""

    index: Any
    row: Any  # the first of its 64 rows
    column: Any  # which part of the values' columns

    @property
    def rows(self) -> Any:
        """Of a tile's matrix."""
        return pl.ds(self.row, WARPGROUP_ROWS)


def part_of(tiles: Tiles, index: Any) -> Part:
    """That of the index-th of the warpgroups that compute a tile."""
    columns = i32(tiles.column_parts)
    return Part(index, lax.div(index, columns) * WARPGROUP_ROWS, lax.rem(index, columns))
