"""Warpgroup specialisation in a Hopper thread block: the last warpgroups load, the others compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.pallas_kernels.hopper import computing_registers


def divide(
    load: Callable[[Any], None],
    compute: Callable[[Any], None],
    *,
    num_computing: int,
    num_loading: int = 1,
    loading_registers: int | None,
) -> None:
    """Run `load` or `compute` in each warpgroup, the mesh axis "thread".

    Args:
        load: function for the loading warpgroups, called with the index among them.
        compute: function for the computing warpgroups, called with the index among them.
        num_computing: number of computing warpgroups.
        num_loading: number of loading warpgroups.
        loading_registers: registers that a loading thread keeps; computing threads get the rest. None divides them
            evenly.
    """
    thread = lax.axis_index("thread")

    @pl.when(thread >= num_computing)
    def run_load() -> None:
        if loading_registers is not None:
            plgpu.set_max_registers(loading_registers, action="decrease")
        load(thread - num_computing)

    @pl.when(thread < num_computing)
    def run_compute() -> None:
        if loading_registers is not None:
            maximum = computing_registers(loading_registers, num_loading=num_loading, num_computing=num_computing)
            plgpu.set_max_registers(maximum, action="increase")
        compute(thread)
