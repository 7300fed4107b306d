"""Matrices packed for the native CPU kernels, in any format that these multiply."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jaxserve.layers.linear import LinearContext, Matrix, MeshAxes
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.weight_formats.matrix_inputs import PLAIN_INPUTS, MatrixInputs
from jaxserve.layers.weight_formats.weight_format import FormatChoice, Row, WeightFormat
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul
from jaxserve.pallas_kernels.packed_linear import MAX_INT8_COLUMNS, PANEL_ROWS, LowRankTerms, PackedMatrix, Packer
from jaxserve.weights import StoredTensor

_FLOATS = packed_linear.INPUT_FORMATS[0]
_BFLOAT16 = "bfloat16"


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeMatrix(Matrix):
    """A packed matrix, whose kernel computes a linear layer in one call.

    Attributes:
        packed: the matrix.
        inputs: column order and quantisation of the inputs. Inputs that the kernel cannot round itself are multiplied
            by their scales before the matmul, which it computes with all 24 bits.
    """

    packed: PackedMatrix
    inputs: MatrixInputs = PLAIN_INPUTS

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in]."""
        return self.packed.shape

    def multiply(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T`; the kernel for gated matrices would also apply SwiGLU, so they are passed as plain ones."""
        return self._multiply_plain(x, context, None)

    def multiply_with_term(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T out"]:
        """Return `x @ W.T + term` in one call."""
        terms = None if context.term is None else context.term.packed()
        if context.term is not None and terms is None:
            return super().multiply_with_term(x, context)
        return self._multiply_plain(x, context, terms)

    def _multiply_plain(
        self, x: Float[Array, "T in"], context: LinearContext, terms: LowRankTerms | None
    ) -> Float[Array, "T out"]:
        """Return `x @ W.T` with low-rank terms."""
        inputs, input_format = self._prepared(x, context.axis)
        operands: Any = {"num_live": context.num_live, "input_format": input_format, "terms": _fed(terms, x, inputs)}
        return _plain_rows(self.packed, packed_linear.multiply(_plain_panels(self.packed), inputs, **operands))

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T in"]:
        """Return the rows `ids`, clipped to valid ones."""
        if self.packed.gated:  # each panel has some gate rows, followed by the rows they gate
            ids = jnp.clip(ids, 0, 2 * self.packed.num_outputs - 1)
            part, row = ids // self.packed.num_outputs, ids % self.packed.num_outputs
            half = PANEL_ROWS // 2
            ids = row // half * PANEL_ROWS + part * half + row % half
        return self.inputs.restore(packed_linear.rows(_plain_panels(self.packed), ids))

    def _prepared(self, x: Float[Array, "T in"], axis: MeshAxes | None) -> tuple[Float[Array, "T in"], str]:
        """Return the kernel's inputs, and the format to which it rounds them."""
        if (input_format := self._input_format(axis)) is not None:
            is_bfloat16 = input_format == _FLOATS and x.dtype.name == self.packed.dtype == _BFLOAT16
            return self.inputs.arrange(x, axis), _BFLOAT16 if is_bfloat16 else input_format
        x, factor = self.inputs.quantize(x.astype(jnp.float32), axis)
        return (x if factor is None else x * factor), _FLOATS

    def _input_format(self, axis: MeshAxes | None) -> str | None:
        """Return the format to which the kernel rounds inputs; None if they must be rounded before.

        A kernel finds the scales for a token's groups, which are the matrix's, in the columns that it has.
        """
        activation, matrix = self.inputs.activation, self.packed
        if activation is None:
            return _FLOATS
        group_size = matrix.num_inputs // max(1, matrix.scales.shape[1])
        is_found = activation.dynamic and activation.symmetric and not activation.power_of_two
        is_whole = activation.group == group_size or (activation.group is None and group_size == matrix.num_inputs)
        if not (is_found and is_whole and axis is None):
            return None
        if activation.elements == "e4m3" and matrix.dtype == "float8_e4m3fn":
            return matrix.dtype
        has_words = matrix.word_columns is not None and group_size <= MAX_INT8_COLUMNS
        return "int8" if activation.elements == "int8" and has_words else None

    def linear(self, x: Float[Array, "T in"], context: LinearContext) -> Float[Array, "T outputs"]:
        """Compute the linear layer in one call, unless devices sum first; an activation it lacks follows the call."""
        gated = self.packed.gated
        is_whole = context.activation is (swiglu if gated else None)
        if context.axis is not None or (gated and not is_whole):
            return super().linear(x, context)
        norm, fused = context.norm, None
        is_rounded = self._input_format(None) is None
        if norm is not None and norm.function is rms_norm and self.inputs.are_in_place and not is_rounded:
            assert not isinstance(norm.weight, Mapping), "RMS norms have no bias"
            fused = norm.weight, norm.eps
        elif norm is not None:
            x = norm(x)
        term, terms = context.term, None if context.term is None else context.term.packed()
        if term is not None and terms is None:
            return super().linear(x, context._replace(norm=norm if fused else None))
        (inputs, input_format), residual = self._prepared(x, None), context.residual if is_whole else None
        operands: Any = {"bias": context.bias, "residual": residual, "num_live": context.num_live}
        operands |= {"input_format": input_format, "terms": _fed(terms, x, inputs), "dtype": context.dtype}
        y = packed_linear.multiply(self.packed, inputs, rms_norm=fused, **operands)
        return y if is_whole else context._replace(bias=None).finish(y)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Compute the grouped matmul in one call."""
        x, input_format = self._prepared(x, context.axis)
        options: Any = {"input_format": input_format, "dtype": context.dtype or jnp.float32}
        y = grouped_matmul(x, _plain_panels(self.packed), group_sizes, **options)
        return _plain_rows(self.packed, y)

    def linear_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M outputs"]:
        """Compute the linear layers in one call, except for a bias and activations that the kernel lacks."""
        if context.term is not None and context.term.packed() is None:
            return super().linear_groups(x, group_sizes, context)
        gated = self.packed.gated
        if context.bias is not None or context.activation is not (swiglu if gated else None):
            return super().linear_groups(x, group_sizes, context)
        terms = None if context.term is None else context.term.packed()
        inputs, input_format = self._prepared(x, context.axis)
        options: Any = {"input_format": input_format, "dtype": context.dtype or jnp.float32}
        if terms is None:
            y = grouped_matmul(inputs, self.packed, group_sizes, **options)
        else:
            y = packed_linear.multiply_groups(self.packed, inputs, group_sizes, terms=_fed(terms, x, inputs), **options)
        return context._replace(activation=None).finish(y)


def _fed(terms: LowRankTerms | None, x: Float[Array, "T in"], inputs: Float[Array, "T in"]) -> LowRankTerms | None:
    """Return terms for inputs x of a matrix whose kernel has `inputs`, in another order or quantised, or x itself."""
    return terms if terms is None or inputs is x else replace(terms, x=x)


def _plain_panels(packed: PackedMatrix) -> PackedMatrix:
    """Return a gated packed matrix as a plain one, whose panels have gate rows, followed by the rows they gate."""
    if not packed.gated:
        return packed

    def joined(panels: Shaped[Array, "panels columns parts rows"]) -> Shaped[Array, "panels columns 1 all"]:
        """Join the parts of each panel to one."""
        return panels.reshape(*panels.shape[:2], 1, PANEL_ROWS)

    num_rows = packed.weights.shape[0] // packed.num_matrices * PANEL_ROWS
    return replace(jax.tree.map(joined, packed), num_outputs=num_rows)


def _plain_rows(packed: PackedMatrix, y: Float[Array, "T columns"]) -> Float[Array, "T out"]:
    """Reorder outputs y of the matrix from `_plain_panels` to the row order of `packed`."""
    if not packed.gated:
        return y
    return packed_linear.ungated(y, 2 * packed.num_outputs)


def unsupported(form: FormatChoice, dtype: DTypeLike, platform: str | None = None) -> str | None:
    """Return the reason why a format cannot be packed, or None if it can.

    Args:
        form: the format.
        dtype: activation dtype.
        platform: target platform, by default this process's.
    """
    if (stored := form.native_dtype(dtype)) is None:
        return f"the native kernels have no {form.name}"
    return packed_linear.unsupported(stored, platform or jax.default_backend())


def abstract(form: WeightFormat, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> NativeMatrix:
    """Return the result of `pack` as shapes, for a device's shard [N, K]."""
    grids, native = form.leaves(row, shape, dtype), form.native_dtype(dtype)
    assert native is not None, "see `unsupported`"
    if inputs := form.input_leaves(row, shape):
        grids = grids[: -len(inputs)]
    (N, K), num_groups = shape, grids[1].shape[0] if len(grids) > 1 else 0
    has_zeros = len(grids) > 2 and jnp.issubdtype(native, jnp.integer)
    num_matrices, gated = row.num_matrices, row.gated
    matrix = packed_linear.abstract(
        N, K, native, num_groups, num_matrices=num_matrices, gated=gated, has_zeros=has_zeros
    )
    shapes = (jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in inputs)
    return NativeMatrix(matrix, form.inputs(K // max(1, num_groups), *shapes))


def pack(form: WeightFormat, row: Row, tensor: StoredTensor) -> NativeMatrix:
    """Read a device's shard into panels for native kernels; see `WeightFormat.each_slab`."""
    dtype = form.native_dtype(tensor.dtype)
    assert dtype is not None, "see `unsupported`"
    shapes = abstract(form, row, tensor.shape, tensor.dtype)
    packer = Packer(shapes.packed)
    form.each_slab(row, tensor, form.leaves(row, tensor.shape, tensor.dtype), packer.write)
    arrays = [jax.device_put(array, tensor.sharding) for array in jax.tree.leaves(form.read_inputs(row, tensor))]
    return NativeMatrix(packer.matrix(tensor.sharding), jax.tree.unflatten(jax.tree.structure(shapes.inputs), arrays))


def leaf_axes(form: WeightFormat, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> list[tuple[str | None, ...]]:
    """Return the logical axes of each array in `pack`'s result, for a device's shard [N, K]."""
    axes = [leaf.axes_by_rows for leaf in form.leaves(row, shape, dtype)]
    inputs = [leaf.axes for leaf in form.input_leaves(row, shape)]
    panels = axes[: len(axes) - len(inputs)]
    return panels + panels[-1:] * (3 - len(panels)) + inputs  # scales and zero points always exist, perhaps empty
