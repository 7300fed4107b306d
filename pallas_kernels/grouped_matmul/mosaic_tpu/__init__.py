"""Grouped product for TPUs, in Pallas (Mosaic): the backend of mixtures of experts on TPUs.

The design is that of megablox (Gale et al. 2022, in jax): the rows are cut into tiles, and a tile is visited once by
each group that has rows in it (`visits.py`). The plan is computed on the device, from the sizes of groups, and reaches
the kernel as prefetched scalars, from which the pipeline takes the blocks that it copies ahead: a tile of rows, and a
block of the matrix `[N, K]` of its group as it is stored. A visit stores only the rows of its group, so the next ones
of the same tile, which is still in vector memory, fill in theirs. The number of visits is that of the grid: no work is
done for groups without rows, and their matrices are not read.

A matrix is read once by all visits of its group to tiles that follow each other, unless its columns are cut
(`plan.py`).
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.dispatch import import_failure
from jaxserve.pallas_kernels.grouped_matmul.interface import Problem
from jaxserve.pallas_kernels.grouped_matmul.mosaic_tpu.plan import LANES, Call, Sizes, choose_tiles, sublanes
from jaxserve.pallas_kernels.grouped_matmul.settings import SETTINGS, shape_class, unsupported

__all__ = ["call_for", "multiply", "supports"]

DTYPES = ("bfloat16", "float32")
_KERNEL = f"{__name__}.kernel"


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    # XLA lays out matrices of other columns transposed, and would copy those of all layers, not only of one.
    multiples = {"outputs": sublanes(problem.matrix_dtype), "inputs": LANES}
    if (reason := unsupported(problem, "tpu", DTYPES, **multiples)) is not None:
        return reason
    return import_failure(_KERNEL, "Pallas for TPUs") or tpu.refusal(
        lambda: call_for(problem), is_interpreted=SETTINGS.interpreter is not None
    )


def call_for(problem: Problem) -> Call:
    """Return the static facts of a call, with the sizes of its tiles.

    Raises:
      ValueError: sizes have unknown names, no tiles fit, or jax does not know the chip.
    """
    params = SETTINGS.interpreter
    name = tpu.name() if params is None else "interpreter"
    vmem_bytes = tpu.vmem_bytes() if params is None else tpu.INTERPRETED_VMEM_BYTES
    sizes = Sizes(**SETTINGS.sizes(Sizes, name, shape_class(problem)))
    return Call(problem, choose_tiles(problem, sizes, vmem_bytes), vmem_bytes, params)


def multiply(
    problem: Problem,
    x: Float[Array, "M K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "M N"]:
    """Return the products; those of float32 are exact float32."""
    call, M = call_for(problem), problem.num_rows
    x = jnp.pad(x, ((0, -M % sublanes(x.dtype)), (0, 0)))
    return _kernel().multiply(call, x, matrices, group_sizes, layer)[:M]


def _kernel() -> ModuleType:
    """Import the kernel on first use: importing Pallas takes a third of a second."""
    return importlib.import_module(_KERNEL)
