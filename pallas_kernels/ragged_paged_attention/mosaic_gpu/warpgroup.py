"""Base class for loading and computing warpgroups. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import WorkItem, i32, read_work_item
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import (
    END_ITEM,
    FIRST_ITEM,
    SPAN_END,
    SPAN_START,
)


class Warpgroup:
    """Warpgroup that processes the work items in its worker's span.

    Attributes:
        local_worker: the worker's index in its thread block.
        index: the worker's index among all.
    """

    def __init__(self, config: KernelConfig, tiling: Tiling, inputs: Inputs, shared: Shared, local_worker: Any) -> None:
        self.config, self.tiling, self.inputs, self.shared = config, tiling, inputs, shared
        index = local_worker * tiling.num_cores + lax.axis_index("block")
        self.local_worker, self.index = local_worker, index
        self.items = (inputs.workers[index, FIRST_ITEM], inputs.workers[index, END_ITEM])
        self.span_start, self.span_end = inputs.workers[index, SPAN_START], inputs.workers[index, SPAN_END]

    def _item(self, index: Any) -> WorkItem:
        tile = lax.div(index, i32(self.config.num_kv_heads))
        head = lax.rem(index, i32(self.config.num_kv_heads))
        return read_work_item(self.inputs.tiles, tile, head, self.span_start, self.span_end)

    def _slot(self, block_count: Any) -> Any:
        """Return the ring slot that holds the worker's next block."""
        return self.local_worker * self.tiling.stages + lax.rem(block_count, i32(self.tiling.stages))


class TileSlice(NamedTuple):
    """Rows and columns that one warpgroup computes in a tile."""

    index: Any
    row: Any  # first of its 64 rows
    column: Any  # index among the column warpgroups

    @property
    def rows(self) -> Any:
        """Rows in the tile's matrix."""
        return pl.ds(self.row, WARPGROUP_ROWS)


def tile_slice(tiling: Tiling, index: Any) -> TileSlice:
    """Return the tile slice that one computing warpgroup computes."""
    columns = i32(tiling.column_warpgroups)
    return TileSlice(index, lax.div(index, columns) * WARPGROUP_ROWS, lax.rem(index, columns))
