"""The chip that is compiled for, or the interpreter in its place, and the block sizes for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import Sizes, unit_bytes_for
from jaxserve.pallas_kernels.tuning import Shape, measured_sizes

INTERPRETED_VMEM_BYTES = 32 * 2**20

_given_sizes: ContextVar[dict[str, int] | None] = ContextVar("given_sizes", default=None)
_interpret_params: ContextVar[Any] = ContextVar("interpret_params", default=None)


@contextlib.contextmanager
def interpreted(params: Any) -> Iterator[None]:
    """Run calls traced inside in the interpreter, on any machine, with these parameters."""
    token = _interpret_params.set(params)
    try:
        yield
    finally:
        _interpret_params.reset(token)


@contextlib.contextmanager
def sized(**sizes: int) -> Iterator[None]:
    """Make calls traced inside use these `plan.Sizes` instead of those that measured best on their chip."""
    token = _given_sizes.set(sizes)
    try:
        yield
    finally:
        _given_sizes.reset(token)


def interpret_params() -> Any:
    """Return the parameters of the interpreter; None to run on a TPU."""
    return _interpret_params.get()


def chip_name() -> str:
    """Return the name of the chip that is compiled for, such as "v6e"."""
    return str(chip_facts().chip_version.value)


def sizes_for(folder: Path, shape: Shape) -> Sizes:
    """Return block sizes for the chip: requested ones, else those that measured best, else by bandwidth and memory.

    Args:
      folder: folder of measured block sizes, by chip.
      shape: class of shapes of the call.

    Raises:
      ValueError: sizes have unknown names, or jax does not know the chip.
    """
    if interpret_params() is not None:
        return Sizes()
    chip, given = chip_facts(), _given_sizes.get()
    if given is None:
        given = measured_sizes(folder, chip_name(), shape)
    if unknown := sorted(given.keys() - {field.name for field in dataclasses.fields(Sizes)}):
        raise ValueError(f"there are no sizes of blocks called {unknown}, which {folder} has for {chip_name()}")
    bytes_per_s = chip.num_cores * chip.mem_bw_bytes_per_second
    return Sizes(**({"unit_bytes": unit_bytes_for(bytes_per_s, vmem_bytes())} | given))


def vmem_bytes() -> int:
    """Return the kernel's share of the chip's vector memory; the compiler prefetches weights into the rest."""
    return INTERPRETED_VMEM_BYTES if interpret_params() is not None else int(chip_facts().vmem_capacity_bytes) // 4


def chip_facts() -> Any:
    """Return facts of the chip that is compiled for, per core."""
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415 (importing Pallas takes a third of a second)

    return pltpu.get_tpu_info()
