"""XLA backend for every platform: `ragged_dot`.

XLA:CPU and XLA:GPU multiply all rows by every group's matrix and mask the results, which takes `num_groups` times
longer than necessary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels.grouped_matmul.problem import Problem

_DIMENSIONS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def unsupported_reason(problem: Problem) -> str | None:
    """Return the reason why XLA cannot run the problem, or None if it can."""
    return "packed matrices are for the native kernels" if problem.is_packed else None


def multiply(
    problem: Problem,
    x: Float[Array, "M K"],
    matrices: Float[Array, "layers GN K"],
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "M N"]:
    """Multiply each row of x by its group's matrix with `ragged_dot`; return float32.

    Float32 operands are multiplied in full float32 precision.

    Args:
        problem: static parameters.
        x: rows, sorted by group.
        matrices: all layers' matrices.
        group_sizes: rows per group; rows after the last group get zeros.
        layer: layer whose matrices are used.
    """
    local = matrices[0] if len(matrices) == 1 else lax.dynamic_index_in_dim(matrices, layer, keepdims=False)
    dtype = jnp.promote_types(x.dtype, matrices.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.ragged_dot_general(
        x.astype(dtype),
        local.reshape(problem.num_groups, problem.num_outputs, -1).astype(dtype),
        group_sizes,
        _DIMENSIONS,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
