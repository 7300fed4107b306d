"""Tiles of a grouped product that fit the chip's vector memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxserve.pallas_kernels.grouped_matmul.interface import Problem

LANES = 128  # elements in a row of a memory tile


@dataclass(frozen=True)
class Sizes:
    """Bounds of tiles; each may be replaced by a measured one.

    Attributes:
        weight_bytes: upper bound of a block of a matrix. Its copy should take longer than a step of the grid costs.
        min_rows: rows of a tile where groups have few. Loading weights into a matrix unit takes as long as 128 rows.
        max_rows: upper bound of the rows of a tile.
    """

    weight_bytes: int = 2 * 2**20
    min_rows: int = 128
    max_rows: int = 512


@dataclass(frozen=True)
class Tiles:
    """Sizes of the blocks of a step of the grid: x `[rows, inputs]`, matrix `[outputs, inputs]`."""

    rows: int
    outputs: int
    inputs: int


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
    def output_tiles(self) -> int:
        """Number of blocks of the rows of a matrix."""
        return -(-self.problem.num_outputs // self.tiles.outputs)

    @property
    def input_tiles(self) -> int:
        """Number of blocks of the columns of a matrix."""
        return self.problem.num_inputs // self.tiles.inputs


def sublanes(dtype: jnp.dtype) -> int:
    """Return the rows of a memory tile."""
    return 32 // dtype.itemsize


def choose_tiles(problem: Problem, sizes: Sizes, vmem_bytes: int) -> Tiles:
    """Return tiles near the rows of a group and with whole rows of the matrices, or else with as long ones as fit.

    Raises:
        ValueError: not even the smallest tiles fit.
    """
    itemsize, N, K = problem.matrix_dtype.itemsize, problem.num_outputs, problem.num_inputs
    rows = min(max(problem.mean_rows, sizes.min_rows), sizes.max_rows)
    rows = _round_up(min(rows, problem.num_rows), sublanes(problem.matrix_dtype))
    for splits in range(1, K // LANES + 1):
        if K % (splits * LANES):
            continue
        inputs = K // splits
        most = sizes.weight_bytes // (inputs * itemsize)
        if most < N:
            most = most // LANES * LANES
        while most > 0:
            num_tiles = -(-N // most)  # tiles of about equal size
            tiles = Tiles(rows, N if num_tiles == 1 else _round_up(-(-N // num_tiles), LANES), inputs)
            if _block_bytes(tiles, itemsize) <= vmem_bytes:
                return tiles
            most = (most - 1) // LANES * LANES
    raise ValueError(f"blocks of matrices of {K} columns and {rows} rows of x need more than {vmem_bytes} bytes")


def _block_bytes(tiles: Tiles, itemsize: int) -> int:
    """Return the bytes of two blocks of everything that is copied, and of the sums."""
    copied = (tiles.rows + tiles.outputs) * tiles.inputs * itemsize
    return 2 * copied + 3 * tiles.rows * _round_up(tiles.outputs, LANES) * 4


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
