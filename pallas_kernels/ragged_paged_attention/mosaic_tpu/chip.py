"""Settings of calls, and block sizes for the chip that is compiled for, or for the interpreter in its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.pallas_kernel import Settings
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import Sizes, unit_bytes_for

INTERPRETED_VMEM_BYTES = 32 * 2**20
SETTINGS = Settings(Path(__file__).parents[1] / "tuned")


def sizes_for(shape: Mapping[str, int | str]) -> Sizes:
    """Return block sizes for the chip: requested ones, else those that measured best, else by bandwidth and memory.

    Args:
      shape: class of shapes of the call.

    Raises:
      ValueError: sizes have unknown names, or jax does not know the chip.
    """
    if SETTINGS.interpreter is not None:
        return Sizes()
    chip = tpu.facts()
    unit_bytes = unit_bytes_for(chip.num_cores * chip.mem_bw_bytes_per_second, vmem_bytes())
    return SETTINGS.sizes(Sizes, tpu.target_chip().name, shape, unit_bytes=unit_bytes)


def vmem_bytes() -> int:
    """Return the kernel's share of the chip's or the interpreter's vector memory."""
    return INTERPRETED_VMEM_BYTES if SETTINGS.interpreter is not None else tpu.target_chip().memory_bytes
