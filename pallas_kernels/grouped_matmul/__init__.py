"""Products of groups of rows with matrices of their own, as the experts of a layer need them.

Contract of the operation, the same for all backends:

- The rows of x are sorted by group: the first `group_sizes[0]` rows belong to group 0, the next `group_sizes[1]` to
  group 1, and so on. Groups may be empty. Rows behind the last group get zeros.
- Shapes do not depend on the sizes of groups, which are data; no row is dropped, however uneven the groups are.
- Sums are float32, whatever the dtypes; results may be rounded to another one.

Matrices are an array `[G, N, K]`, or packed for the native kernels (`packed_linear.pack` with `num_matrices`). A gated
packed matrix gives SwiGLU of the product, as in `packed_linear`. Or they are those of one layer in an array of all,
`[layers, G * N, K]`: the kernels read them there, and a slice would be a copy for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxserve.pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_tpu, native, ragged_dot
from jaxserve.pallas_kernels.grouped_matmul.interface import Backend, Matrices, Problem
from jaxserve.pallas_kernels.op import AUTO, Op
from jaxserve.pallas_kernels.packed_linear import PackedMatrix
from jaxserve.pallas_kernels.target import target_platform
from jaxtyping import Array, Float, Int

__all__ = ["BACKENDS", "Backend", "Matrices", "Problem", "grouped_matmul"]

BACKENDS: Mapping[str, Backend] = {
    "native": native,
    "mosaic_gpu": mosaic_gpu.KERNEL,
    "mosaic_tpu": mosaic_tpu.KERNEL,
    "ragged_dot": ragged_dot,
}
"""All backends, best first."""
OP = Op("grouped_matmul", BACKENDS, xla_backend="ragged_dot")


def grouped_matmul(
    x: Float[Array, "M in"],
    matrices: Matrices,
    group_sizes: Int[Array, " groups"],
    *,
    layer: int | Int[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float32,
    num_shards: int = 1,
    backend: str = AUTO,
) -> Float[Array, "M out"]:
    """Return the product of each row with the transposed matrix of its group.

    Args:
      x: rows, sorted by group.
      matrices: a matrix for each group, or, with `layer`, those of each layer one after the other.
      group_sizes: rows of each group; their sum is at most M.
      layer: number of the layer; None if the matrices are those of the groups alone.
      dtype: dtype of the results.
      num_shards: number of devices whose groups the rows are those of; see `Problem`.
      backend: "auto" or a name in `BACKENDS`.

    Raises:
      ValueError: shapes or dtypes do not fit together.
      UnsupportedBackendError: the requested backend cannot run this call.
    """
    if isinstance(matrices, PackedMatrix):
        num_matrices, N, K = matrices.num_matrices, matrices.num_outputs, matrices.num_inputs
    elif layer is None:
        num_matrices, N, K = matrices.shape
    else:
        (_, rows, K), num_matrices = matrices.shape, group_sizes.size
        if num_matrices == 0 or rows % num_matrices:
            raise ValueError(f"matrices must be [layers, G * N, K] for {num_matrices} groups, got {matrices.shape}")
        N = rows // num_matrices
    if x.ndim != 2 or x.shape[1] != K:
        raise ValueError(f"x must be [M, {K}], as the matrices have {K} columns, got {x.shape}")
    if group_sizes.shape != (num_matrices,) or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes must be int32 of shape ({num_matrices},), one for each matrix, "
            f"got {group_sizes.dtype} of shape {group_sizes.shape}"
        )
    is_packed = isinstance(matrices, PackedMatrix)
    dtypes = x.dtype, (matrices.weights if isinstance(matrices, PackedMatrix) else matrices).dtype, jnp.dtype(dtype)
    sizes = x.shape[0], num_matrices, N, K
    problem = Problem(*sizes, *dtypes, is_packed=is_packed, platform=target_platform(), num_shards=num_shards)
    chosen = OP.select(backend, lambda candidate: candidate.unsupported_reason(problem))
    stack = matrices if isinstance(matrices, PackedMatrix) or layer is not None else matrices.reshape(1, -1, K)
    index = jnp.asarray(0 if layer is None else layer, jnp.int32)
    y = BACKENDS[chosen].multiply(problem, x, stack, group_sizes, index).astype(dtype)
    if chosen == "native":  # it has zeros there
        return y
    is_in_group = jnp.arange(x.shape[0]) < group_sizes.sum()
    return jnp.where(is_in_group[:, None], y, 0)
