"""Blocks of a product with a quantised matrix that fit a multiprocessor's shared memory and registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxserve.pallas_kernels.hopper import SHARED_BYTES, WARPGROUP_ROWS
from jaxserve.pallas_kernels.quantized_matmul.interface import Problem

LEAST_GROUP = 8  # columns of the least groups: those of a wgmma's registers that lie beside each other
COPY_BYTES = 128  # a copy to shared memory has a multiple of
UNIT = 64  # columns that one wgmma of registers multiplies: a line of 128 bytes of x
MIN_COLUMNS = 64  # bytes of a row of elements in a block, or twice as many
MIN_ROWS = 8  # rows of x that a tile has a multiple of
MAX_ROWS = 256  # rows of x that an instruction multiplies
SUMMED_ROWS = 64  # rows of x of a tile, up to which scaling the sums of groups of 64 columns is the cheaper way
MOST_ROWS = {4: 32, 3: 64, 2: MAX_ROWS}  # computing warpgroups: rows of x whose sums the registers of so many hold
RING_BYTES = SHARED_BYTES - 2048  # less what else a thread block keeps there
LATENCY_BYTES = 24 * 1024  # bytes that a multiprocessor loads in the time that beginning and storing an item takes


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of blocks; each may be replaced by a measured one.

    Attributes:
        rows: rows of x of a work item. The matrix is read and dequantised once for each.
        columns: bytes of a row of elements in a block.
        warpgroups: computing warpgroups of a thread block, each with 64 rows of the matrix.
        stages: blocks in flight.
    """

    rows: int = MAX_ROWS
    columns: int = 2 * MIN_COLUMNS
    warpgroups: int = 4
    stages: int = 8

    def __post_init__(self) -> None:
        if self.stages < 2:  # a block is free only once it is multiplied
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.columns < MIN_COLUMNS:
            raise ValueError(f"columns must be at least {MIN_COLUMNS}, got {self.columns}")
        if not MIN_ROWS <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows must be between {MIN_ROWS} and {MAX_ROWS}, got {self.rows}")
        if self.warpgroups < min(MOST_ROWS):
            raise ValueError(f"warpgroups must be at least {min(MOST_ROWS)}, got {self.warpgroups}")


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks in shared memory.

    Attributes:
        rows: rows of x of a work item.
        columns: bytes of a row of elements in a block.
        warpgroups: computing warpgroups of a thread block.
        stages: number of blocks in the ring.
        splits: number of parts of the columns, each a work item of its own.
    """

    rows: int
    columns: int
    warpgroups: int
    stages: int
    splits: int

    @property
    def item_outputs(self) -> int:
        """Rows of the matrix of a work item."""
        return self.warpgroups * WARPGROUP_ROWS


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
    def scales_sums(self) -> bool:
        """True if the sums of groups are scaled, and not the elements."""
        return scales_sums(self.problem, self.tiles.rows)

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
        return self.problem.row_bytes // self.tiles.columns // self.tiles.splits

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the sums: splits, rows of x and rows of the matrix, with those past the last of both."""
        outputs = self.output_tiles * self.tiles.item_outputs
        return self.tiles.splits, self.row_tiles * self.tiles.rows, outputs


def scales_sums(problem: Problem, rows: int) -> bool:
    """Return whether the sums of groups are scaled: exact, and cheap where rows of x are few and groups large."""
    most = 0 if problem.group_size % UNIT else SUMMED_ROWS if problem.group_size == UNIT else 2 * SUMMED_ROWS
    return problem.is_scaled and not problem.has_minimum and rows <= most


def choose_tiles(problem: Problem, sizes: Sizes, num_cores: int) -> Tiles:
    """Return tiles with few rows where there are few, and of those that fit the ones that should take least time.

    Raises:
        ValueError: no tiles of these sizes are possible.
    """
    num_tiles = -(-problem.num_rows // sizes.rows)
    rows = -(-problem.num_rows // (num_tiles * MIN_ROWS)) * MIN_ROWS  # tiles of about equal size
    least = min(MOST_ROWS)
    possible = [
        (stages, columns, warpgroups)
        for columns in (2 * MIN_COLUMNS, MIN_COLUMNS)
        if columns <= sizes.columns and problem.row_bytes % columns == 0
        if columns % problem.group_size == 0 or problem.group_size % columns == 0
        for warpgroups, most in MOST_ROWS.items()
        if warpgroups <= sizes.warpgroups and (rows <= most or warpgroups == least)
        if all(size % COPY_BYTES == 0 for size in grid_bytes(problem, columns, warpgroups))
        if (stages := min(sizes.stages, RING_BYTES // stage_bytes(problem, rows, columns, warpgroups))) >= 2
    ]
    if not possible:
        raise ValueError(f"stages must be at least 2, and memory holds fewer for {rows} rows of x")
    choices = [
        Tiles(rows, columns, warpgroups, stages, splits)
        for stages, columns, warpgroups in possible
        if stages >= min(3, max(possible)[0])
        for splits in range(1, problem.row_bytes // columns + 1)
        if problem.row_bytes // columns % splits == 0
    ]
    return min(choices, key=lambda tiles: _cost(problem, tiles, num_cores))


def grid_bytes(problem: Problem, columns: int, warpgroups: int) -> tuple[int, ...]:
    """Return the bytes of each grid of a block's groups: of scales, and of zero points or minima."""
    count = problem.block_groups(columns) * warpgroups * WARPGROUP_ROWS
    sizes = (problem.scale_dtype.itemsize if problem.is_scaled else 0, problem.offset_bytes)
    return tuple(count * size for size in sizes if size)


def stage_bytes(problem: Problem, rows: int, columns: int, warpgroups: int) -> int:
    """Return the bytes of a block in shared memory."""
    x_bytes, element_bytes = rows * columns * problem.dtype.itemsize, warpgroups * WARPGROUP_ROWS * columns
    return problem.per_byte * (x_bytes + sum(grid_bytes(problem, columns, warpgroups))) + element_bytes


def _cost(problem: Problem, tiles: Tiles, num_cores: int) -> float:
    """Return the bytes that the busiest multiprocessor loads and stores, those in the cache by half."""
    row_tiles, outputs = -(-problem.num_rows // tiles.rows), tiles.item_outputs
    items = row_tiles * -(-problem.num_outputs // outputs) * tiles.splits
    x_bytes = tiles.rows * problem.num_inputs * problem.dtype.itemsize
    sums = 2 * tiles.rows * outputs * 4 if tiles.splits > 1 else tiles.rows * outputs * 4
    item = (outputs * problem.row_bytes + x_bytes / 2) / tiles.splits + sums / 2 + LATENCY_BYTES
    return -(-items // num_cores) * item
