"""Matmul kernel call on TPUs: Pallas copies the next grid step's blocks while one step computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxserve.pallas_kernels.grouped_matmul.launch import Launch


def pipelined_kernel(
    launch: Launch[Any],
    kernel: Callable[..., None],
    grid_spec: pltpu.PrefetchScalarGridSpec,
    out: jax.ShapeDtypeStruct,
    *,
    bytes_accessed: int,
    name: str,
) -> Callable[..., Array]:
    """Return a function that runs a TPU matmul kernel for each step of its Pallas grid, and returns its output.

    Args:
        launch: static parameters.
        kernel: kernel body, called in each grid step with `launch` and references to the step's blocks in VMEM.
        grid_spec: grid, and the blocks that each step reads and writes. Only the first grid dimension may be reordered
            or divided among cores.
        out: output shape and dtype.
        bytes_accessed: HBM bytes that the kernel reads and writes, for XLA's cost estimate.
        name: kernel name in profiles.
    """
    problem = launch.problem
    flops = 2 * problem.num_rows * problem.num_outputs * problem.num_inputs
    semantics: Any = ("parallel", *["arbitrary"] * (len(grid_spec.grid) - 1))
    run: Callable[..., Array] = pl.pallas_call(
        functools.partial(kernel, launch),
        out_shape=out,
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics,
            vmem_limit_bytes=2 * launch.chip.memory_bytes,
        ),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=bytes_accessed),
        name=name,
        **({} if launch.interpret is None else {"interpret": launch.interpret}),
    )
    return run
