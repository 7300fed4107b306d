"""Facts of the TPU that is compiled for, which the Pallas kernels for TPUs need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.pallas_kernels.dispatch import target_platform

INTERPRETED_VMEM_BYTES = 16 * 2**20


def facts() -> Any:
    """Return facts of the chip, per core; ValueError for one that jax does not know."""
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415 (importing Pallas takes a third of a second)

    return pltpu.get_tpu_info()


def name() -> str:
    """Return the name of the chip, such as "v6e"."""
    return str(facts().chip_version.value)


def vmem_bytes() -> int:
    """Return a kernel's share of the chip's vector memory; the compiler prefetches weights into the rest."""
    return int(facts().vmem_capacity_bytes) // 4


def refusal(make_call: Callable[[], object], *, is_interpreted: bool) -> str | None:
    """Return the reason why a call does not fit the chip; None if it does, or if no TPU is compiled for.

    Args:
        make_call: function that raises ValueError with the reason.
        is_interpreted: True if the interpreter stands for the chip.
    """
    if target_platform() != "tpu" and not is_interpreted:
        return None
    try:
        make_call()
    except ValueError as error:  # also raised for a chip that jax does not know
        return str(error)
    return None
