"""Blocks of a product with a quantised matrix that fit a multiprocessor's shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxserve.pallas_kernels.hopper import SHARED_BYTES, WARPGROUP_ROWS
from jaxserve.pallas_kernels.quantized_matmul.interface import Problem

COLUMNS = 64  # columns of a block, and bytes of a row of elements in it
MIN_ROWS = 8  # rows of x that a copy to shared memory has a multiple of
LEAST_OUTPUTS = 64  # rows of the matrix that a warpgroup multiplies at least
WARPGROUPS = 2  # computing warpgroups of a thread block


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of blocks; each may be replaced by a measured one.

    Attributes:
        rows: rows of x of a work item. The matrix is read and dequantised once for each.
        outputs: rows of the matrix that a warpgroup multiplies.
        stages: blocks in flight.
    """

    rows: int = 256
    outputs: int = 64
    stages: int = 8

    def __post_init__(self) -> None:
        if self.stages < 2:  # a block is free only once the next is multiplied
            raise ValueError(f"stages must be at least 2, got {self.stages}")


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks in shared memory.

    Attributes:
        row_blocks: number of blocks of 64 rows of x that a work item has.
        outputs: rows of the matrix that a warpgroup multiplies.
        stages: number of blocks in the ring.
        splits: number of parts of the columns, each a work item of its own.
    """

    row_blocks: int
    outputs: int
    stages: int
    splits: int

    @property
    def rows(self) -> int:
        """Rows of x of a work item."""
        return self.row_blocks * WARPGROUP_ROWS

    @property
    def item_outputs(self) -> int:
        """Rows of the matrix of a work item."""
        return WARPGROUPS * self.outputs


@dataclass(frozen=True)
class Call:
    """Static facts of one call.

    Attributes:
        problem: shapes and dtypes.
        tiles: sizes of blocks.
        num_cores: number of thread blocks, one for each multiprocessor.
        interpret: parameters of the interpreter; None to run on a GPU.
    """

    problem: Problem
    tiles: Tiles
    num_cores: int
    interpret: Any

    @property
    def element_dtype(self) -> jnp.dtype:
        """Dtype of the bytes of elements."""
        return jnp.dtype({"int8": jnp.int8, "e4m3": jnp.float8_e4m3fn}.get(self.problem.elements, jnp.uint8))

    @property
    def row_tiles(self) -> int:
        """Number of tiles of x."""
        return -(-self.problem.num_rows // self.tiles.rows)

    @property
    def output_tiles(self) -> int:
        """Number of tiles of the rows of the matrix."""
        return -(-self.problem.num_outputs // self.tiles.item_outputs)

    @property
    def num_items(self) -> int:
        """Number of work items."""
        return self.row_tiles * self.output_tiles * self.tiles.splits

    @property
    def blocks(self) -> int:
        """Number of blocks of columns of a work item."""
        return self.problem.row_bytes // COLUMNS // self.tiles.splits

    @property
    def copied_rows(self) -> int:
        """Rows of x that are copied for a work item; sums of the others are not stored."""
        return min(self.tiles.rows, -(-self.problem.num_rows // MIN_ROWS) * MIN_ROWS)


def choose_tiles(problem: Problem, sizes: Sizes, num_cores: int) -> Tiles:
    """Return tiles with few rows where there are few, a ring that fills the memory, and work for all cores.

    Raises:
        ValueError: no tiles of these sizes are possible.
    """
    num_tiles = -(-problem.num_rows // max(sizes.rows, WARPGROUP_ROWS))
    row_blocks = -(-problem.num_rows // (num_tiles * WARPGROUP_ROWS))  # tiles of about equal size
    if sizes.outputs < LEAST_OUTPUTS:
        raise ValueError(f"outputs must be at least {LEAST_OUTPUTS}, not {sizes.outputs}")
    larger = 2 * LEAST_OUTPUTS
    is_even = sizes.outputs >= larger and problem.num_outputs % (WARPGROUPS * larger) == 0
    outputs = larger if is_even else LEAST_OUTPUTS
    parts, rows = problem.per_byte, row_blocks * WARPGROUP_ROWS
    x_bytes, group_bytes = rows * COLUMNS * problem.dtype.itemsize, problem.scale_dtype.itemsize + problem.offset_bytes
    grid_bytes = problem.block_groups(COLUMNS) * WARPGROUPS * outputs * group_bytes
    stage_bytes = parts * (x_bytes + grid_bytes) + WARPGROUPS * outputs * COLUMNS
    own_bytes = parts * outputs * COLUMNS * problem.dtype.itemsize + WARPGROUP_ROWS * outputs * 4
    stages = min(sizes.stages, (SHARED_BYTES - WARPGROUPS * own_bytes) // stage_bytes)
    if stages < 2:
        raise ValueError(f"stages must be at least 2, and memory holds {stages} for {rows} rows and {outputs} outputs")
    items = -(-problem.num_rows // rows) * -(-problem.num_outputs // (WARPGROUPS * outputs))
    blocks = problem.row_bytes // COLUMNS
    even = [splits for splits in range(1, blocks + 1) if blocks % splits == 0 and items * splits <= num_cores]
    return Tiles(row_blocks, outputs, stages, max(even, default=1))
