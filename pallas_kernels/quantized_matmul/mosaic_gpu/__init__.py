"""Product with a quantised matrix for Hopper GPUs, in Pallas (Mosaic GPU).

A tile of x with a tile of the rows of the matrix, and with a split of the columns where there would be too few of them,
is a work item; the persistent thread blocks of all multiprocessors take the items in turn. In a thread block one
warpgroup feeds a ring of shared memory by TMA: blocks of x, and of the elements and grids of the matrix as they are
stored, in the arrays of all layers. The others multiply 64 rows of the matrix each: they make 16-bit floats of its
elements in registers, from where wgmma multiplies them with the block of x while the next ones are made. So few rows of
x cost few instructions. Scales multiply the float32 sums of their groups where that is less work than to scale the
elements. Sums of splits are added after the kernel. Where tiles do not divide the rows of the matrix, TMA fills the
last tile with zeros, and its sums are cut off.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxserve.pallas_kernels.pallas_kernel import PallasKernel
from jaxserve.pallas_kernels.quantized_matmul.interface import Problem, Quantized, scale_floats
from jaxserve.pallas_kernels.quantized_matmul.mosaic_gpu.plan import (
    LEAST_GROUP,
    MIN_COLUMNS,
    UNIT,
    Call,
    Sizes,
    choose_tiles,
)
from jaxserve.pallas_kernels.quantized_matmul.settings import SETTINGS, shape_class, unsupported
from jaxtyping import Array, Float, Int

DTYPES = ("bfloat16", "float16")


class MosaicGpu(PallasKernel[Problem, Call]):
    """Kernel for Hopper GPUs that multiplies quantised matrices."""

    platform = "gpu"
    module = f"{__name__}.kernel"

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Check dtypes, and the multiples that sizes must be."""
        if (reason := unsupported(problem, DTYPES)) is not None:
            return reason
        if problem.has_zero and problem.elements != "int4":
            return f"zero points must be those of int4, not of {problem.elements}"
        if problem.row_bytes % MIN_COLUMNS:
            return f"rows of the matrix must have a multiple of {MIN_COLUMNS} bytes, not {problem.row_bytes}"
        if problem.group_size % UNIT and (UNIT % problem.group_size or problem.group_size < LEAST_GROUP):
            known = f"{UNIT} columns, or of a multiple or a part of them of {LEAST_GROUP} or more"
            return f"groups must be of {known}, not of {problem.group_size}"
        return None

    def launch(self, problem: Problem) -> Call:
        """Choose tile sizes for the target chip."""
        chip = self.target_chip()
        sizes = self.settings.sizes(Sizes, chip.name, shape_class(problem))
        tiles = choose_tiles(problem, sizes, chip.num_cores)
        return Call(problem, tiles, chip.num_cores, self.settings.interpreter)

    def multiply(
        self, problem: Problem, x: Float[Array, "T K"], matrix: Quantized, layer: Int[Array, ""]
    ) -> Float[Array, "T N"]:
        """Pad x to whole tiles and run the kernel."""
        call, T, N = self.launch(problem), problem.num_rows, problem.num_outputs
        x = jnp.pad(x, ((0, call.shape[1] - T), (0, 0)))
        y: Array = self.kernel().multiply(call, x, matrix, layer).sum(axis=0)[:T, :N]
        if problem.is_scaled:
            return y
        return y * scale_floats(jnp.take(matrix.scale, layer, axis=0))


KERNEL = MosaicGpu(SETTINGS)
