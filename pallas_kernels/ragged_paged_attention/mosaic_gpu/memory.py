"""The attention kernel's global and shared memory. See the package."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.kernel_values import Ref, Scalar
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import SCALES, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE
from jaxserve.pallas_kernels.warpgroups import i32


class Inputs(NamedTuple):
    """The attention kernel's arrays in global memory, inputs and outputs."""

    layer: Ref  # [1], layer in the pool
    tiles: Ref  # [tiles, 11], see `WorkPlan`
    workers: Ref  # [workers, 4], see `WorkPlan`
    page_table: Ref  # [table rows, M]
    sink_rows: Ref  # f32[K, rows], sink logit per tile row
    tree_rows: Ref  # [tiles, columns, rows], `visible_nodes` per tile row
    q: Ref  # [padded tokens, Q, key_dim]
    kv_pages: Ref  # [L, N, P, vectors, key_dim]
    scales: Ref  # [L, N, P, vectors], only for a quantised pool
    out: Ref  # [padded tokens, Q, value_dim]
    values: Ref  # f32[workers, 2, column_warpgroups, rows, columns], unmerged splits, see `Softmax`
    max_score: Ref  # f32[workers, 2, column_warpgroups, rows]
    denominator: Ref  # f32[workers, 2, column_warpgroups, rows]


class Shared(NamedTuple):
    """A thread block's shared memory and barriers, divided between its workers; a stage is a ring slot.

    Barriers `x_ready` complete when `x` is loaded, `x_free` when all computing warpgroups no longer need it.
    """

    q: Ref  # [workers, rows, key_dim]
    k: Ref  # [workers * stages, block_kv, key_dim]
    v: Ref  # [workers * stages, column_warpgroups, block_kv, warpgroup_columns]; None if the keys have them
    scales: Ref  # [workers * stages, block_kv, SCALES], scales for the head and its neighbours
    scaled_k: Ref  # [workers, block_kv, H], a block of keys times their scales
    scaled_v: Ref  # [workers, block_kv, H]
    out: Ref  # [workers * warpgroups, out_shift + 64, out_columns], 64 rows on their way to the output, and the shift
    q_ready: Ref
    q_free: Ref
    k_ready: Ref
    k_free: Ref
    v_ready: Ref
    v_free: Ref
    meeting: Ref  # barrier per worker: all computing warpgroups have arrived
    # Softmax weights, [workers * warpgroups, 64, block_kv]; only for the interpreter: it has no wgmma from registers.
    p: Ref


def shared_memory(config: KernelConfig, tiling: Tiling) -> Shared:
    """Return shapes, dtypes and layouts for the shared memory and barriers to allocate per thread block."""
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
        out=plgpu.SMEM((warpgroups, config.out_shift + WARPGROUP_ROWS, config.out_columns), config.dtype),
        q_ready=barriers(config.group, workers),
        q_free=barriers(tiling.warpgroups, workers),
        k_ready=barriers(pages, stages),
        k_free=barriers(tiling.warpgroups, stages),
        v_ready=barriers(pages * (tiling.column_warpgroups + config.is_quantized), stages),
        v_free=barriers(tiling.warpgroups, stages),
        meeting=barriers(tiling.warpgroups, workers),
        p=None if config.interpret is None else matrix(warpgroups, WARPGROUP_ROWS, block_kv),
    )


def _layout(config: KernelConfig, swizzle: int) -> tuple[Any, Any]:
    """Return the shared-memory layout for matrices that TMA writes and wgmma reads, with `swizzle` bytes per line."""
    return plgpu.TilingTransform((8, config.tile_columns)), plgpu.SwizzleTransform(swizzle)


def first_scale(head: Scalar) -> Scalar:
    """Return the index of the first scale that TMA fetches for KV head `head`, a multiple of `SCALES`.

    It fetches `SCALES` of a token's scales. Each head has two consecutive scales, for its key and its value.
    """
    return lax.div(2 * head, i32(SCALES)) * SCALES
