"""Shared memory of the kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.quantized_matmul.mosaic_gpu.plan import UNIT, Call


class Shared(NamedTuple):
    """Shared memory and barriers of a thread block."""

    x: Any  # [stages, parts, rows, columns]
    elements: Any  # [stages, outputs, columns]
    scale: Any  # [stages, parts, groups, outputs]
    offset: Any  # [stages, parts, groups, outputs], zero points or minima
    weight: Any  # [warpgroups, 64, 64], from where the interpreter multiplies what is in registers on a GPU
    ready: Any
    free: Any


def shared_memory(call: Call) -> Shared:
    """Return what a thread block allocates."""
    tiles, problem = call.tiles, call.problem
    stages, parts, dtype = tiles.stages, problem.per_byte, problem.dtype

    def lines(shape: tuple[int, ...], dtype: jnp.dtype, width: int) -> Any:
        transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * dtype.itemsize)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    unused = plgpu.SMEM((8,), jnp.float32)
    grid = (stages, parts, problem.block_groups(tiles.columns), tiles.item_outputs)
    has_offset, offset_dtype = bool(problem.offset_bytes), jnp.uint8 if problem.has_zero else jnp.float32
    weight = lines((tiles.warpgroups, WARPGROUP_ROWS, UNIT), dtype, UNIT)
    return Shared(
        x=lines((stages, parts, tiles.rows, tiles.columns), dtype, UNIT),
        elements=lines((stages, tiles.item_outputs, tiles.columns), call.element_dtype, tiles.columns),
        scale=plgpu.SMEM(grid, problem.scale_dtype) if problem.is_scaled else unused,
        offset=plgpu.SMEM(grid, offset_dtype) if has_offset else unused,
        weight=unused if call.interpret is None else weight,
        ready=plgpu.Barrier(num_arrivals=1 + parts * (1 + problem.is_scaled + has_offset), num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=stages),
    )
