"""Grouped product for Hopper GPUs, in Pallas (Mosaic GPU): the backend of mixtures of experts on NVIDIA GPUs.

The rows of each group are cut into tiles that begin with the group, or up to seven rows before it, as TMA copies rows
to where wgmma reads them in eights (`visits.py`). A tile with a block of the rows of its group's matrix `[N, K]` is a
work item; the persistent thread blocks of all multiprocessors take the items in turn, so that those of one tile run
side by side and fetch its rows from main memory once.

In a thread block one warpgroup feeds a ring of shared memory by TMA, blocks of x and of the matrix as they are stored,
and one or two multiply, 64 rows each, with wgmma and float32 sums. A tile may reach over rows of other groups: these
are multiplied as well, and only the tile's own rows are copied to the output. No work is done for groups without rows,
and their matrices are not read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxserve.pallas_kernels.grouped_matmul.interface import Problem
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.plan import MIN_ROWS, Call, Sizes, choose_tiles
from jaxserve.pallas_kernels.grouped_matmul.settings import SETTINGS, shape_class, unsupported
from jaxserve.pallas_kernels.pallas_kernel import PallasKernel
from jaxtyping import Array, Float, Int, Int32

DTYPES = ("bfloat16", "float16")
MIN_INPUTS, MIN_OUTPUTS = 32, 64  # elements in a line of shared memory, and rows of the smallest block


class MosaicGpu(PallasKernel[Problem, Call]):
    """Grouped matmul kernel for Hopper GPUs."""

    platform = "gpu"
    module = f"{__name__}.kernel"

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Check dtypes, and the multiples that sizes must be."""
        return unsupported(problem, DTYPES, outputs=MIN_OUTPUTS, inputs=MIN_INPUTS)

    def launch(self, problem: Problem) -> Call:
        """Choose tile sizes for the target chip."""
        chip = self.target_chip()
        tiles = choose_tiles(problem, self.settings.sizes(Sizes, chip.name, shape_class(problem)))
        return Call(problem, tiles, chip.num_cores, self.settings.interpreter)

    def multiply(
        self,
        problem: Problem,
        x: Float[Array, "M K"],
        matrices: Float[Array, "layers GN K"],
        group_sizes: Int32[Array, " G"],
        layer: Int[Array, ""],
    ) -> Float[Array, "M N"]:
        """Pad x to whole tiles and run the kernel."""
        call, M = self.launch(problem), problem.num_rows
        # A copy to shared memory has the rows of a tile, in eights.
        x = jnp.pad(x, ((0, max(-M % MIN_ROWS, call.tiles.rows - M)), (0, 0)))
        y: Array = self.kernel().multiply(call, x, matrices, group_sizes, layer)
        return y


KERNEL = MosaicGpu(SETTINGS)
