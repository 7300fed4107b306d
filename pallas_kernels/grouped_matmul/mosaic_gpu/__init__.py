"""Grouped product for Hopper GPUs, in Pallas (Mosaic GPU): the backend of mixtures of experts on NVIDIA GPUs.

The rows of each group are cut into tiles that begin with the group, or up to seven rows before it, as TMA copies rows
to where wgmma reads them in eights (`visits.py`). A tile with a block of the rows of its group's matrix `[N, K]` is a
work item; the persistent thread blocks of all multiprocessors take the items in turn, so that those of one tile run
side by side and fetch its rows from main memory once.

In a thread block one warpgroup feeds a ring of shared memory by TMA, blocks of x and of the matrix as they are stored,
and one or two multiply, 64 rows each, with wgmma and float32 sums. A tile may reach over rows of other groups: these
are multiplied as well, and only the tile's own rows are copied to the output. No work is done for groups without rows,
and their matrices are not read.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels import hopper
from jaxserve.pallas_kernels.dispatch import import_failure
from jaxserve.pallas_kernels.grouped_matmul.interface import Problem
from jaxserve.pallas_kernels.grouped_matmul.mosaic_gpu.plan import MIN_ROWS, Call, Sizes, choose_tiles
from jaxserve.pallas_kernels.grouped_matmul.settings import SETTINGS, shape_class, unsupported

__all__ = ["call_for", "multiply", "supports"]

DTYPES = ("bfloat16", "float16")
MIN_INPUTS, MIN_OUTPUTS = 32, 64  # elements in a line of shared memory, and rows of the smallest block
INTERPRETED_CORES = 3  # few, so that every thread block has some work
_KERNEL = f"{__name__}.kernel"


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if (reason := unsupported(problem, "gpu", DTYPES, outputs=MIN_OUTPUTS, inputs=MIN_INPUTS)) is not None:
        return reason
    return import_failure(_KERNEL, "Pallas for GPUs") or (hopper.other_chip() if problem.platform == "gpu" else None)


def call_for(problem: Problem) -> Call:
    """Return the static facts of a call, with the sizes of its tiles.

    Raises:
      ValueError: sizes have unknown names.
    """
    params = SETTINGS.interpreter
    chip = hopper.name() if params is None else "interpreter"
    sizes = Sizes(**SETTINGS.sizes(Sizes, chip, shape_class(problem)))
    num_cores = hopper.num_cores() if params is None else INTERPRETED_CORES
    return Call(problem, choose_tiles(problem, sizes), num_cores, params)


def multiply(
    problem: Problem,
    x: Float[Array, "M K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "M N"]:
    """Return the products."""
    call, M = call_for(problem), problem.num_rows
    # A copy to shared memory has the rows of a tile, in eights.
    x = jnp.pad(x, ((0, max(-M % MIN_ROWS, call.tiles.rows - M)), (0, 0)))
    return _kernel().multiply(call, x, matrices, group_sizes, layer)


def _kernel() -> ModuleType:
    """Import the kernel on first use: importing Pallas takes a third of a second."""
    return importlib.import_module(_KERNEL)
