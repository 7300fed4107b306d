"""The attention kernel for Hopper GPUs. See the package."""

from __future__ import annotations

import functools

from jaxserve.pallas_kernels.kernel_values import Ref
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import launches
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.computing_warpgroup import ComputingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.loading_warpgroup import LoadingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared, shared_memory
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import KernelConfig, Tiling
from jaxserve.pallas_kernels.warpgroups import divide

# Registers per loading thread, by the number of warpgroups; two warpgroups always have enough.
LOADING_REGISTERS = {3: 72, 4: 64}
WIDE_LOADING_REGISTERS = {3: 40}  # used if the sums for many columns fill most registers


def _attend_kernel(config: KernelConfig, tiling: Tiling, *refs: Ref) -> None:
    """Run one warpgroup of a thread block: each worker has a loading warpgroup and one or more computing ones.

    Args:
        config: static parameters.
        tiling: tile sizes.
        *refs: the fields of `Inputs`, then of `Shared`.
    """
    inputs, shared = Inputs(*refs[: len(Inputs._fields)]), Shared(*refs[len(Inputs._fields) :])
    num_computing = tiling.workers * tiling.warpgroups
    by_warpgroups = WIDE_LOADING_REGISTERS if config.is_wide else LOADING_REGISTERS
    divide(
        lambda worker: LoadingWarpgroup(config, tiling, inputs, shared, worker).run(),
        lambda warpgroup: ComputingWarpgroup(config, tiling, inputs, shared, warpgroup).run(),
        num_computing=num_computing,
        num_loading=tiling.workers,
        loading_registers=by_warpgroups.get(num_computing + tiling.workers),
    )


attend = functools.partial(
    launches.attend,
    launches.Kernel(_attend_kernel, shared_memory, lambda tiling: tiling.workers * (tiling.warpgroups + 1)),
)
