"""CPU backend in C++: a `packed_linear` matmul for each group, which does not read empty groups' weights.

All groups share the threads. A row's result is bit-identical whatever other rows there are.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int, Int32

from jaxserve.pallas_kernels import native, packed_linear
from jaxserve.pallas_kernels.grouped_matmul.problem import Problem
from jaxserve.pallas_kernels.packed_linear import PackedMatrix


def unsupported_reason(problem: Problem) -> str | None:
    """Return the reason why the native kernels cannot run the problem, or None if they can."""
    if problem.platform != "cpu":
        return "the native kernels are for CPUs"
    return native.unavailable() if problem.is_packed else "the matrices are not packed"


def multiply(
    problem: Problem,
    x: Float[Array, "M K"],
    matrices: PackedMatrix,
    group_sizes: Int32[Array, " G"],
    layer: Int[Array, ""],
) -> Float[Array, "M out"]:
    """Multiply each row of x by its group's matrix in one native call; apply SwiGLU if matrices are gated.

    Args:
        problem: static parameters.
        x: rows, sorted by group.
        matrices: packed matrix for each group.
        group_sizes: rows per group; rows after the last group get zeros.
        layer: zero, since packed matrices belong to one layer.
    """
    options: Any = {"input_format": problem.input_format, "dtype": problem.result_dtype}
    return packed_linear.multiply_groups(matrices, x, group_sizes, **options)
