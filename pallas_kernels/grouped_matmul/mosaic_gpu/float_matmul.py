"""Grouped float matmul on Hopper GPUs: supported problems and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels.grouped_matmul.launch import MatmulKernel, Tiles
from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.target import TargetChip

DTYPES = ("bfloat16", "float16")
MIN_INPUTS = 32  # columns per shared-memory line
MIN_OUTPUTS = 64  # matrix rows in the smallest tile
ROW_ALIGNMENT = 8  # TMA copies x rows to shared memory in eights
MAX_WARPGROUPS = 2  # computing warpgroups per thread block


@dataclass(frozen=True)
class TileLimits:
    """Tile size limits of the Hopper kernel for float matrices; tuned values override the defaults.

    Attributes:
        warpgroups: maximum computing warpgroups, with 64 x rows each.
        outputs: maximum matrix rows per tile.
        stages: maximum column blocks in the shared-memory ring.
    """

    warpgroups: int = MAX_WARPGROUPS
    outputs: int = 128
    stages: int = 8

    def __post_init__(self) -> None:
        if self.stages < 2:  # a block is freed when the next wgmma has started
            raise ValueError(f"stages must be at least 2, got {self.stages}")


class FloatMatmul(MatmulKernel[Problem]):
    """Backend for grouped matmuls with float matrices on Hopper GPUs."""

    platform = "gpu"
    module = f"{__package__}.float_kernel"
    limits = TileLimits

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Return why the kernel cannot run the problem on any Hopper GPU: a dtype or matrix size; None if it can."""
        return problem.unsupported_reason(DTYPES, outputs=MIN_OUTPUTS, inputs=MIN_INPUTS)

    def choose_tiles(self, problem: Problem, limits: TileLimits, chip: TargetChip) -> Tiles:
        """Return tiles with 64 or 128 x rows, whichever suits the mean group size, and as many ring stages as shared
        memory and `limits` allow.
        """
        warpgroups = 1 if problem.mean_rows <= WARPGROUP_ROWS else min(limits.warpgroups, MAX_WARPGROUPS)
        outputs = next(size for size in (256, 128, 64) if size <= limits.outputs and problem.num_outputs % size == 0)
        columns = 64 if problem.num_inputs % 64 == 0 else 32
        rows = warpgroups * WARPGROUP_ROWS
        stage_bytes = (rows + outputs) * columns * problem.matrix_dtype.itemsize
        free_bytes = chip.memory_bytes - rows * outputs * problem.kernel_dtype.itemsize
        stages = min(limits.stages, free_bytes // stage_bytes)
        return Tiles(rows, outputs, columns, warpgroups=warpgroups, stages=stages)

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
        launch, M = self.launch(problem), problem.num_rows
        x = jnp.pad(x, ((0, max(-M % ROW_ALIGNMENT, launch.tiles.rows - M)), (0, 0)))
        y: Array = self.kernel().multiply(launch, x, matrices, group_sizes, layer)
        return y


KERNEL = FloatMatmul()
