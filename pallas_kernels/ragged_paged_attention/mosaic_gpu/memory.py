"""Global and shared memory of the attention kernel. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import i32
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    SCALES,
    Call,
    Tiles,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE


class Inputs(NamedTuple):
    """Arrays of the kernel in global memory."""

    layer: Any  # [1]
    tiles: Any
    workers: Any
    page_table: Any
    sink_rows: Any
    tree_rows: Any
    q: Any
    kv_pages: Any
    scales: Any  # scales of a quantised pool
    out: Any
    values: Any
    max_score: Any
    denominator: Any


class Shared(NamedTuple):
    """Shared memory and barriers of a thread block; each worker has its own share of all."""

    q: Any  # [workers, rows, key_dim]
    k: Any  # [workers * stages, block_kv, key_dim]
    v: Any  # [workers * stages, column_parts, block_kv, part_columns]; None if the keys have them
    scales: Any  # [workers * stages, block_kv, SCALES], scales of the head's keys and values and of its neighbours'
    scaled_k: Any  # [workers, block_kv, H], block of keys multiplied with their scales
    scaled_v: Any
    out: Any  # [workers * warpgroups, out_shift + 64, out_columns]
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    meeting: Any
    p: Any  # weights of the values; only for the interpreter, which lacks wgmma from registers


def shared_memory(call: Call, tiles: Tiles) -> Shared:
    """Return the shared memory and barriers of a thread block."""
    workers, stages, block_kv = tiles.workers, tiles.workers * tiles.stages, call.block_kv
    pages = max(1, block_kv // call.page_size)
    warpgroups = workers * tiles.warpgroups

    def matrix(*shape: int) -> Any:
        return plgpu.SMEM(shape, call.dtype, transforms=_layout(call, call.swizzle))

    def ring(*shape: int) -> Any:
        swizzle = call.tile_columns * call.kv_dtype.itemsize
        return plgpu.SMEM((stages, *shape), call.kv_dtype, transforms=_layout(call, swizzle))

    def barriers(num_arrivals: int, num_barriers: int) -> Any:
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    scaled = matrix(workers, block_kv, call.key_dim) if call.is_quantized else None
    return Shared(
        q=matrix(workers, tiles.rows, call.key_dim),
        k=ring(block_kv, call.key_dim),
        v=None if call.values_in_keys else ring(tiles.column_parts, block_kv, call.part_columns),
        scales=plgpu.SMEM((stages, block_kv, SCALES), SCALE_DTYPE) if call.is_quantized else None,
        scaled_k=scaled,
        scaled_v=scaled,
        out=_out_type(call, warpgroups),
        q_ready=barriers(call.group, workers),
        q_free=barriers(tiles.warpgroups, workers),
        k_ready=barriers(pages, stages),
        k_free=barriers(tiles.warpgroups, stages),
        v_ready=barriers(pages * (tiles.column_parts + call.is_quantized), stages),
        v_free=barriers(tiles.warpgroups, stages),
        meeting=barriers(tiles.warpgroups, workers),
        p=None if call.interpret is None else matrix(warpgroups, WARPGROUP_ROWS, block_kv),
    )


def _out_type(call: Call, warpgroups: int) -> Any:
    """Return the buffer where output waits to be stored, with room to shift a tile's rows."""
    return plgpu.SMEM((warpgroups, call.out_shift + WARPGROUP_ROWS, call.out_columns), call.dtype)


def _layout(call: Call, swizzle: int) -> tuple[Any, Any]:
    """Return the layout of matrices in shared memory that wgmma reads."""
    return plgpu.TilingTransform((8, call.tile_columns)), plgpu.SwizzleTransform(swizzle)


def first_scale(head: Any) -> Any:
    """Return the first of the scales that are fetched together with a head's own."""
    return lax.div(2 * head, i32(SCALES)) * SCALES
