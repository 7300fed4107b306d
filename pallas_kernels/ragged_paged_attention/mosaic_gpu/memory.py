"""Global and shared memory of the attention kernel. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import i32
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    BLOCK_KV,
    MIN_TILE_TOKENS,
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

    q: Any  # [workers, rows, H]
    k: Any  # [workers * stages, BLOCK_KV, H]
    v: Any  # [workers * stages, column_parts, BLOCK_KV, H / column_parts]
    scales: Any  # [workers * stages, BLOCK_KV, SCALES], scales of the head's keys and values and of its neighbours'
    scaled_k: Any  # [workers, BLOCK_KV, H], block of keys multiplied with their scales
    scaled_v: Any
    out: Any  # [workers * warpgroups, 8 + 64, H / column_parts]
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
    workers, stages, H = tiles.workers, tiles.workers * tiles.stages, call.head_dim
    pages, columns = max(1, BLOCK_KV // call.page_size), H // tiles.column_parts
    warpgroups = workers * tiles.warpgroups

    def matrix(*shape: int) -> Any:
        return plgpu.SMEM(shape, call.dtype, transforms=_layout(call, call.swizzle))

    def ring(*shape: int) -> Any:
        swizzle = call.tile_columns * call.kv_dtype.itemsize
        return plgpu.SMEM((stages, *shape), call.kv_dtype, transforms=_layout(call, swizzle))

    def barriers(num_arrivals: int, num_barriers: int) -> Any:
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    unused = plgpu.SMEM((8,), jnp.int32)
    scaled = matrix(workers, BLOCK_KV, H) if call.is_quantized else unused
    return Shared(
        q=matrix(workers, tiles.rows, H),
        k=ring(BLOCK_KV, H),
        v=ring(tiles.column_parts, BLOCK_KV, columns),
        scales=plgpu.SMEM((stages, BLOCK_KV, SCALES), SCALE_DTYPE) if call.is_quantized else unused,
        scaled_k=scaled,
        scaled_v=scaled,
        out=_out_type(call, tiles, warpgroups),
        q_ready=barriers(call.group, workers),
        q_free=barriers(tiles.warpgroups, workers),
        k_ready=barriers(pages, stages),
        k_free=barriers(tiles.warpgroups, stages),
        v_ready=barriers(pages * (tiles.column_parts + call.is_quantized), stages),
        v_free=barriers(tiles.warpgroups, stages),
        meeting=barriers(tiles.warpgroups, workers),
        p=unused if call.interpret is None else matrix(warpgroups, WARPGROUP_ROWS, BLOCK_KV),
    )


def _out_type(call: Call, tiles: Tiles, warpgroups: int) -> Any:
    """Return the buffer where output waits to be stored, with room to shift a tile's rows."""
    shape = (warpgroups, MIN_TILE_TOKENS + WARPGROUP_ROWS, call.head_dim // tiles.column_parts)
    return plgpu.SMEM(shape, call.dtype)


def _layout(call: Call, swizzle: int) -> tuple[Any, Any]:
    """Return the layout of matrices in shared memory that wgmma reads."""
    return plgpu.TilingTransform((8, call.tile_columns)), plgpu.SwizzleTransform(swizzle)


def first_scale(head: Any) -> Any:
    """Return the first of the scales that are fetched together with a head's own."""
    return lax.div(2 * head, i32(SCALES)) * SCALES
