"""Grouped product for TPUs, in Pallas (Mosaic): the backend of mixtures of experts on TPUs.

The design is that of megablox (Gale et al. 2022, in jax): the rows are cut into tiles, and a tile is visited once by
each group that has rows in it (`visits.py`). The plan is computed on the device, from the sizes of groups, and reaches
the kernel as prefetched scalars, from which the pipeline takes the blocks that it copies ahead: a tile of rows, and a
block of the matrix `[N, K]` of its group as it is stored. A visit stores only the rows of its group, so the next ones
of the same tile, which is still in vector memory, fill in theirs. The number of visits is that of the grid: no work is
done for groups without rows, and their matrices are not read.

A matrix is read once by all visits of its group to tiles that follow each other, unless its columns are cut
(`plan.py`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxserve.pallas_kernels.grouped_matmul.interface import Problem
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu.plan import LANES, Call, Sizes, choose_tiles, sublanes
from jaxserve.pallas_kernels.grouped_matmul.settings import SETTINGS, shape_class, unsupported
from jaxserve.pallas_kernels.pallas_kernel import PallasKernel
from jaxtyping import Array, Float, Int, Int32

DTYPES = ("bfloat16", "float32")


class MosaicTpu(PallasKernel[Problem, Call]):
    """Grouped matmul kernel for TPUs; matmuls of float32 are exact float32."""

    platform = "tpu"
    module = f"{__name__}.kernel"

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Check dtypes, and the multiples that sizes must be."""
        # XLA lays out matrices of other columns transposed, and would copy those of all layers, not only of one.
        return unsupported(problem, DTYPES, outputs=sublanes(problem.matrix_dtype), inputs=LANES)

    def launch(self, problem: Problem) -> Call:
        """Choose tile sizes for the target chip."""
        chip = self.target_chip()
        sizes = self.settings.sizes(Sizes, chip.name, shape_class(problem))
        tiles = choose_tiles(problem, sizes, chip.memory_bytes)
        return Call(problem, tiles, chip.memory_bytes, self.settings.interpreter)

    def multiply(
        self,
        problem: Problem,
        x: Float[Array, "M K"],
        matrices: Float[Array, "layers GN K"],
        group_sizes: Int32[Array, " G"],
        layer: Int[Array, ""],
    ) -> Float[Array, "M N"]:
        """Pad x to whole tiles and run the kernel."""
        x = jnp.pad(x, ((0, -problem.num_rows % sublanes(x.dtype)), (0, 0)))
        y: Array = self.kernel().multiply(self.launch(problem), x, matrices, group_sizes, layer)
        return y[: problem.num_rows]


KERNEL = MosaicTpu(SETTINGS)
