"""Backend of XLA's own ragged product: on every platform, and the reference of the others.

XLA:CPU multiplies all rows with the matrix of every group and masks the products. There it is right, but takes as many
times longer as there are groups.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.grouped_matmul.interface import Problem

_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def supports(problem: Problem) -> str | None:
    """Return the reason why XLA cannot run the problem, or None if it can."""
    return "packed matrices are for the native kernels" if problem.is_packed else None


def multiply(
    x: Float[Array, "M K"], matrices: Float[Array, "G N K"], group_sizes: Int32[Array, " G"]
) -> Float[Array, "M N"]:
    """Return the products; those of float32 are exact float32, as in `FloatMatrix`."""
    dtype = jnp.promote_types(x.dtype, matrices.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    y = lax.ragged_dot_general(
        x.astype(dtype),
        matrices.astype(dtype),
        group_sizes,
        _DIMENSIONS,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    is_in_group = jnp.arange(x.shape[0]) < group_sizes.sum()
    return jnp.where(is_in_group[:, None], y, 0)  # XLA does not say what other rows get
