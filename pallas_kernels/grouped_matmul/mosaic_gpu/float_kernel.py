"""Grouped matmul kernel for Hopper GPUs.

Each group's rows are cut into tiles that start with the group, or up to seven rows before it: TMA copies rows in eights
to the layout that wgmma reads (`visits.py`). A work item is a row tile with a tile of the group's matrix `[N, K]`. All
items with the same row tile run side by side and fetch its rows from main memory once.

TMA copies x and matrix blocks as they are stored, and one or two warpgroups multiply 64 rows each by wgmma with float32
sums. A row tile may overlap other groups. Their rows are multiplied too, but only the tile's own group is stored. Empty
groups cost no work, and their matrices are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels.grouped_matmul.launch import Launch
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.float_matmul import ROW_ALIGNMENT
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.pipeline import ThreadBlock, i32, persistent_kernel, tiled
from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.grouped_matmul.visits import plan_visits
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS

MATRIX, BASE, BEGIN, END = range(4)  # columns of the visits
LOADING_REGISTERS = 72  # registers per loading thread if there are three warpgroups; two have enough anyway


class Shared(NamedTuple):
    """A thread block's shared memory and barriers."""

    x: Any  # [stages, rows, columns]
    weight: Any  # [stages, outputs, columns]
    out: Any  # [warpgroups, 64, outputs], results on their way to the output
    ready: Any
    free: Any


def multiply(
    launch: Launch[Problem],
    x: Float[Array, "padded K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "M N"]:
    """Run the kernel; rows after the last group are undefined."""
    problem, tiles, dtype = launch.problem, launch.tiles, launch.problem.matrix_dtype
    shared = Shared(
        x=tiled((tiles.stages, tiles.rows, tiles.columns), dtype, tiles.columns),
        weight=tiled((tiles.stages, tiles.outputs, tiles.columns), dtype, tiles.columns),
        out=plgpu.SMEM((tiles.warpgroups, WARPGROUP_ROWS, tiles.outputs), problem.kernel_dtype),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
        free=plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
    )
    run = persistent_kernel(
        launch,
        GroupedThreadBlock,
        shared,
        jax.ShapeDtypeStruct((problem.num_rows, problem.num_outputs), problem.kernel_dtype),
        name="grouped_matmul",
        loading_registers=LOADING_REGISTERS if tiles.warpgroups > 1 else None,
    )
    visits = plan_visits(group_sizes, layer * problem.num_groups, problem.num_rows, tiles.rows, ROW_ALIGNMENT)
    columns = jnp.stack([visits.matrix, visits.base, visits.begin, visits.end], axis=1)
    return run(visits.num_visits[None], columns, x, matrices.reshape(-1, problem.num_outputs, problem.num_inputs))


class GroupedThreadBlock(ThreadBlock[Problem]):
    """Thread block with each visit's output tiles as work items."""

    def __init__(
        self, launch: Launch[Problem], num_visits: Any, visits: Any, x: Any, matrices: Any, out: Any, shared: Shared
    ) -> None:
        super().__init__(launch, num_visits[0] * launch.num_output_tiles, shared)
        self.visits, self.x, self.matrices, self.out = visits, x, matrices, out

    def copier(self, number: Any) -> Callable[[Any, Any], None]:
        shared, tiles = self.shared, self.launch.tiles
        visit, first_output = self._visit(number)
        rows = self.x.at[pl.ds(self.visits[visit, BASE], tiles.rows)]
        matrix = self.matrices.at[self.visits[visit, MATRIX], pl.ds(first_output, tiles.outputs)]

        def copy(block: Any, slot: Any) -> None:
            columns = pl.ds(block * tiles.columns, tiles.columns)
            plgpu.copy_gmem_to_smem(rows.at[:, columns], shared.x.at[slot], shared.ready.at[slot])
            plgpu.copy_gmem_to_smem(matrix.at[:, columns], shared.weight.at[slot], shared.ready.at[slot])

        return copy

    def compute_item(self, number: Any, warpgroup: Any) -> None:
        visit, first_output = self._visit(number)
        shape = (WARPGROUP_ROWS, self.launch.tiles.outputs)
        y = pl.run_scoped(functools.partial(self._multiply, warpgroup, number), plgpu.ACC(shape, jnp.float32))
        self._store(y, visit, first_output, warpgroup)

    def _visit(self, number: Any) -> tuple[Any, Any]:
        """Return the visit (row tile with one group) for item `number`, and the first matrix row in its output tile."""
        item, num_tiles = self.item(number), i32(self.launch.num_output_tiles)
        return lax.div(item, num_tiles), lax.rem(item, num_tiles) * self.launch.tiles.outputs

    def _multiply(self, warpgroup: Any, number: Any, sums: Any) -> Any:
        """Return the sums over all columns. A block is freed when the next wgmma has started: it is read by then."""
        shared, num_blocks = self.shared, self.launch.num_blocks
        rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        @pl.loop(0, num_blocks)
        def add(block: Any) -> None:
            slot = self.slot(number, block)
            plgpu.barrier_wait(shared.ready.at[slot])
            plgpu.wgmma(sums, shared.x.at[slot, rows], shared.weight.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when(block > 0)
            def free_previous() -> None:
                plgpu.barrier_arrive(shared.free.at[self.slot(number, block - 1)])

        y = sums[...]  # waits for the last wgmma
        plgpu.barrier_arrive(shared.free.at[self.slot(number, num_blocks - 1)])
        return y

    def _store(self, y: Any, visit: Any, first_output: Any, warpgroup: Any) -> None:
        """Copy the group's rows to the output through shared memory.

        Copies have static sizes: one copy per power of two adds up to any row count.
        """
        out = self.shared.out.at[warpgroup]
        out[...] = y.astype(out.dtype)
        plgpu.commit_smem()
        base, columns = self.visits[visit, BASE] + warpgroup * WARPGROUP_ROWS, pl.ds(first_output, out.shape[1])
        done = jnp.clip(self.visits[visit, BEGIN] - base, 0, WARPGROUP_ROWS)
        num_rows = jnp.clip(self.visits[visit, END] - base, 0, WARPGROUP_ROWS) - done
        size = WARPGROUP_ROWS
        while size:

            @pl.when((num_rows & size) != 0)
            def copy(done: Any = done, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(out.at[pl.ds(done, size)], self.out.at[pl.ds(base + done, size), columns])

            done, size = done + (num_rows & size), size // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
