"""Blocks of a product with a quantised matrix that fit the chip's vector memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.pallas_kernels.quantized_matmul.interface import Problem

LANES = 128  # elements in a row of a memory tile
ROWS = 16  # rows of x in a memory tile
GRID_ROWS = 8  # rows of a grid of floats in a memory tile


@dataclass(frozen=True)
class Sizes:
    """Bounds of blocks; each may be replaced by a measured one.

    Attributes:
        weight_bytes: upper bound of a block of the matrix. Its copy should take longer than a step of the grid costs.
        max_rows: upper bound of the rows of a block of x. The matrix is read and dequantised once for each.
        columns: upper bound of the columns that are dequantised at once.
    """

    weight_bytes: int = 2 * 2**20
    max_rows: int = 512
    columns: int = 512


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks of a step of the grid: x `[rows, K]`, matrix `[outputs, K]`.

    Attributes:
        rows: rows of x.
        outputs: rows of the matrix.
        columns: columns of the matrix that are dequantised at once.
    """

    rows: int
    outputs: int
    columns: int


@dataclass(frozen=True)
class Call:
    """Static facts of one call.

    Attributes:
        problem: shapes and dtypes.
        tiles: sizes of blocks.
        vmem_bytes: bytes of vector memory for the blocks.
        interpret: parameters of the interpreter; None to run on a TPU.
    """

    problem: Problem
    tiles: Tiles
    vmem_bytes: int
    interpret: Any

    @property
    def num_narrow(self) -> int:
        """Number of grids that are not float32, of which there are copies that are."""
        return num_narrow(self.problem)

    @property
    def is_looped(self) -> bool:
        """True if a turn has as many groups as a memory tile of their grid has rows."""
        return self.turn_columns == GRID_ROWS * self.problem.group_size

    @property
    def turn_columns(self) -> int:
        """Columns of a turn of the loop over a block."""
        return self.tiles.columns if self.problem.num_groups == 1 else loop_columns(self.problem)

    @property
    def row_tiles(self) -> int:
        """Number of blocks of x."""
        return -(-self.problem.num_rows // self.tiles.rows)

    @property
    def output_tiles(self) -> int:
        """Number of blocks of the matrix."""
        return -(-self.problem.num_outputs // self.tiles.outputs)


def loop_columns(problem: Problem) -> int:
    """Return the columns of a turn of the loop over a block, of each part of its bytes.

    Rows of a grid can be read from a multiple of eight on, if that is not static. So a turn has eight groups, or all.
    """
    span = GRID_ROWS * problem.group_size
    return span if problem.row_bytes % span == 0 else problem.row_bytes


def most_columns(problem: Problem, bound: int) -> int | None:
    """Return the columns that are dequantised at once, or None if groups do not lie in them evenly.

    They are one group's, or those of whole groups, and divide those of a turn.
    """
    size, span = problem.group_size, loop_columns(problem)
    for columns in range(bound // LANES * LANES, 0, -LANES):
        if span % columns == 0 and (size % columns == 0 or (columns % size == 0 and size % GRID_ROWS == 0)):
            return columns
    return None


def choose_tiles(problem: Problem, sizes: Sizes, vmem_bytes: int) -> Tiles:
    """Return blocks with as many rows of x as fit, then as many of the matrix.

    Raises:
        ValueError: not even the smallest blocks fit, or their columns cannot be chosen.
    """
    columns = most_columns(problem, sizes.columns)
    if columns is None:
        raise ValueError(f"no block of at most {sizes.columns} columns divides groups of {problem.group_size}")
    whole = _round_up(problem.num_rows, ROWS)
    num_tiles = -(-whole // sizes.max_rows)
    rows = _round_up(-(-whole // num_tiles), ROWS)  # tiles of about equal size
    most = max(LANES, min(sizes.weight_bytes // problem.row_bytes, problem.num_outputs) // LANES * LANES)
    while rows:
        for outputs in range(most, 0, -LANES):
            tiles = Tiles(rows, outputs, columns)
            if block_bytes(problem, tiles) <= vmem_bytes:
                return tiles
        rows = rows // 2 // ROWS * ROWS
    raise ValueError(f"blocks of matrices of {problem.num_inputs} columns need more than {vmem_bytes} bytes")


def block_bytes(problem: Problem, tiles: Tiles) -> int:
    """Return the bytes of two blocks of everything that is copied, of the sums, and of narrow grids as floats."""
    groups = _round_up(problem.num_groups, 32) * tiles.outputs
    grids = groups * (problem.scale_dtype.itemsize + problem.offset_bytes)
    x, elements = tiles.rows * problem.num_inputs * problem.dtype.itemsize, tiles.outputs * problem.row_bytes
    out = tiles.rows * tiles.outputs * problem.result_dtype.itemsize
    return 2 * (x + elements + grids + out) + tiles.rows * tiles.outputs * 4 + num_narrow(problem) * groups * 4


def num_narrow(problem: Problem) -> int:
    """Return the number of grids that are not float32."""
    return (problem.scale_dtype.itemsize < 4) + problem.has_zero


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
