"""Grouped float matmul on TPUs: supported problems and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels.grouped_matmul.launch import MatmulKernel, Tiles
from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.target import TargetChip
from jaxserve.pallas_kernels.tpu import LANES, round_up

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class TileLimits:
    """Block size limits of the TPU kernel for float matrices; tuned values override the defaults.

    Attributes:
        weight_bytes: maximum bytes per matrix block. A copy of a block should take longer than a grid step's overhead.
        min_rows: minimum x rows per tile, also for smaller groups: loading a matrix into the MXU costs as much time as
            multiplying 128 rows by it.
        max_rows: maximum x rows per tile.
    """

    weight_bytes: int = 2 * 2**20
    min_rows: int = 128
    max_rows: int = 512


class FloatMatmul(MatmulKernel[Problem]):
    """Backend for grouped matmuls with float matrices on TPUs; float32 operands are multiplied in full precision."""

    platform = "tpu"
    module = f"{__package__}.float_kernel"
    limits = TileLimits

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Return why the kernel cannot run the problem on any TPU: a dtype or matrix size; None if it can."""
        # XLA stores matrices with other column counts transposed, and would copy all layers' matrices.
        return problem.unsupported_reason(DTYPES, outputs=sublanes(problem.matrix_dtype), inputs=LANES)

    def choose_tiles(self, problem: Problem, limits: TileLimits, chip: TargetChip) -> Tiles:
        """Return row tiles near the mean group size, and matrix blocks with whole rows if they fit `limits` and VMEM.

        Raises:
            ValueError: no block fits.
        """
        itemsize, N, K = problem.matrix_dtype.itemsize, problem.num_outputs, problem.num_inputs
        rows = min(max(problem.mean_rows, limits.min_rows), limits.max_rows)
        rows = round_up(min(rows, problem.num_rows), sublanes(problem.matrix_dtype))
        for splits in range(1, K // LANES + 1):
            if K % (splits * LANES):
                continue
            columns = K // splits
            max_outputs = limits.weight_bytes // (columns * itemsize)
            if max_outputs < N:
                max_outputs = max_outputs // LANES * LANES
            while max_outputs > 0:
                num_tiles = -(-N // max_outputs)  # about equal tiles
                outputs = N if num_tiles == 1 else round_up(-(-N // num_tiles), LANES)
                tiles = Tiles(rows, outputs, columns)
                if block_bytes(tiles, itemsize) <= chip.memory_bytes:
                    return tiles
                max_outputs = (max_outputs - 1) // LANES * LANES
        raise ValueError(
            f"blocks of matrices of {K} columns and {rows} rows of x need more than {chip.memory_bytes} bytes"
        )

    def multiply(
        self,
        problem: Problem,
        x: Float[Array, "M K"],
        matrices: Float[Array, "layers GN K"],
        group_sizes: Int32[Array, " G"],
        layer: Int[Array, ""],
    ) -> Float[Array, "M N"]:
        """Multiply each row of x by its group's matrix; return float32 or the result dtype.

        Args:
            problem: static parameters.
            x: rows, sorted by group.
            matrices: all layers' matrices.
            group_sizes: rows per group; results after the last group are undefined.
            layer: layer whose matrices are used.
        """
        x = jnp.pad(x, ((0, -problem.num_rows % sublanes(x.dtype)), (0, 0)))
        y: Array = self.kernel().multiply(self.launch(problem), x, matrices, group_sizes, layer)
        return y[: problem.num_rows]


KERNEL = FloatMatmul()


def sublanes(dtype: jnp.dtype) -> int:
    """Return how many rows a memory tile has for this dtype: 8 for float32, 16 for bfloat16."""
    return 32 // dtype.itemsize


def block_bytes(tiles: Tiles, itemsize: int) -> int:
    """Return the kernel's VMEM bytes: two buffers for each copied block, and the sums.

    Args:
        tiles: block sizes.
        itemsize: bytes per element of x and the matrices.
    """
    copied = (tiles.rows + tiles.outputs) * tiles.columns * itemsize
    return 2 * copied + 3 * tiles.rows * round_up(tiles.outputs, LANES) * 4
