"""Tiles of a grouped product that fit a multiprocessor's shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.pallas_kernels.grouped_matmul.interface import Problem
from jaxserve.pallas_kernels.hopper import SHARED_BYTES, WARPGROUP_ROWS

MIN_ROWS = 8  # rows of x that a copy to shared memory begins at a multiple of
MAX_WARPGROUPS = 2  # computing warpgroups of a thread block


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of tiles; each may be replaced by a measured one.

    Attributes:
        warpgroups: number of warpgroups that compute a tile, 64 rows each.
        outputs: rows of a block of a matrix.
        stages: blocks in flight.
    """

    warpgroups: int = MAX_WARPGROUPS
    outputs: int = 128
    stages: int = 8

    def __post_init__(self) -> None:
        if self.stages < 2:  # a block is free only once the next is multiplied
            raise ValueError(f"stages must be at least 2, got {self.stages}")


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks in shared memory.

    Attributes:
        warpgroups: number of warpgroups that compute a tile.
        outputs: rows of a block of a matrix.
        inputs: columns of a block of x and of a matrix.
        stages: number of such pairs of blocks in the ring.
    """

    warpgroups: int
    outputs: int
    inputs: int
    stages: int

    @property
    def rows(self) -> int:
        """Rows of a tile of x."""
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
    def output_tiles(self) -> int:
        """Number of blocks of the rows of a matrix."""
        return self.problem.num_outputs // self.tiles.outputs

    @property
    def input_tiles(self) -> int:
        """Number of blocks of the columns of a matrix."""
        return self.problem.num_inputs // self.tiles.inputs


def choose_tiles(problem: Problem, sizes: Sizes) -> Tiles:
    """Return tiles near the rows of a group, and a ring that fills the memory."""
    warpgroups = 1 if problem.mean_rows <= WARPGROUP_ROWS else min(sizes.warpgroups, MAX_WARPGROUPS)
    outputs = next(size for size in (256, 128, 64) if size <= sizes.outputs and problem.num_outputs % size == 0)
    inputs = 64 if problem.num_inputs % 64 == 0 else 32
    rows = warpgroups * WARPGROUP_ROWS
    stage_bytes = (rows + outputs) * inputs * problem.matrix_dtype.itemsize
    fitting = (SHARED_BYTES - rows * outputs * problem.kernel_dtype.itemsize) // stage_bytes
    return Tiles(warpgroups, outputs, inputs, min(sizes.stages, fitting))
