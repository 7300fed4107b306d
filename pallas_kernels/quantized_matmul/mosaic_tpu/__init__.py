"""Product with a quantised matrix for TPUs, in Pallas (Mosaic).

The grid has a step for each block of x with each block of rows of the matrix; the pipeline copies the blocks of the
next step ahead, of the matrix as it is stored, in the array of all layers: the number of the layer is a prefetched
scalar. A block of x is copied once, with all of its columns, and stays while the matrix passes. Where blocks do not
divide the rows of the matrix, the last one is filled with anything, and of its products those that exist are stored.

In vector memory a block of the matrix is dequantised some columns at a time, and multiplied in the dtype of x with
float32 sums. The scales of a group are a row of their grid, as its minor dimension is that of the outputs: XLA lays out
other grids that way anyway. The row is repeated for the columns of the group and transposed, so that each scale is
where its elements are.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxserve.pallas_kernels.pallas_kernel import PallasKernel
from jaxserve.pallas_kernels.quantized_matmul.interface import Problem, Quantized
from jaxserve.pallas_kernels.quantized_matmul.mosaic_tpu.plan import (
    LANES,
    ROWS,
    Call,
    Sizes,
    choose_tiles,
    most_columns,
)
from jaxserve.pallas_kernels.quantized_matmul.settings import SETTINGS, shape_class, unsupported
from jaxtyping import Array, Float, Int

DTYPES = ("bfloat16",)


class MosaicTpu(PallasKernel[Problem, Call]):
    """Kernel for TPUs that multiplies quantised matrices."""

    platform = "tpu"
    module = f"{__name__}.kernel"

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Check dtypes, and the multiples that sizes must be."""
        if (reason := unsupported(problem, DTYPES)) is not None:
            return reason
        if problem.row_bytes % LANES:  # XLA lays out others transposed, and would copy the matrices of all layers
            return f"rows of the matrix must have a multiple of {LANES} bytes, not {problem.row_bytes}"
        if problem.num_outputs < LANES:
            return f"rows of the matrix must be {LANES} or more, not {problem.num_outputs}"
        if most_columns(problem, Sizes().columns) is None:
            return f"groups must be of {LANES} columns or of a multiple or a part of them, not of {problem.group_size}"
        return None

    def launch(self, problem: Problem) -> Call:
        """Choose tile sizes for the target chip."""
        chip = self.target_chip()
        sizes = self.settings.sizes(Sizes, chip.name, shape_class(problem))
        tiles = choose_tiles(problem, sizes, chip.memory_bytes)
        return Call(problem, tiles, chip.memory_bytes, self.settings.interpreter)

    def multiply(
        self, problem: Problem, x: Float[Array, "T K"], matrix: Quantized, layer: Int[Array, ""]
    ) -> Float[Array, "T N"]:
        """Pad x to whole tiles and run the kernel."""
        x = jnp.pad(x, ((0, -problem.num_rows % ROWS), (0, 0)))
        y: Array = self.kernel().multiply(self.launch(problem), x, matrix, layer)
        return y[: problem.num_rows]


KERNEL = MosaicTpu(SETTINGS)
