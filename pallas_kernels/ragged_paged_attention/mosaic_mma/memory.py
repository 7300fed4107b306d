"""The kernel's shared memory. See the package."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_mma.tiling import MmaConfig


def shared_memory(config: MmaConfig, tiling: Tiling) -> Shared:
    """Return shapes, dtypes and layouts for the shared memory and barriers to allocate per thread block.

    There are barriers for copies by TMA only: `q_ready`, and `k_ready` for both keys and values.
    """

    def matrix(*shape: int) -> Any:
        transforms = plgpu.TilingTransform((8, config.tile_columns)), plgpu.SwizzleTransform(config.swizzle)
        return plgpu.SMEM(shape, config.dtype, transforms=transforms)

    def barriers(num_arrivals: int, num_barriers: int) -> Any:
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_barriers) if config.has_tma else None

    return Shared(
        q=matrix(1, tiling.rows, config.key_dim),
        k=matrix(tiling.stages, config.block_kv, config.key_dim),
        v=matrix(tiling.stages, 1, config.block_kv, config.value_dim),
        scales=None,
        scaled_k=None,
        scaled_v=None,
        out=plgpu.SMEM((1, WARPGROUP_ROWS, config.out_columns), config.dtype),
        q_ready=barriers(config.group, 1),
        q_free=None,
        k_ready=barriers(config.num_block_copies, tiling.stages),
        k_free=None,
        v_ready=None,
        v_free=None,
        meeting=None,
        p=None,
    )
