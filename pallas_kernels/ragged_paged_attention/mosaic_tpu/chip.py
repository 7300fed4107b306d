"""The chip that is compiled for, or the interpreter in its place, and the block sizes for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import Sizes, unit_bytes_for
from jaxserve.pallas_kernels.tuning import Settings, Shape

INTERPRETED_VMEM_BYTES = 32 * 2**20
SETTINGS = Settings(Path(__file__).parents[1] / "tuned")


def chip_name() -> str:
    """Return the name of the chip that is compiled for, such as "v6e"."""
    return str(chip_facts().chip_version.value)


def sizes_for(shape: Shape) -> Sizes:
    """Return block sizes for the chip: requested ones, else those that measured best, else by bandwidth and memory.

    Args:
      shape: class of shapes of the call.

    Raises:
      ValueError: sizes have unknown names, or jax does not know the chip.
    """
    if SETTINGS.interpreter is not None:
        return Sizes()
    chip, given = chip_facts(), SETTINGS.sizes(Sizes, chip_name(), shape)
    bytes_per_s = chip.num_cores * chip.mem_bw_bytes_per_second
    return Sizes(**({"unit_bytes": unit_bytes_for(bytes_per_s, vmem_bytes())} | given))


def vmem_bytes() -> int:
    """Return the kernel's share of the chip's vector memory; the compiler prefetches weights into the rest."""
    return INTERPRETED_VMEM_BYTES if SETTINGS.interpreter is not None else int(chip_facts().vmem_capacity_bytes) // 4


def chip_facts() -> Any:
    """Return facts of the chip that is compiled for, per core."""
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415 (importing Pallas takes a third of a second)

    return pltpu.get_tpu_info()
