"""The kernel: a block of x times a block of the matrix, dequantised some columns at a time. See the package."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxserve.pallas_kernels.quantized_matmul.interface import INT4_ZERO, Quantized, e2m1_floats, scale_floats
from jaxserve.pallas_kernels.quantized_matmul.mosaic_tpu.plan import GRID_ROWS, LANES, Call
from jaxtyping import Array, Float, Int


def multiply(
    call: Call, x: Float[Array, "padded K"], matrix: Quantized, layer: Int[Array, ""]
) -> Float[Array, "padded N"]:
    """Return the products."""
    tiles, problem = call.tiles, call.problem
    grid = (None, problem.num_groups, tiles.outputs)
    in_specs = [
        pl.BlockSpec((tiles.rows, problem.num_inputs), lambda t, n, _: (t, 0)),
        pl.BlockSpec((None, tiles.outputs, problem.row_bytes), lambda t, n, layer: (layer[0], n, 0)),
        pl.BlockSpec(grid, lambda t, n, layer: (layer[0], 0, n)),
    ]
    arrays = [matrix.elements, matrix.scale]
    if matrix.offset is not None:
        in_specs.append(in_specs[-1])
        arrays.append(matrix.offset)
    scratch = [pltpu.VMEM((tiles.rows, tiles.outputs), jnp.float32)]
    scratch += [pltpu.VMEM(grid[1:], jnp.float32) for _ in range(call.num_narrow)]
    interpret = {} if call.interpret is None else {"interpret": call.interpret}
    if call.interpret is None:  # XLA would copy small stacks to vector memory, those of all layers
        arrays = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays]
    y: Array = pl.pallas_call(
        functools.partial(_kernel, call),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], problem.num_outputs), problem.result_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(call.row_tiles, call.output_tiles),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((tiles.rows, tiles.outputs), lambda t, n, _: (t, n)),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=2 * call.vmem_bytes
        ),
        cost_estimate=_cost(call),
        name="quantized_matmul",
        **interpret,
    )(layer[None], x, *arrays)
    return y


def _cost(call: Call) -> pl.CostEstimate:
    """Return the cost, by which ahead-of-time programs are compared."""
    problem, T = call.problem, call.problem.num_rows
    row_bytes = problem.num_inputs * problem.dtype.itemsize + problem.num_outputs * problem.result_dtype.itemsize
    return pl.CostEstimate(
        flops=2 * T * problem.num_outputs * problem.num_inputs,
        transcendentals=0,
        bytes_accessed=call.row_tiles * problem.matrix_bytes + T * row_bytes,
    )


def _kernel(call: Call, layer: Any, x: Any, elements: Any, scale: Any, *rest: Any) -> None:
    del layer
    problem, tiles = call.problem, call.tiles
    offset, (out, sums, *scratch) = (rest[0], rest[1:]) if problem.offset_bytes else (None, rest)
    sums[...] = jnp.zeros_like(sums)

    def wide(grid: Any) -> Any:
        """Return a grid of float32: of narrower ones, rows can be read only some at a time."""
        if grid is None or grid.dtype == jnp.float32:
            return grid
        values, copy = grid[...], scratch.pop()
        copy[...] = values.astype(jnp.int32).astype(jnp.float32) if grid.dtype == jnp.uint8 else scale_floats(values)
        return copy

    scale, offset = wide(scale), wide(offset)

    @pl.loop(0, tiles.outputs // LANES)
    def multiply_outputs(block: Any) -> None:
        outputs = pl.ds(pl.multiple_of(block * LANES, LANES), LANES)

        @pl.loop(0, problem.row_bytes // call.turn_columns)
        def take_turn(turn: Any) -> None:
            for part, start in itertools.product(range(problem.per_byte), range(0, call.turn_columns, tiles.columns)):
                begin = _at(turn, call.turn_columns, start)
                weight = _floats(call, elements[outputs, pl.ds(begin, tiles.columns)], part)
                if problem.has_zero:
                    weight -= _spread(call, offset, part, turn, start, outputs)
                if problem.is_scaled:
                    weight *= _spread(call, scale, part, turn, start, outputs)
                if problem.has_minimum:
                    weight -= _spread(call, offset, part, turn, start, outputs)
                sums[:, outputs] += lax.dot_general(
                    x[:, pl.ds(_at(turn, call.turn_columns, part * problem.row_bytes + start), tiles.columns)],
                    weight.astype(x.dtype),
                    (((1,), (1,)), ((), ())),
                    precision=lax.Precision.DEFAULT,
                    preferred_element_type=jnp.float32,
                )

    y = sums[...]
    out[...] = (y if problem.is_scaled else y * scale[...]).astype(out.dtype)


def _floats(call: Call, stored: Any, part: int) -> Any:
    """Return the values of elements, before anything of groups is applied."""
    if call.problem.per_byte == 1:
        return stored.astype(jnp.float32)
    codes = stored.astype(jnp.int32)
    codes = codes & 15 if part == 0 else codes >> 4
    if call.problem.elements == "e2m1":
        return e2m1_floats(codes)
    return (codes if call.problem.offset_bytes else codes - INT4_ZERO).astype(jnp.float32)


def _spread(call: Call, grid: Any, part: int, turn: Any, start: int, outputs: Any) -> Any:
    """Return the value of the grid for each element, [outputs, columns], of the columns from `start` on of a turn."""
    problem, columns, size = call.problem, call.tiles.columns, call.problem.group_size
    if call.is_looped:
        first = start // size
        rows = grid[pl.ds(_at(turn, GRID_ROWS, part * problem.row_bytes // size), GRID_ROWS), outputs]
    else:
        first = (part * problem.row_bytes + start) // size
        rows = grid[:, outputs]
    if columns <= size:  # the same for all columns: one tile of lanes stands for each of them
        tile = jnp.broadcast_to(rows[first : first + 1], (LANES, LANES)).T
        return jnp.concatenate([tile] * (columns // LANES), axis=1)
    return jnp.repeat(rows[first : first + columns // size], size, axis=0).T


def _at(turn: Any, size: int, offset: int) -> Any:
    """Return `turn * size + offset`, whose largest known divisor the compiler is told."""
    return pl.multiple_of(turn * size + offset, math.gcd(size, offset))
