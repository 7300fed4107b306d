"""Grouped matmul kernel for TPUs, designed like megablox (Gale et al. 2022, in jax).

The rows are cut into tiles, and each group visits the tiles that contain some of its rows (`visits.py`). The visits are
computed on the device from the group sizes and reach the kernel as prefetched scalars. The pipeline reads from them
which blocks to copy: a row tile, and a block of the group's matrix `[N, K]` as it is stored. A visit stores only its
group's rows; later visits to the same tile, which is still in VMEM, fill in other rows. There is a grid step per visit:
empty groups cost no work, and their matrices are not read.

A group's consecutive visits read its matrix once, unless the matrix columns are cut.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels.grouped_matmul.launch import Launch
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu.pipeline import pipelined_kernel
from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.grouped_matmul.visits import plan_visits
from jaxserve.pallas_kernels.kernel_values import Ref, Registers


def multiply(
    launch: Launch[Problem],
    x: Float[Array, "padded K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "padded N"]:
    """Multiply each row of x by its group's matrix in one kernel launch; rows after the last group are undefined.

    Args:
        launch: static parameters.
        x: rows sorted by group, padded to whole memory tiles.
        matrices: all layers' matrices.
        group_sizes: rows per group.
        layer: layer whose matrices are used.
    """
    tiles, problem = launch.tiles, launch.problem
    visits = plan_visits(group_sizes, layer * problem.num_groups, problem.num_rows, tiles.rows, tiles.rows)
    scalars = (visits.matrix, visits.base, visits.begin, visits.end)
    # The innermost grid index changes fastest. A block is copied only if its index differs from the previous step's.
    in_specs = [
        pl.BlockSpec((tiles.rows, tiles.columns), lambda n, v, k, matrix, base, *_: (lax.div(base[v], tiles.rows), k)),
        pl.BlockSpec((None, tiles.outputs, tiles.columns), lambda n, v, k, matrix, *_: (matrix[v], n, k)),
    ]
    out_specs = pl.BlockSpec(
        (tiles.rows, tiles.outputs), lambda n, v, k, matrix, base, *_: (lax.div(base[v], tiles.rows), n)
    )
    sums = [] if launch.num_blocks == 1 else [pltpu.VMEM((tiles.rows, tiles.outputs), jnp.float32)]
    run = pipelined_kernel(
        launch,
        _kernel,
        pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(launch.num_output_tiles, jnp.maximum(visits.num_visits, 1), launch.num_blocks),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=sums,
        ),
        jax.ShapeDtypeStruct((x.shape[0], problem.num_outputs), problem.kernel_dtype),
        bytes_accessed=_bytes_accessed(launch),
        name="grouped_matmul",
    )
    return run(*scalars, x, matrices.reshape(-1, problem.num_outputs, problem.num_inputs))


def _bytes_accessed(launch: Launch[Problem]) -> int:
    """Estimate the HBM bytes that the kernel reads and writes if it reads each group's matrix once.

    The group sizes are unknown while tracing; at most one group per x row is assumed to have rows.
    """
    problem = launch.problem
    M, N, K = problem.num_rows, problem.num_outputs, problem.num_inputs
    elements = min(problem.num_groups, M) * N * K + launch.num_output_tiles * M * K
    return elements * problem.matrix_dtype.itemsize + M * N * problem.kernel_dtype.itemsize


def _kernel(
    launch: Launch[Problem], matrix: Ref, base: Ref, begin: Ref, end: Ref, x: Ref, weight: Ref, out: Ref, *scratch: Ref
) -> None:
    """Multiply one visit's x rows by one matrix block, in grid step (output tile, visit, column block).

    The last column block's step stores the sums of the rows that belong to the visit's group.

    Args:
        launch: static parameters.
        matrix: scalars in SMEM, as in `Visits`, one per visit; used only to choose the blocks.
        base: first x row in each visit's tile.
        begin: first x row to store for each visit.
        end: end of the x rows to store for each visit.
        x: x block in VMEM, `[rows, columns]`.
        weight: matrix block in VMEM, `[outputs, columns]`.
        out: output tile in VMEM, `[rows, outputs]`.
        *scratch: float32 sums in VMEM, `[rows, outputs]`; none if there is one column block.
    """
    del matrix
    visit, block = pl.program_id(1), pl.program_id(2)
    partial_sums = lax.dot_general(
        x[...],
        weight[...],
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if launch.problem.matrix_dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )

    def store(y: Registers) -> None:
        row = base[visit] + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        is_in_group = (row >= begin[visit]) & (row < end[visit])
        out[...] = jnp.where(is_in_group, y.astype(out.dtype), out[...])

    if not scratch:
        store(partial_sums)
        return
    (sums,) = scratch

    @pl.when(block == 0)
    def start() -> None:
        sums[...] = partial_sums

    @pl.when(block > 0)
    def add() -> None:
        sums[...] += partial_sums

    @pl.when(block == launch.num_blocks - 1)
    def finish() -> None:
        store(sums[...])
