"""Matmul kernel with quantised matrices for TPUs.

The Pallas grid has a step for each pair of a row tile and a matrix block. The pipeline copies the next matrix block
ahead, as it is stored in the array with all layers; the layer index is a prefetched scalar. A row tile is copied once,
with all columns, and stays in VMEM while the matrix passes. If blocks do not divide the matrix rows, the last block is
padded with undefined rows, whose results are not stored.

In VMEM a loop dequantises some columns at a time and multiplies them in x's dtype with float32 sums. A group's scales
lie along the lanes, `[groups, N]`, as XLA would lay out other shapes too. They are repeated for each column in the
group and transposed, so that each element meets its scale.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.elements import INT4_ZERO, e2m1_floats, scale_floats
from jaxserve.pallas_kernels.grouped_matmul.launch import Launch
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu.pipeline import pipelined_kernel
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu.quantized_matmul import (
    SCALE_SUBLANES,
    loop_columns,
    num_narrow_grids,
)
from jaxserve.pallas_kernels.grouped_matmul.problem import QuantizedProblem, QuantizedStack
from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar
from jaxserve.pallas_kernels.tpu import LANES


def multiply(
    launch: Launch[QuantizedProblem], x: Float[Array, "padded K"], matrix: QuantizedStack, layer: Int[Array, ""]
) -> Float[Array, "padded N"]:
    """Multiply x by one layer's transposed quantised matrix, scales included, in one kernel launch.

    Args:
        launch: static parameters.
        x: rows, padded to whole memory tiles.
        matrix: quantised matrices for all layers.
        layer: layer whose matrix is used.
    """
    tiles, problem = launch.tiles, launch.problem
    groups = (None, problem.num_scale_groups, tiles.outputs)
    in_specs = [
        pl.BlockSpec((tiles.rows, problem.num_inputs), lambda t, n, _: (t, 0)),
        pl.BlockSpec((None, tiles.outputs, problem.stored_columns), lambda t, n, layer: (layer[0], n, 0)),
        pl.BlockSpec(groups, lambda t, n, layer: (layer[0], 0, n)),
    ]
    arrays = [matrix.elements, matrix.scale]
    if matrix.offset is not None:
        in_specs.append(in_specs[-1])
        arrays.append(matrix.offset)
    scratch = [pltpu.VMEM((tiles.rows, tiles.outputs), jnp.float32)]
    scratch += [pltpu.VMEM(groups[1:], jnp.float32) for _ in range(num_narrow_grids(problem))]
    if launch.interpret is None:  # XLA would copy small stacks to VMEM, all layers included
        arrays = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays]
    row_bytes = problem.num_inputs * problem.dtype.itemsize + problem.num_outputs * problem.result_dtype.itemsize
    run = pipelined_kernel(
        launch,
        _kernel,
        pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(launch.num_row_tiles, launch.num_output_tiles),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((tiles.rows, tiles.outputs), lambda t, n, _: (t, n)),
            scratch_shapes=scratch,
        ),
        jax.ShapeDtypeStruct((x.shape[0], problem.num_outputs), problem.result_dtype),
        bytes_accessed=launch.num_row_tiles * problem.matrix_bytes + problem.num_rows * row_bytes,
        name="quantized_matmul",
    )
    return run(layer[None], x, *arrays)


def _kernel(launch: Launch[QuantizedProblem], layer: Ref, x: Ref, elements: Ref, scale: Ref, *rest: Ref) -> None:
    """Multiply a tile of x rows by a tile of matrix rows, in grid step (x tile, matrix tile).

    Args:
        launch: static parameters.
        layer: scalar in SMEM, `[1]`; used only to choose the blocks.
        x: x rows in VMEM with all columns, `[rows, K]`.
        elements: stored matrix rows in VMEM, `[outputs, bytes]`.
        scale: scales in VMEM, `[groups, outputs]`.
        *rest: references in VMEM: zero points or minima, if there are any, shaped like `scale`; the output tile,
            `[rows, outputs]`; float32 sums shaped like it; and float32 copies of narrow scales and offsets.
    """
    del layer
    problem, tiles = launch.problem, launch.tiles
    offset, (out, sums, *scratch) = (rest[0], rest[1:]) if problem.offset_bytes else (None, rest)
    sums[...] = jnp.zeros_like(sums)

    def widened(grid: Ref) -> Ref:
        """Return VMEM with `grid`'s scales or offsets in float32: narrower dtypes can only be read in aligned rows."""
        if grid is None or grid.dtype == jnp.float32:
            return grid
        values, copy = grid[...], scratch.pop()
        copy[...] = values.astype(jnp.int32).astype(jnp.float32) if grid.dtype == jnp.uint8 else scale_floats(values)
        return copy

    scale, offset = widened(scale), widened(offset)
    span = _span_columns(launch)

    @pl.loop(0, tiles.outputs // LANES)
    def multiply_outputs(block: Scalar) -> None:
        outputs = pl.ds(pl.multiple_of(block * LANES, LANES), LANES)

        @pl.loop(0, problem.stored_columns // span)
        def multiply_span(index: Scalar) -> None:
            for half, start in itertools.product(range(problem.per_byte), range(0, span, tiles.columns)):
                weight = _floats(problem, elements[outputs, pl.ds(_at(index, span, start), tiles.columns)], half)
                if problem.has_zero:
                    weight -= _element_values(launch, offset, half, index, start, outputs)
                if problem.scales_elements:
                    weight *= _element_values(launch, scale, half, index, start, outputs)
                if problem.has_minimum:
                    weight -= _element_values(launch, offset, half, index, start, outputs)
                sums[:, outputs] += lax.dot_general(
                    x[:, pl.ds(_at(index, span, half * problem.stored_columns + start), tiles.columns)],
                    weight.astype(x.dtype),
                    (((1,), (1,)), ((), ())),
                    precision=lax.Precision.DEFAULT,
                    preferred_element_type=jnp.float32,
                )

    y = sums[...]
    out[...] = (y if problem.scales_elements else y * scale[...]).astype(out.dtype)


def _span_columns(launch: Launch[QuantizedProblem]) -> int:
    """Return how many stored matrix columns one iteration of the kernel's inner loop dequantises and multiplies."""
    return launch.tiles.columns if launch.problem.num_scale_groups == 1 else loop_columns(launch.problem)


def _floats(problem: QuantizedProblem, stored: Registers, half: int) -> Registers:
    """Convert stored elements to float32, before zero points, minima and scales are applied.

    The default zero point is subtracted from int4 elements that have neither zero points nor minima.

    Args:
        problem: static parameters.
        stored: stored bytes, `[outputs, columns]`.
        half: 0 for the elements in the low bits of each byte, 1 for the high bits; 0 if bytes have one element.
    """
    if problem.per_byte == 1:
        return stored.astype(jnp.float32)
    codes = stored.astype(jnp.int32)
    codes = codes & 15 if half == 0 else codes >> 4
    if problem.elements == "e2m1":
        return e2m1_floats(codes)
    return (codes if problem.offset_bytes else codes - INT4_ZERO).astype(jnp.float32)


def _element_values(
    launch: Launch[QuantizedProblem], grid: Ref, half: int, index: Scalar, start: int, outputs: Any
) -> Registers:
    """Return the scale or offset of each element in a matrix block, `[128, columns]`.

    The value of each scale group is repeated for all its columns. A block's columns are dequantised together.

    Args:
        launch: static parameters.
        grid: scales, zero points or minima in VMEM, `[groups, outputs]`.
        half: 0 if the columns are in the first half of a matrix row, stored in the low bits of each byte; 1 for the
            second half, in the high bits; 0 if bytes have one element.
        index: iteration of the loop over spans of stored columns.
        start: first stored column of the block, counted in the span.
        outputs: slice of the block's 128 matrix rows.
    """
    problem, columns, size = launch.problem, launch.tiles.columns, launch.problem.group_size
    if _span_columns(launch) == SCALE_SUBLANES * size:  # a span's groups fill one memory tile
        first = start // size
        rows = grid[pl.ds(_at(index, SCALE_SUBLANES, half * problem.stored_columns // size), SCALE_SUBLANES), outputs]
    else:  # all columns are in one span
        first = (half * problem.stored_columns + start) // size
        rows = grid[:, outputs]
    if columns <= size:  # the same for all columns: repeat one tile of lanes
        tile = jnp.broadcast_to(rows[first : first + 1], (LANES, LANES)).T
        return jnp.concatenate([tile] * (columns // LANES), axis=1)
    return jnp.repeat(rows[first : first + columns // size], size, axis=0).T


def _at(index: Scalar, size: int, offset: int) -> Scalar:
    """Return `index * size + offset`, marked as a multiple of the greatest common divisor of `size` and `offset`.

    The compiler only accepts slices whose start is known to be aligned.
    """
    return pl.multiple_of(index * size + offset, math.gcd(size, offset))
