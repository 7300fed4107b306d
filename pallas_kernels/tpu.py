"""Properties of the target TPU that Pallas kernels depend on."""

from __future__ import annotations

from typing import Any

from jaxserve.pallas_kernels.target import TargetChip

INTERPRETED = TargetChip("interpreter", num_cores=1, memory_bytes=16 * 2**20)


def facts() -> Any:
    """Return jax's description of one TPU core; ValueError for a chip that jax does not know."""
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415 (importing Pallas takes a third of a second)

    return pltpu.get_tpu_info()


def target_chip() -> TargetChip:
    """Return the target TPU. A kernel gets a quarter of VMEM; the compiler prefetches weights into the rest.

    Raises:
        ValueError: jax does not know the chip.
    """
    info = facts()
    return TargetChip(str(info.chip_version.value), int(info.num_cores), int(info.vmem_capacity_bytes) // 4)
