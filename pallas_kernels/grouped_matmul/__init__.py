"""Products of groups of rows with matrices of their own, as the experts of a layer need them.

Contract of the operation, the same for all backends:

- The rows of x are sorted by group: the first `group_sizes[0]` rows belong to group 0, the next `group_sizes[1]` to
  group 1, and so on. Groups may be empty. Rows behind the last group get zeros.
- Shapes do not depend on the sizes of groups, which are data; no row is dropped, however uneven the groups are.
- Sums are float32, whatever the dtypes.

Matrices are an array `[G, N, K]`, or packed for the native kernels (`packed_linear.pack` with `num_matrices`). A gated
packed matrix gives SwiGLU of the product, as in `packed_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.pallas_kernels.dispatch import AUTO, select, target_platform
from jaxserve.pallas_kernels.grouped_matmul import native, ragged_dot
from jaxserve.pallas_kernels.grouped_matmul.interface import Backend, Matrices, Problem
from jaxserve.pallas_kernels.packed_linear import PackedMatrix

__all__ = ["BACKENDS", "Backend", "Matrices", "Problem", "grouped_matmul"]

BACKENDS: Mapping[str, Backend] = {"native": native, "ragged_dot": ragged_dot}
"""All backends, best first."""


def grouped_matmul(
    x: Float[Array, "M in"], matrices: Matrices, group_sizes: Int[Array, " groups"], *, backend: str = AUTO
) -> Float[Array, "M out"]:
    """Return the product of each row with the transposed matrix of its group, in float32.

    Args:
      x: rows, sorted by group.
      matrices: a matrix for each group.
      group_sizes: rows of each group; their sum is at most M.
      backend: "auto" or a name in `BACKENDS`.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      UnsupportedBackendError: the requested backend cannot run this call.
    """
    if isinstance(matrices, PackedMatrix):
        num_groups, K = matrices.num_matrices, matrices.num_inputs
    else:
        num_groups, _, K = matrices.shape
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"x must be [M, {K}], as the matrices have {K} columns, got {x.shape}")
    if group_sizes.shape != (num_groups,) or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes must be int32 of shape ({num_groups},), one for each matrix, "
            f"got {group_sizes.dtype} of shape {group_sizes.shape}"
        )
    problem = Problem(isinstance(matrices, PackedMatrix), target_platform())
    chosen = select("grouped_matmul", BACKENDS, backend, lambda candidate: candidate.supports(problem))
    return BACKENDS[chosen].multiply(x, matrices, group_sizes)
