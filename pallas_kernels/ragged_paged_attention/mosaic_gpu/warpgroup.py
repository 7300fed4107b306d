"""Code that loading and computing warpgroups share. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import Item, i32, read_item
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    END_ITEM,
    FIRST_ITEM,
    SPAN_END,
    SPAN_START,
    Call,
    Tiles,
)


class Warpgroup:
    """Warpgroup that works on the span of a worker.

    Attributes:
        local_worker: index of the worker in its thread block.
        index: index of the worker among all.
    """

    def __init__(self, call: Call, tiles: Tiles, inputs: Inputs, shared: Shared, local_worker: Any) -> None:
        self.call, self.tiles, self.inputs, self.shared = call, tiles, inputs, shared
        index = local_worker * tiles.num_cores + lax.axis_index("block")
        self.local_worker, self.index = local_worker, index
        self.items = (inputs.workers[index, FIRST_ITEM], inputs.workers[index, END_ITEM])
        self.span_start, self.span_end = inputs.workers[index, SPAN_START], inputs.workers[index, SPAN_END]

    def _item(self, index: Any) -> Item:
        tile = lax.div(index, i32(self.call.num_kv_heads))
        head = lax.rem(index, i32(self.call.num_kv_heads))
        return read_item(self.inputs.tiles, tile, head, self.span_start, self.span_end)

    def _slot(self, block_count: Any) -> Any:
        """Return the slot of the ring that holds the worker's next block."""
        return self.local_worker * self.tiles.stages + lax.rem(block_count, i32(self.tiles.stages))


class TilePart(NamedTuple):
    """Part of a tile that one warpgroup computes."""

    index: Any
    row: Any  # first of its 64 rows
    column: Any  # index of its part of the values' columns

    @property
    def rows(self) -> Any:
        """Rows of the tile's matrix."""
        return pl.ds(self.row, WARPGROUP_ROWS)


def tile_part(tiles: Tiles, index: Any) -> TilePart:
    """Return the part of a tile for the index-th of its computing warpgroups."""
    columns = i32(tiles.column_parts)
    return TilePart(index, lax.div(index, columns) * WARPGROUP_ROWS, lax.rem(index, columns))
