"""Products with quantised matrices: int8, int4 and fp8 elements with scales of channels or of groups of columns.

Contract of the operation:

- A matrix `[N, K]` is held as elements and grids of scales and perhaps zero points or minima, `[groups, N]`: an element
  is `(q - zero) * scale` or `q * scale - minimum`, with those of its row and of its group of K / groups consecutive
  columns.
- Two elements of four bits share a byte: the first half of the columns in the low bits, the second half in the high
  ones. Integers are q + 8 where there are neither zero points nor minima.
- In the kernels, elements of groups are rounded to the dtype of x once they are scaled, or the scale of a group
  multiplies the sum of its products, which rounds nothing; a single scale of a row multiplies its sum. Formats that
  multiply by XLA may scale before they round, or not round.
- Sums are float32, whatever the dtypes; results may be rounded to another one.

The arrays are those of all layers, of which the kernels read one in place: for them a slice would be a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxserve.pallas_kernels.op import AUTO, XLA, Op
from jaxserve.pallas_kernels.quantized_matmul import mosaic_gpu, mosaic_tpu
from jaxserve.pallas_kernels.quantized_matmul.interface import (
    FLOAT16_BITS,
    INT4_ZERO,
    Backend,
    Problem,
    Quantized,
    e2m1_floats,
    packed,
    scale_floats,
    unpacked,
)
from jaxserve.pallas_kernels.target import target_platform
from jaxtyping import Array, Float, Int

__all__ = [
    "BACKENDS",
    "FLOAT16_BITS",
    "INT4_ZERO",
    "Backend",
    "Problem",
    "Quantized",
    "e2m1_floats",
    "packed",
    "quantized_matmul",
    "scale_floats",
    "unpacked",
]

BACKENDS: Mapping[str, Backend] = {"mosaic_gpu": mosaic_gpu.KERNEL, "mosaic_tpu": mosaic_tpu.KERNEL}
"""All kernels, best first."""
OP: Op[Backend | None] = Op("quantized_matmul", {**BACKENDS, XLA: None}, xla_backend=XLA)


def quantized_matmul(
    x: Float[Array, "T in"],
    matrix: Quantized,
    layer: int | Int[Array, ""],
    *,
    by_xla: Callable[[], Float[Array, "T out"]],
    row_factor: Float[Array, " out"] | None = None,
    dtype: DTypeLike = jnp.float32,
    backend: str = AUTO,
) -> Float[Array, "T out"]:
    """Return the product of x with the transposed matrix of a layer.

    Args:
      x: rows.
      matrix: matrices of all layers.
      layer: number of the layer.
      by_xla: function that returns the product where no kernel runs, as only a format knows all of its own forms.
      row_factor: factor of each row of the matrix, with which a kernel's product is multiplied; `by_xla` has its own.
      dtype: dtype of the results.
      backend: "auto", "xla" or a name in `BACKENDS`.

    Raises:
      ValueError: shapes do not fit together.
      UnsupportedBackendError: the requested backend cannot run this call.
    """
    problem = matrix.problem(x, jnp.dtype(dtype if row_factor is None else jnp.float32), target_platform())
    if x.ndim != 2 or x.shape[1] != problem.num_inputs:
        raise ValueError(f"x must be [T, {problem.num_inputs}], as the matrix has these columns, got {x.shape}")
    if matrix.scale.shape[2] != problem.num_outputs:
        raise ValueError(f"scales must be [layers, groups, {problem.num_outputs}], got {matrix.scale.shape}")

    def unsupported_reason(kernel: Backend | None) -> str | None:
        return None if kernel is None else kernel.unsupported_reason(problem)

    chosen = OP.select(backend, unsupported_reason)
    if chosen == XLA:
        return by_xla().astype(dtype)
    y = BACKENDS[chosen].multiply(problem, x, matrix, jnp.asarray(layer, jnp.int32))
    return (y if row_factor is None else y * row_factor[None]).astype(dtype)
