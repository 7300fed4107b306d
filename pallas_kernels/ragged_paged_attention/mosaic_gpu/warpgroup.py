"""Base class for loading and computing warpgroups. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import work_plan
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import WorkItem, read_work_item
from jaxserve.pallas_kernels.warpgroups import i32


class Warpgroup:
    """What loading and computing warpgroups have in common: they process the work items in their worker's span.

    Attributes:
        local_worker: the worker's index in its thread block.
        index: the worker's index among all workers.
        items: first and end index of the work items that the worker's span overlaps.
        span_start: first unit in the span: a unit is one key block of one work item.
        span_end: the span's end.
    """

    def __init__(
        self, config: KernelConfig, tiling: Tiling, inputs: Inputs, shared: Shared, local_worker: Scalar
    ) -> None:
        """Read the span that the plan assigns to worker `local_worker` in this thread block."""
        self.config, self.tiling, self.inputs, self.shared = config, tiling, inputs, shared
        index = local_worker * tiling.num_cores + lax.axis_index("block")
        self.local_worker, self.index = local_worker, index
        workers = inputs.workers
        self.items = (workers[index, work_plan.FIRST_ITEM], workers[index, work_plan.END_ITEM])
        self.span_start, self.span_end = workers[index, work_plan.SPAN_START], workers[index, work_plan.SPAN_END]

    def _item(self, index: Scalar) -> WorkItem:
        """Read a work item from the plan, with the key blocks that are in the worker's span.

        Args:
            index: tile times number of KV heads, plus KV head.
        """
        tile = lax.div(index, i32(self.config.num_kv_heads))
        head = lax.rem(index, i32(self.config.num_kv_heads))
        return read_work_item(self.inputs.tiles, tile, head, self.span_start, self.span_end)

    def _slot(self, block_count: Scalar) -> Scalar:
        """Return the index of the shared-memory ring slot for a key block, the worker's `block_count`-th from 0 on."""
        return self.local_worker * self.tiling.stages + lax.rem(block_count, i32(self.tiling.stages))


class TileSlice(NamedTuple):
    """Rows and columns of a tile's outputs that one computing warpgroup computes."""

    index: Scalar  # the warpgroup's index in the tile
    row: Scalar  # first of its 64 rows
    column: Scalar  # index among the column warpgroups, which divide the value columns

    @property
    def rows(self) -> Any:
        """Slice of the warpgroup's 64 rows among the tile's rows."""
        return pl.ds(self.row, WARPGROUP_ROWS)
