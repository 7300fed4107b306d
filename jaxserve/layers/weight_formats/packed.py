"""Matrices of any format that the native CPU kernels multiply, packed for them."""

from typing import no_type_check

import jax
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import LinearContext, Matrix, Operands
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.weight_formats.weight_format import FormatChoice, Row, WeightFormat
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul
from jaxserve.pallas_kernels.packed_linear import PackedMatrix, Packer
from jaxserve.weights import StoredTensor


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@struct.dataclass
class NativeMatrix(Matrix):
    """A packed matrix, whose kernel computes a product and all that surrounds it in one call."""

    packed: PackedMatrix

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.packed.shape

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Multiply without any operands."""
        assert not self.packed.gated, "the product of a gated matrix is SwiGLU"
        return packed_linear.multiply(self.packed, x)

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        return packed_linear.rows(self.packed, ids)

    def linear(self, x: Float[Array, "T in"], context: LinearContext, operands: Operands) -> Float[Array, "T outputs"]:
        """Compute everything in one call, unless devices sum first or the activation is not that of the kernel."""
        if context.axis is not None or context.activation is not (swiglu if self.packed.gated else None):
            return super().linear(x, context, operands)
        norm = None if operands.norm is None else (operands.norm.weight, operands.norm.eps)
        y = packed_linear.multiply(self.packed, x, rms_norm=norm, bias=operands.bias, residual=operands.residual)
        return y.astype(context.dtype)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Multiply each row with the matrix of its group, in one call."""
        return grouped_matmul(x, self.packed, group_sizes)

    def linear_groups(
        self,
        x: Float[Array, "M in"],
        group_sizes: Int[Array, " G"],
        context: LinearContext,
        bias: Float[Array, "G out"] | None = None,
    ) -> Float[Array, "M outputs"]:
        """Compute everything in one call if the matrices are gated, whose only activation is that of the kernel."""
        if not self.packed.gated:
            return super().linear_groups(x, group_sizes, context, bias)
        assert context.activation is swiglu, "the product of gated matrices is SwiGLU"
        assert bias is None, "the kernel of gated matrices takes no bias"
        return self.multiply_groups(x, group_sizes, context).astype(context.dtype)


def unsupported(form: FormatChoice, dtype: DTypeLike, platform: str | None = None) -> str | None:
    """Return the reason why matrices of a format cannot be packed, or None if they can.

    Args:
        form: format of the matrices.
        dtype: dtype of activations.
        platform: platform that they are for; by default that of this process.
    """
    if (stored := form.native_dtype(dtype)) is None:
        return f"the native kernels have no {form.name}"
    return packed_linear.unsupported(stored, platform or jax.default_backend())


def abstract(form: WeightFormat, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> NativeMatrix:
    """Return the shapes of what `pack` makes of a device's part of a matrix, [N, K]."""
    leaves, native = form.leaves(row, shape, dtype), form.native_dtype(dtype)
    assert native is not None, "see `unsupported`"
    (N, K), num_groups, has_zeros = shape, leaves[1].shape[0] if len(leaves) > 1 else 0, len(leaves) > 2
    num_matrices, gated = row.num_matrices, row.gated
    return NativeMatrix(
        packed_linear.abstract(N, K, native, num_groups, num_matrices=num_matrices, gated=gated, has_zeros=has_zeros)
    )


def pack(form: WeightFormat, row: Row, tensor: StoredTensor) -> NativeMatrix:
    """Read a device's part of a matrix into panels of what native kernels take; see `WeightFormat.each_slab`."""
    dtype = form.native_dtype(tensor.dtype)
    assert dtype is not None, "see `unsupported`"
    packer = Packer(abstract(form, row, tensor.shape, tensor.dtype).packed, dtype)
    form.each_slab(row, tensor, form.leaves(row, tensor.shape, tensor.dtype), packer.write)
    return NativeMatrix(packer.matrix(tensor.sharding))
