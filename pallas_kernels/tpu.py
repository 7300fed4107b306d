"""Properties of the target TPU that Pallas kernels depend on."""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.target import TargetChip

LANES = 128  # elements per row of a memory tile: XLA and Mosaic store arrays in tiles of some rows by 128 elements
INTERPRETED = TargetChip("interpreter", num_cores=1, memory_bytes=16 * 2**20)


def facts() -> Any:
    """Return jax's description of the target TPU (a `TpuInfo`), such as its VMEM bytes and bandwidth per core.

    Raises:
        ValueError: jax does not know the chip.
    """
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415 (importing Pallas takes a third of a second)

    return pltpu.get_tpu_info()


def target_chip() -> TargetChip:
    """Return the target TPU's name, number of cores, and the VMEM bytes that a kernel may use: a quarter.

    The compiler prefetches weights into the rest.

    Raises:
        ValueError: jax does not know the chip.
    """
    info = facts()
    return TargetChip(str(info.chip_version.value), int(info.num_cores), int(info.vmem_capacity_bytes) // 4)


def round_up(x: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least x."""
    return -(-x // multiple) * multiple
