"""The kernel: one visit of a tile of rows by a group after the other, for each block of outputs. See the package."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu.plan import Call
from jaxserve.pallas_kernels.grouped_matmul.visits import plan_visits
from jaxtyping import Array, Float, Int, Int32


def multiply(
    call: Call,
    x: Float[Array, "padded K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "padded N"]:
    """Return the products; rows of no group are undefined."""
    tiles, problem = call.tiles, call.problem
    visits = plan_visits(group_sizes, layer * problem.num_groups, problem.num_rows, tiles.rows, tiles.rows)
    scalars = (visits.matrix, visits.base, visits.begin, visits.end)
    # The innermost index changes fastest. A block is copied only if its place differs from that of the step before.
    in_specs = [
        pl.BlockSpec((tiles.rows, tiles.inputs), lambda n, v, k, matrix, base, *_: (lax.div(base[v], tiles.rows), k)),
        pl.BlockSpec((None, tiles.outputs, tiles.inputs), lambda n, v, k, matrix, *_: (matrix[v], n, k)),
    ]
    place = pl.BlockSpec(
        (tiles.rows, tiles.outputs), lambda n, v, k, matrix, base, *_: (lax.div(base[v], tiles.rows), n)
    )
    sums = [] if call.input_tiles == 1 else [pltpu.VMEM((tiles.rows, tiles.outputs), jnp.float32)]
    grid = (call.output_tiles, jnp.maximum(visits.num_visits, 1), call.input_tiles)
    interpret = {} if call.interpret is None else {"interpret": call.interpret}
    y: Array = pl.pallas_call(
        functools.partial(_kernel, call),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], problem.num_outputs), problem.kernel_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=grid, in_specs=in_specs, out_specs=place, scratch_shapes=sums
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=2 * call.vmem_bytes
        ),
        cost_estimate=_cost(call),
        name="grouped_matmul",
        **interpret,
    )(*scalars, x, matrices.reshape(-1, problem.num_outputs, problem.num_inputs))
    return y


def _cost(call: Call) -> pl.CostEstimate:
    """Return the cost if as many groups as possible have rows, by which ahead-of-time programs are compared."""
    problem = call.problem
    itemsize, M, N, K = problem.matrix_dtype.itemsize, problem.num_rows, problem.num_outputs, problem.num_inputs
    matrix_bytes = min(problem.num_groups, M) * N * K * itemsize
    return pl.CostEstimate(
        flops=2 * M * N * K,
        transcendentals=0,
        bytes_accessed=matrix_bytes + call.output_tiles * M * K * itemsize + M * N * problem.kernel_dtype.itemsize,
    )


def _kernel(
    call: Call, matrix: Any, base: Any, begin: Any, end: Any, x: Any, weight: Any, out: Any, *scratch: Any
) -> None:
    del matrix
    visit, block = pl.program_id(1), pl.program_id(2)
    product = lax.dot_general(
        x[...],
        weight[...],
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if call.problem.matrix_dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )

    def store(y: Any) -> None:
        row = base[visit] + lax.broadcasted_iota(jnp.int32, y.shape, 0)
        is_own = (row >= begin[visit]) & (row < end[visit])
        out[...] = jnp.where(is_own, y.astype(out.dtype), out[...])

    if not scratch:
        store(product)
        return
    (sums,) = scratch

    @pl.when(block == 0)
    def start() -> None:
        sums[...] = product

    @pl.when(block > 0)
    def add() -> None:
        sums[...] += product

    @pl.when(block == call.input_tiles - 1)
    def finish() -> None:
        store(sums[...])
