"""Product with a quantised matrix for TPUs, in Pallas (Mosaic).

The grid has a step for each block of x with each block of rows of the matrix; the pipeline copies the blocks of the
next step ahead, of the matrix as it is stored, in the array of all layers: the number of the layer is a prefetched
scalar. A block of x is copied once, with all of its columns, and stays while the matrix passes. Where blocks do not
divide the rows of the matrix, the last one is filled with anything, and of its products those that exist are stored.

In vector memory a block of the matrix is dequantised some columns at a time, and multiplied in the dtype of x with
float32 sums. The scales of a group are a row of their grid, as its minor dimension is that of the outputs: XLA lays out
other grids that way anyway. The row is repeated for the columns of the group and transposed, so that each scale is
where its elements are.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.dispatch import import_failure
from jaxserve.pallas_kernels.quantized_matmul.interface import Problem, Quantized
from jaxserve.pallas_kernels.quantized_matmul.mosaic_tpu.plan import (
    LANES,
    ROWS,
    Call,
    Sizes,
    choose_tiles,
    most_columns,
)
from jaxserve.pallas_kernels.quantized_matmul.settings import SETTINGS, shape_class, unsupported

__all__ = ["call_for", "multiply", "supports"]

DTYPES = ("bfloat16",)
_KERNEL = f"{__name__}.kernel"


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if (reason := unsupported(problem, "tpu", DTYPES)) is not None:
        return reason
    if problem.row_bytes % LANES:  # XLA lays out others transposed, and would copy the matrices of all layers
        return f"rows of the matrix must have a multiple of {LANES} bytes, not {problem.row_bytes}"
    if problem.num_outputs < LANES:
        return f"rows of the matrix must be {LANES} or more, not {problem.num_outputs}"
    if most_columns(problem, Sizes().columns) is None:
        return f"groups must be of {LANES} columns or of a multiple or a part of them, not of {problem.group_size}"
    return import_failure(_KERNEL, "Pallas for TPUs") or tpu.refusal(
        lambda: call_for(problem), is_interpreted=SETTINGS.interpreter is not None
    )


def call_for(problem: Problem) -> Call:
    """Return the static facts of a call, with the sizes of its blocks.

    Raises:
      ValueError: sizes have unknown names, no blocks fit, or jax does not know the chip.
    """
    params = SETTINGS.interpreter
    name = tpu.name() if params is None else "interpreter"
    vmem_bytes = tpu.vmem_bytes() if params is None else tpu.INTERPRETED_VMEM_BYTES
    sizes = Sizes(**SETTINGS.sizes(Sizes, name, shape_class(problem)))
    return Call(problem, choose_tiles(problem, sizes, vmem_bytes), vmem_bytes, params)


def multiply(problem: Problem, x: Float[Array, "T K"], matrix: Quantized, layer: Int[Array, ""]) -> Float[Array, "T N"]:
    """Return the products in the dtype of the results."""
    x = jnp.pad(x, ((0, -problem.num_rows % ROWS), (0, 0)))
    return _kernel().multiply(call_for(problem), x, matrix, layer)[: problem.num_rows]


def _kernel() -> ModuleType:
    """Import the kernel on first use: importing Pallas takes a third of a second."""
    return importlib.import_module(_KERNEL)
