"""Matrices packed for the native CPU kernels, in any format that these multiply."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.layers.linear import LinearContext, Matrix, MeshAxes, SortedGroups, TokenTerm, row_groups
from jaxserve.layers.mlp import swiglu
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.weight_formats.matrix_inputs import PLAIN_INPUTS, MatrixInputs
from jaxserve.layers.weight_formats.weight_format import FormatChoice, Row, WeightFormat
from jaxserve.pallas_kernels import packed_linear
from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul
from jaxserve.pallas_kernels.packed_linear import MAX_INT8_COLUMNS, PANEL_ROWS, PackedMatrix, Packer
from jaxserve.weights import StoredTensor

_FLOATS = packed_linear.INPUT_FORMATS[0]


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
        x, input_format = self._prepared(x, context.axis)
        matrix = _plain_panels(self.packed)
        y = packed_linear.multiply(matrix, x, num_live=context.num_live, input_format=input_format)
        return _plain_rows(self.packed, y)

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
            return self.inputs.arrange(x, axis), input_format
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
        if context.term is not None and (gated or context.term.factor is not None):
            return self._separately(x, fused, context.term, context)
        (x, input_format), residual = self._prepared(x, None), context.residual if is_whole else None
        operands = {"bias": context.bias, "residual": residual, "num_live": context.num_live}
        y = packed_linear.multiply(self.packed, x, rms_norm=fused, input_format=input_format, **operands)
        y = (y if context.term is None else context.term.added_to(y)).astype(context.dtype)
        return y if is_whole else context._replace(bias=None).finish(y)

    def _separately(
        self,
        x: Float[Array, "T in"],
        rms_norm: tuple[Float[Array, " in"], float] | None,
        term: TokenTerm,
        context: LinearContext,
    ) -> Float[Array, "T outputs"]:
        """Compute a linear layer some of whose tokens add a term before other operations of the kernel.

        These are SwiGLU, and the bias if the term has a factor, which multiplies only the matmul's outputs.
        Both kinds of tokens are computed once, each in a call for these tokens only.

        Args:
            x: inputs, before an RMS norm.
            rms_norm: weight and epsilon of the norm, or None.
            term: term of adapted tokens.
            context: the layer, whose other norms were applied.
        """
        adapters, order = term.adapters, term.adapters.others_first
        num_live = jnp.int32(len(x)) if context.num_live is None else context.num_live
        x, input_format = self._prepared(x, None)
        multiply = partial(packed_linear.multiply, rms_norm=rms_norm, input_format=input_format)
        is_whole, num_others = (
            context.activation is (swiglu if self.packed.gated else None),
            num_live - adapters.num_adapted,
        )
        residual = context.residual[order] if is_whole and context.residual is not None else None
        others = multiply(self.packed, x[order], bias=context.bias, residual=residual, num_live=num_others)
        others = others[adapters.rank_among_others]
        others = others if is_whole else context._replace(bias=None).finish(others.astype(context.dtype))
        first = multiply(_plain_panels(self.packed), x[adapters.order], num_live=adapters.num_adapted)
        adapted = context.finish(term.applied_to(_plain_rows(self.packed, first)[adapters.rank_of]))
        return term.select(adapted, others).astype(context.dtype)

    def multiply_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M out"]:
        """Compute the grouped matmul in one call."""
        x, input_format = self._prepared(x, context.axis)
        y = grouped_matmul(x, _plain_panels(self.packed), group_sizes, input_format=input_format)
        return _plain_rows(self.packed, y)

    def linear_groups(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], context: LinearContext
    ) -> Float[Array, "M outputs"]:
        """Compute the linear layers in one call if the matrices are gated and have no bias."""
        if not self.packed.gated or context.activation is not swiglu or context.bias is not None:
            return super().linear_groups(x, group_sizes, context)
        if context.term is not None:
            return self._groups_separately(x, group_sizes, context.term, context)
        x, input_format = self._prepared(x, context.axis)
        return grouped_matmul(x, self.packed, group_sizes, input_format=input_format).astype(context.dtype)

    def _groups_separately(
        self, x: Float[Array, "M in"], group_sizes: Int[Array, " G"], term: TokenTerm, context: LinearContext
    ) -> Float[Array, "M outputs"]:
        """Compute gated linear layers some of whose rows add a term before SwiGLU; see `_separately`."""
        group, is_adapted = row_groups(group_sizes, len(x)), term.adapters.is_adapted
        x, input_format = self._prepared(x, context.axis)

        def computed(packed: PackedMatrix, has_row: Bool[Array, " M"]) -> Float[Array, "M columns"]:
            """Multiply the rows in a mask; return arbitrary outputs for the others."""
            rows = SortedGroups.sort(jnp.where(has_row, group, group_sizes.size), group_sizes.size)
            return grouped_matmul(x[rows.order], packed, rows.sizes, input_format=input_format)[rows.position]

        plain = _plain_rows(self.packed, computed(_plain_panels(self.packed), is_adapted))
        adapted, others = context.finish(term.applied_to(plain)), computed(self.packed, ~is_adapted)
        return term.select(adapted, others).astype(context.dtype)


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
    parts = jnp.swapaxes(y.reshape(len(y), -1, 2, PANEL_ROWS // 2), 1, 2).reshape(len(y), 2, -1)
    return parts[:, :, : packed.num_outputs].reshape(len(y), -1)


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
