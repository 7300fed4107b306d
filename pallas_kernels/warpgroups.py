"""Hopper kernels: launches with warpgroup specialisation, and moves between memory and registers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jaxserve.pallas_kernels.hopper import computing_registers
from jaxserve.pallas_kernels.kernel_values import Ref, Registers, Scalar

_LOAD_PARAMETERS = {x.name for x in inspect.signature(plgpu.load).parameters.values() if x.default is x.empty}


def launcher(
    body: Callable[..., None],
    *,
    name: str,
    num_blocks: int,
    num_warpgroups: int,
    shared: tuple[Any, ...] | list[Any],
    interpret: Any,
    out: Any = (),
    **compiler_params: Any,
) -> Callable[..., Any]:
    """Return a function that launches a kernel with the given operands and returns its output arrays.

    Args:
        body: function that each warpgroup runs, called with the operand and output references, then the shared memory.
            `lax.axis_index` returns the index of its thread block ("block") and of the warpgroup in it ("thread").
        name: kernel name in profiles.
        num_blocks: number of thread blocks.
        num_warpgroups: number of warpgroups per thread block, with 128 threads each.
        shared: shared memory and barriers to allocate per thread block.
        interpret: parameters for Pallas' interpreter; None to run on a GPU.
        out: shapes and dtypes of the outputs.
        **compiler_params: parameters for `plgpu.CompilerParams`.
    """

    def kernel(*refs: Ref) -> None:
        pl.run_scoped(functools.partial(body, *refs), *shared, collective_axes="thread")

    run: Callable[..., Any] = pl.kernel(
        kernel,
        out_type=out,
        mesh=plgpu.Mesh(grid=(num_blocks,), grid_names=("block",), num_threads=num_warpgroups, thread_name="thread"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **compiler_params),
        name=name,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run


def divide(
    load: Callable[[Scalar], None],
    compute: Callable[[Scalar], None],
    *,
    num_computing: int,
    num_loading: int = 1,
    loading_registers: int | None,
) -> None:
    """Run `compute` in a thread block's first `num_computing` warpgroups, and `load` in the other `num_loading` ones.

    Args:
        load: function for a loading warpgroup, called with its index among the loading warpgroups.
        compute: function for a computing warpgroup, called with its index among the computing warpgroups.
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


def load(memory: Ref, layout: Any) -> Registers:
    """Load an array from shared or global memory to registers in a layout such as `plgpu.Layout.WGMMA`."""
    index = [()] if "idx" in _LOAD_PARAMETERS else []  # jax 0.10 requires the argument
    return plgpu.load(memory, *index, layout=layout, optimized=False)


def store(memory: Ref, value: Registers) -> None:
    """Store an array from registers to shared or global memory, whatever its register layout."""
    if hasattr(plgpu, "store"):
        plgpu.store(memory, value, optimized=False)
    else:  # jax 0.11 and earlier lack it, and do not insist on fast stores
        memory[...] = value


def spread(rows: Registers, shape: tuple[int, int], layout: Any) -> Registers:
    """Broadcast one value per row, `[rows]`, over all columns of `shape`, `[rows, columns]`, in a register layout."""
    return plgpu.layout_cast(lax.broadcast_in_dim(rows, shape, [0]), layout)


def i32(x: int) -> Array:
    """Return a 32-bit integer as an array without axes."""
    return jnp.asarray(x, jnp.int32)
