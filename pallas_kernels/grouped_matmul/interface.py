"""Interface between the operation and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxserve.pallas_kernels.packed_linear import PackedMatrix
from jaxtyping import Array, Float, Int, Int32

Matrices = Float[Array, "G N K"] | Float[Array, "layers GN K"] | PackedMatrix


@dataclass(frozen=True)
class Problem:
    """Static facts of a call, by which a backend decides if it can run it.

    Attributes:
        num_rows: number of rows, M.
        num_groups: number of groups, G.
        num_outputs: rows of each matrix, N.
        num_inputs: columns of each matrix, K.
        dtype: dtype of the rows.
        matrix_dtype: dtype of the matrices.
        result_dtype: dtype of the results.
        is_packed: True if the matrices are packed for the native kernels.
        platform: platform that is compiled for.
        num_shards: number of devices, or sets of them, whose groups the rows are those of; each has as many groups, and
            rows of the others' groups lie behind the last one.
    """

    num_rows: int
    num_groups: int
    num_outputs: int
    num_inputs: int
    dtype: jnp.dtype
    matrix_dtype: jnp.dtype
    result_dtype: jnp.dtype
    is_packed: bool
    platform: str
    num_shards: int = 1

    @property
    def kernel_dtype(self) -> jnp.dtype:
        """Dtype in which Pallas kernels write results: that of the results if it is that of the operands."""
        return self.result_dtype if self.result_dtype == self.matrix_dtype else jnp.dtype(jnp.float32)

    @property
    def mean_rows(self) -> int:
        """Rows of a group on average, rounded up to a power of two."""
        return 1 << max(0, -(-self.num_rows // (self.num_groups * self.num_shards)) - 1).bit_length()


@runtime_checkable
class Backend(Protocol):
    """Module that multiplies groups in one particular way."""

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return the reason why this backend cannot run the problem, or None if it can."""

    def multiply(
        self,
        problem: Problem,
        x: Float[Array, "M K"],
        matrices: Any,
        group_sizes: Int32[Array, " G"],
        layer: Int[Array, ""],
    ) -> Float[Array, "M out"]:
        """Return the products in float32 or the dtype of the results, with anything in rows behind the last group.

        Matrices that are not packed are `[layers, G * N, K]`, those of a layer one after the other.
        """
