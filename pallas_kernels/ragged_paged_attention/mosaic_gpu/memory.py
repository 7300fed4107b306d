"""The attention kernel's global and shared memory. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import SCALES, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import i32
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE


class Inputs(NamedTuple):
    """The kernel's arrays in global memory."""

    layer: Any  # [1]
    tiles: Any
    workers: Any
    page_table: Any
    sink_rows: Any
    tree_rows: Any
    q: Any
    kv_pages: Any
    scales: Any  # only for a quantised pool
    out: Any
    values: Any
    max_score: Any
    denominator: Any


class Shared(NamedTuple):
    """Shared memory and barriers for a thread block, divided between its workers."""

    q: Any  # [workers, rows, key_dim]
    k: Any  # [workers * stages, block_kv, key_dim]
    v: Any  # [workers * stages, column_warpgroups, block_kv, warpgroup_columns]; None if the keys have them
    scales: Any  # [workers * stages, block_kv, SCALES], scales for the head and its neighbours
    scaled_k: Any  # [workers, block_kv, H], a block of keys times their scales
    scaled_v: Any
    out: Any  # [workers * warpgroups, out_shift + 64, out_columns]
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    meeting: Any
    p: Any  # softmax weights; only for the interpreter, which has no wgmma from registers


def shared_memory(config: KernelConfig, tiling: Tiling) -> Shared:
    """Return the shared memory and barriers for a thread block."""
    workers, stages, block_kv = tiling.workers, tiling.workers * tiling.stages, config.block_kv
    pages = max(1, block_kv // config.page_size)
    warpgroups = workers * tiling.warpgroups

    def matrix(*shape: int) -> Any:
        return plgpu.SMEM(shape, config.dtype, transforms=_layout(config, config.swizzle))

    def ring(*shape: int) -> Any:
        swizzle = config.tile_columns * config.kv_dtype.itemsize
        return plgpu.SMEM((stages, *shape), config.kv_dtype, transforms=_layout(config, swizzle))

    def barriers(num_arrivals: int, num_barriers: int) -> Any:
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers)

    scaled = matrix(workers, block_kv, config.key_dim) if config.is_quantized else None
    return Shared(
        q=matrix(workers, tiling.rows, config.key_dim),
        k=ring(block_kv, config.key_dim),
        v=None if config.values_in_keys else ring(tiling.column_warpgroups, block_kv, config.warpgroup_columns),
        scales=plgpu.SMEM((stages, block_kv, SCALES), SCALE_DTYPE) if config.is_quantized else None,
        scaled_k=scaled,
        scaled_v=scaled,
        out=_out_type(config, warpgroups),
        q_ready=barriers(config.group, workers),
        q_free=barriers(tiling.warpgroups, workers),
        k_ready=barriers(pages, stages),
        k_free=barriers(tiling.warpgroups, stages),
        v_ready=barriers(pages * (tiling.column_warpgroups + config.is_quantized), stages),
        v_free=barriers(tiling.warpgroups, stages),
        meeting=barriers(tiling.warpgroups, workers),
        p=None if config.interpret is None else matrix(warpgroups, WARPGROUP_ROWS, block_kv),
    )


def _out_type(config: KernelConfig, warpgroups: int) -> Any:
    """Return the buffer for outgoing tiles, larger than a tile so that its rows can be shifted."""
    return plgpu.SMEM((warpgroups, config.out_shift + WARPGROUP_ROWS, config.out_columns), config.dtype)


def _layout(config: KernelConfig, swizzle: int) -> tuple[Any, Any]:
    """Return the shared-memory layout for matrices that wgmma reads."""
    return plgpu.TilingTransform((8, config.tile_columns)), plgpu.SwizzleTransform(swizzle)


def first_scale(head: Any) -> Any:
    """Return where the aligned block of SCALES scales begins that TMA fetches for a KV head.

    Each head has two consecutive scales per token, for its key and its value.
    """
    return lax.div(2 * head, i32(SCALES)) * SCALES
