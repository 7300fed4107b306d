"""Grouped matmul kernel for Hopper GPUs.

Each group's rows are cut into tiles that start with the group, or up to seven rows before it: TMA copies rows in eights
to the layout that wgmma reads (`visits.py`). A work item is one output tile: a row tile times a tile of the group's
matrix `[N, K]`. All items with the same row tile run side by side and fetch its rows from main memory once.

TMA copies x and matrix blocks as they are stored, and one or two warpgroups multiply 64 rows each by wgmma with float32
sums. A row tile may overlap other groups. Their rows are multiplied too, but only the tile's own group is stored. Empty
groups cost no work, and their matrices are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels.grouped_matmul.launch import Launch
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.float_matmul import ROW_ALIGNMENT
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.pipeline import ThreadBlock, persistent_kernel, tiled
from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.grouped_matmul.visits import plan_visits
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.warpgroups import i32, store

MATRIX, BASE, BEGIN, END = range(4)  # columns of the visit table, named as in `Visits`
LOADING_REGISTERS = 72  # registers per loading thread if there are three warpgroups; two have enough anyway


class Shared(NamedTuple):
    """A thread block's shared memory and barriers; a stage is a ring slot for one column block."""

    x: Ref  # [stages, rows, columns], x blocks
    weight: Ref  # [stages, outputs, columns], matrix blocks
    out: Ref  # [warpgroups, 64, outputs], results on their way to the output
    ready: Ref  # barrier per stage: both blocks are loaded
    free: Ref  # barrier per stage: all warpgroups have multiplied the blocks


def multiply(
    launch: Launch[Problem],
    x: Float[Array, "padded K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "M N"]:
    """Multiply each row of x by its group's matrix in one kernel launch; rows after the last group are undefined.

    Args:
        launch: static parameters.
        x: rows sorted by group, padded to a multiple of eight and at least one tile.
        matrices: all layers' matrices.
        group_sizes: rows per group.
        layer: layer whose matrices are used.
    """
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
    """Grouped matmul in one thread block.

    A visit is the matmul of one x row tile with one group's matrix (see `Visits`). It has as many work items as the
    matrix has tiles of rows: each computes one output tile.

    Args:
        launch: static parameters.
        num_visits: number of visits without padding, `[1]`.
        visits: visit table, `[visits, 4]`. Its columns MATRIX, BASE, BEGIN and END are the fields of `Visits`.
        x: rows in global memory, `[padded, K]`.
        matrices: matrices in global memory, `[layers * G, N, K]`.
        out: output in global memory, `[M, N]`.
        shared: shared memory.
    """

    def __init__(
        self, launch: Launch[Problem], num_visits: Ref, visits: Ref, x: Ref, matrices: Ref, out: Ref, shared: Shared
    ) -> None:
        """Take the references to a grouped matmul's operands and output in global memory; see the class."""
        super().__init__(launch, num_visits[0] * launch.num_output_tiles, shared)
        self.visits, self.x, self.matrices, self.out = visits, x, matrices, out

    def copier(self, number: Scalar) -> Callable[[Scalar, Scalar], None]:
        """Return a function `copy(block, slot)`: it loads column block `block` of work item `number` to a ring slot."""
        shared, tiles = self.shared, self.launch.tiles
        visit, first_output = self._visit(number)
        rows = self.x.at[pl.ds(self.visits[visit, BASE], tiles.rows)]
        matrix = self.matrices.at[self.visits[visit, MATRIX], pl.ds(first_output, tiles.outputs)]

        def copy(block: Scalar, slot: Scalar) -> None:
            columns = pl.ds(block * tiles.columns, tiles.columns)
            plgpu.copy_gmem_to_smem(rows.at[:, columns], shared.x.at[slot], shared.ready.at[slot])
            plgpu.copy_gmem_to_smem(matrix.at[:, columns], shared.weight.at[slot], shared.ready.at[slot])

        return copy

    def compute_item(self, number: Scalar, warpgroup: Scalar) -> None:
        """Compute and store 64 rows in work item `number`'s output tile, those for computing warpgroup `warpgroup`."""
        visit, first_output = self._visit(number)
        shape = (WARPGROUP_ROWS, self.launch.tiles.outputs)
        y = pl.run_scoped(functools.partial(self._multiply, warpgroup, number), plgpu.ACC(shape, jnp.float32))
        self._store(y, visit, first_output, warpgroup)

    def _visit(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """Return the index of work item `number`'s visit, and the first matrix row for the item's output tile."""
        item, num_tiles = self.item(number), i32(self.launch.num_output_tiles)
        return lax.div(item, num_tiles), lax.rem(item, num_tiles) * self.launch.tiles.outputs

    def _multiply(self, warpgroup: Scalar, number: Scalar, sums: Ref) -> Registers:
        """Multiply computing warpgroup `warpgroup`'s 64 x rows by work item `number`'s matrix rows.

        A block's ring slot is released when the next block's wgmma has started: the previous one is complete by then.

        Args:
            warpgroup: computing warpgroup index.
            number: the item's index in this thread block.
            sums: accumulator in registers, float32 zeros `[64, outputs]`.

        Returns:
            The sums over all columns, `[64, outputs]`.
        """
        shared, num_blocks = self.shared, self.launch.num_blocks
        rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        @pl.loop(0, num_blocks)
        def add(block: Scalar) -> None:
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

    def _store(self, y: Registers, visit: Scalar, first_output: Scalar, warpgroup: Scalar) -> None:
        """Write the rows of `y` that belong to the visit's group to the output, through shared memory.

        Copies have static sizes: one copy per power of two adds up to any row count.

        Args:
            y: results, `[64, outputs]`, of computing warpgroup `warpgroup`.
            visit: visit index.
            first_output: first output column to write: the first matrix row for the output tile.
            warpgroup: computing warpgroup index.
        """
        out = self.shared.out.at[warpgroup]
        store(out, y.astype(out.dtype))
        plgpu.commit_smem()
        base, columns = self.visits[visit, BASE] + warpgroup * WARPGROUP_ROWS, pl.ds(first_output, out.shape[1])
        done = jnp.clip(self.visits[visit, BEGIN] - base, 0, WARPGROUP_ROWS)
        num_rows = jnp.clip(self.visits[visit, END] - base, 0, WARPGROUP_ROWS) - done
        size = WARPGROUP_ROWS
        while size:

            @pl.when((num_rows & size) != 0)
            def copy(done: Scalar = done, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(out.at[pl.ds(done, size)], self.out.at[pl.ds(base + done, size), columns])

            done, size = done + (num_rows & size), size // 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
