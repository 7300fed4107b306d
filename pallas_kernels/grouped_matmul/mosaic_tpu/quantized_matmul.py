"""Matmul with quantised matrices on TPUs: supported problems and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.grouped_matmul.launch import MatmulKernel, Tiles
from jaxserve.pallas_kernels.grouped_matmul.problem import QuantizedProblem, QuantizedStack
from jaxserve.pallas_kernels.target import TargetChip
from jaxserve.pallas_kernels.tpu import LANES, round_up

DTYPES = ("bfloat16",)
SUBLANES = 16  # x rows per memory tile
SCALE_SUBLANES = 8  # groups per memory tile, for float32 scales


@dataclass(frozen=True)
class TileLimits:
    """Block size limits of the TPU kernel for quantised matrices; tuned values override the defaults.

    Attributes:
        weight_bytes: maximum bytes per matrix block. A copy of a block should take longer than a grid step's overhead.
        max_rows: maximum x rows per tile. Each row tile reads and dequantises the matrix again.
        columns: maximum matrix columns that the kernel dequantises before it multiplies them.
    """

    weight_bytes: int = 2 * 2**20
    max_rows: int = 512
    columns: int = 512


class QuantizedMatmul(MatmulKernel[QuantizedProblem]):
    """Backend for matmuls with quantised matrices on TPUs."""

    platform = "tpu"
    module = f"{__package__}.quantized_kernel"
    limits = TileLimits

    def unsupported_problem(self, problem: QuantizedProblem) -> str | None:
        """Return why the kernel cannot run the problem on any TPU: a dtype, matrix size or scale group size.

        Return None if it can.
        """
        if (reason := problem.unsupported_elements(DTYPES)) is not None:
            return reason
        if problem.stored_columns % LANES:  # XLA stores such matrices transposed, and would copy all layers'
            return f"rows of the matrix must have a multiple of {LANES} bytes, not {problem.stored_columns}"
        if problem.num_outputs < LANES:
            return f"rows of the matrix must be {LANES} or more, not {problem.num_outputs}"
        if _dequantized_columns(problem, TileLimits().columns) is None:
            return f"groups must be of {LANES} columns or of a multiple or a part of them, not of {problem.group_size}"
        return None

    def choose_tiles(self, problem: QuantizedProblem, limits: TileLimits, chip: TargetChip) -> Tiles:
        """Return the tiles with the most x rows, and then the most matrix rows, that fit `limits` and VMEM.

        Raises:
            ValueError: no tiles fit.
        """
        columns = _dequantized_columns(problem, limits.columns)
        if columns is None:
            raise ValueError(f"no block of at most {limits.columns} columns divides groups of {problem.group_size}")
        all_rows = round_up(problem.num_rows, SUBLANES)
        num_tiles = -(-all_rows // limits.max_rows)
        rows = round_up(-(-all_rows // num_tiles), SUBLANES)  # about equal tiles
        max_outputs = min(limits.weight_bytes // problem.stored_columns, problem.num_outputs)
        while rows:
            for outputs in range(max(LANES, max_outputs // LANES * LANES), 0, -LANES):
                tiles = Tiles(rows, outputs, columns)
                if block_bytes(problem, tiles) <= chip.memory_bytes:
                    return tiles
            rows = rows // 2 // SUBLANES * SUBLANES
        raise ValueError(f"blocks of matrices of {problem.num_inputs} columns need more than {chip.memory_bytes} bytes")

    def multiply(
        self,
        problem: QuantizedProblem,
        x: Float[Array, "T K"],
        matrix: QuantizedStack,
        group_sizes: None,
        layer: Int[Array, ""],
    ) -> Float[Array, "T N"]:
        """Multiply x by one layer's transposed quantised matrix; return the result dtype.

        Args:
            problem: static parameters.
            x: rows.
            matrix: quantised matrices for all layers.
            group_sizes: None, since all rows have one matrix.
            layer: layer whose matrix is used.
        """
        x = jnp.pad(x, ((0, -problem.num_rows % SUBLANES), (0, 0)))
        y: Array = self.kernel().multiply(self.launch(problem), x, matrix, layer)
        return y[: problem.num_rows]


KERNEL = QuantizedMatmul()


def loop_columns(problem: QuantizedProblem) -> int:
    """Return how many stored columns the kernel's inner loop multiplies per iteration, given several scale groups.

    They are as many columns as eight scale groups have, because each slice of the scales must start at a multiple of
    eight groups; or all columns, in a single iteration, if that number does not divide them.
    """
    span = SCALE_SUBLANES * problem.group_size
    return span if problem.stored_columns % span == 0 else problem.stored_columns


def num_narrow_grids(problem: QuantizedProblem) -> int:
    """Return how many of the arrays with scales and offsets are narrower than float32: the kernel converts these."""
    return (problem.scale_dtype.itemsize < 4) + problem.has_zero


def block_bytes(problem: QuantizedProblem, tiles: Tiles) -> int:
    """Return the kernel's VMEM bytes: two buffers per copied block, the sums, and scales and offsets in float32."""
    groups = round_up(problem.num_scale_groups, 32) * tiles.outputs
    grids = groups * (problem.scale_dtype.itemsize + problem.offset_bytes)
    x, elements = tiles.rows * problem.num_inputs * problem.dtype.itemsize, tiles.outputs * problem.stored_columns
    out = tiles.rows * tiles.outputs * problem.result_dtype.itemsize
    return 2 * (x + elements + grids + out) + tiles.rows * tiles.outputs * 4 + num_narrow_grids(problem) * groups * 4


def _dequantized_columns(problem: QuantizedProblem, maximum: int) -> int | None:
    """Return how many columns the kernel dequantises before it multiplies them, or None if no number is possible.

    It is at most `maximum` and divides a loop iteration's columns; the columns are in one scale group or are whole
    groups.
    """
    size, span = problem.group_size, loop_columns(problem)
    for columns in range(maximum // LANES * LANES, 0, -LANES):
        if span % columns == 0 and (size % columns == 0 or (columns % size == 0 and size % SCALE_SUBLANES == 0)):
            return columns
    return None
