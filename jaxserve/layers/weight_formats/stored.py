"""Formats of quantised checkpoints: each device reads its shard of a matrix as it is stored, see `StoredMatrix`.

If the group size does not divide a device's columns, a smaller one that does is used.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.layers.weight_formats.matrix_inputs import MatrixInputs
from jaxserve.layers.weight_formats.stored_matrix import StoredMatrix
from jaxserve.layers.weight_formats.weight_format import Leaf, Row, WeightFormat
from jaxserve.pallas_kernels.elements import (
    FLOAT16_BITS,
    INT4_ZERO,
    packed,
)
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS
from jaxserve.weights import CheckpointError, QuantizedPart, Scheme, Schemes, StoredTensor, host_buffer
from jaxserve.weights.quantized.packing import nibbles
from jaxserve.weights.quantized.scheme import Role

# Roles of the arrays that only some schemes have, in the order of `StoredMatrix`'s and `MatrixInputs`' fields.
_GRIDS: tuple[Role, ...] = ("global_scale", "zero", "minimum")
_INPUTS: tuple[Role, ...] = ("order", "input_factor", "input_scale", "input_zero")
_SLAB_SIZE = 1 << 20  # elements per thread and read: in GPTQ files a row touches as many pages as it has columns


class StoredFormat:
    """Format choice for a quantised checkpoint: each tensor has the format for its scheme.

    Native kernels multiply plain matrices, and the others if their own format has a `native_dtype`.

    Attributes:
        name: name in messages.
        schemes: the checkpoint's schemes.
    """

    name = "checkpoint"

    def __init__(self, schemes: Schemes) -> None:
        self.schemes = schemes

    def at(self, row: Row) -> "SchemeFormat | None":
        """Return a tensor's format; None if it is plain.

        Tensors whose parts have different schemes are plain too, as are arrays that a layer reads without a matmul:
        their quantised parts are dequantised during loading.
        """
        found = self._schemes(row)
        (scheme,) = found if len(found) == 1 and not row.is_array else (None,)
        return None if scheme is None else SchemeFormat(scheme)

    def is_dequantised(self, row: Row) -> bool:
        """Return whether a tensor is plain although it is quantised in the checkpoint."""
        return self.at(row) is None and self._schemes(row) != {None}

    def _schemes(self, row: Row) -> set[Scheme | None]:
        """Return the schemes for a tensor's checkpoint tensors; None in the set for unquantised ones."""
        return {self.schemes.for_tensor(name) for name in dict.fromkeys(row.hf_names)} if row.is_matrix else {None}

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Return the dtype for plain matrices; quantised ones have their own, see `SchemeFormat`."""
        return dtype

    def rounding_inputs(self) -> "StoredFormat":
        """Return the format choice with inputs rounded to int8 unless a scheme specifies them."""
        return StoredFormat(self.schemes.rounding_inputs())


class _Grids(NamedTuple):
    """Scales, zero points and minima, [rows, groups]."""

    scale: NDArray[Any]
    zero: NDArray[Any] | None
    minimum: NDArray[Any] | None


class SchemeFormat(WeightFormat):
    """`StoredMatrix` in one scheme."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.name = scheme, scheme.name
        self.rounds_inputs = scheme.activation is not None and scheme.activation.elements == "int8"

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike | None:
        """Return the element dtype that native kernels read, or None if they do not support the scheme.

        They support elements with a scale per group of consecutive columns. Int4 with zero points is uint4; minima are
        passed as zero points.
        """
        scheme = self.scheme
        has_zeros = scheme.has("zero") or scheme.has("minimum")
        return _NATIVE_DTYPES.get(scheme.elements) if not has_zeros else _DTYPES_WITH_ZEROS.get(scheme.elements)

    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        """Return the `StoredMatrix` arrays that the scheme has."""
        scheme, (num_rows, in_size), (out_axis, in_axis) = self.scheme, shape, row.axes
        if scheme.is_packed and in_size % 2:
            raise CheckpointError(
                f"each device must have an even number of columns of {row.hf_names[0]} ({scheme.name}), got {in_size} "
                f"of {row.shape[1]}; choose another tensor_parallel_size"
            )
        num_groups = len(_first_columns(scheme, row.shape[1], in_size))
        size = (num_rows, num_groups)
        # Devices with a single group each may still have different groups.
        is_shared = (scheme.group or row.shape[1]) >= row.shape[1]
        group_axis = None if is_shared else in_axis
        elements, scales = _ELEMENT_DTYPES[scheme.elements], np.dtype(scheme.scale_dtype)
        float32 = np.dtype(np.float32)
        leaves = [
            Leaf((num_rows, in_size // 2 if scheme.is_packed else in_size), elements, row.axes),
            Leaf.grid(*size, FLOAT16_BITS if scales == np.float16 else scales, (out_axis, group_axis)),
        ]
        optional: dict[Role, Leaf] = {
            "global_scale": Leaf((num_rows, 1), float32, (out_axis, None)),
            "zero": Leaf.grid(*size, elements, (out_axis, group_axis)),
            "minimum": Leaf.grid(*size, float32, (out_axis, group_axis)),
        }
        assert tuple(optional) == _GRIDS, "`weight` takes the arrays in this order"
        grids = (leaf for role, leaf in optional.items() if scheme.has(role))
        return (*leaves, *grids, *self.input_leaves(row, shape))

    def input_leaves(self, row: Row, shape: tuple[int, ...]) -> tuple[Leaf, ...]:
        """Return the `MatrixInputs` arrays that the scheme has."""
        (_, in_size), (_, in_axis), float32 = shape, row.axes, np.dtype(np.float32)
        optional: dict[Role, Leaf] = {
            "order": Leaf((in_size,), np.dtype(np.int32), (in_axis,)),
            "input_factor": Leaf((in_size,), float32, (in_axis,)),
            "input_scale": Leaf((), float32, ()),
            "input_zero": Leaf((), float32, ()),
        }
        assert tuple(optional) == _INPUTS, "`_inputs` takes the arrays in this order"
        return tuple(leaf for role, leaf in optional.items() if self.scheme.has(role))

    def inputs(self, group_size: int, *arrays: Any) -> MatrixInputs:
        """Return column order, factors and quantisation as the scheme has them, whatever the group size."""
        return self._inputs(*arrays)

    def _inputs(self, *arrays: Any) -> MatrixInputs:
        """Return column order, factors and quantisation for the arrays in `input_leaves`, or for their shapes."""
        optional = iter(arrays)
        arrays_or_none = (next(optional) if self.scheme.has(role) else None for role in _INPUTS)
        fields: list[Any] = [*arrays_or_none, self.scheme.activation]
        return MatrixInputs(*fields)

    def read_inputs(self, row: Row, tensor: StoredTensor) -> MatrixInputs:
        """Read column order, factors and activation scales, in host memory."""
        inputs = self._inputs(*(np.zeros(leaf.shape, leaf.dtype) for leaf in self.input_leaves(row, tensor.shape)))
        if not jax.tree.leaves(inputs):
            return inputs
        parts = self._parts(row, tensor)
        if inputs.order is not None:
            whole = self._parts(row, tensor.whole_rows())
            inputs.order[:] = _sorted_columns(row, whole, self.scheme)[slice(*parts[0].columns)]
        if inputs.factor is not None:
            inputs.factor[:] = _common(row, [part.input_factor() for part in parts], "pre_quant_scale")
        if inputs.scale is not None:
            inputs.scale[...], zero = self._input_scales(parts)
            if inputs.zero is not None:
                inputs.zero[...] = zero
        return inputs

    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Raise: this format is only read from checkpoints, never produced from floats."""
        raise CheckpointError(f"weights must be quantised as the checkpoint's are ({self.scheme}), got floats")

    def weight(self, *leaves: Any) -> StoredMatrix:
        """Return the matrix for the arrays in `leaves`, or for their shapes."""
        elements, scale, *rest = leaves
        optional = iter(rest)
        grids = [next(optional) if self.scheme.has(role) else None for role in _GRIDS]
        fields: list[Any] = [elements, scale, *grids, self._inputs(*optional), self.scheme]
        return StoredMatrix(*fields)

    def convert(self, row: Row, tensor: StoredTensor) -> StoredMatrix:
        """Read a device's shard as it is stored, slab by slab."""
        leaves, inputs = self.leaves(row, tensor.shape, tensor.dtype), self.read_inputs(row, tensor)
        input_arrays = jax.tree.leaves(inputs)
        buffers = [host_buffer(leaf.shape, leaf.dtype) for leaf in leaves[: len(leaves) - len(input_arrays)]]
        matrix = self.weight(*buffers, *input_arrays)

        def add(start: int, elements: NDArray[Any], part: Any, grids: _Grids) -> None:
            """Write a part's elements and grids to the buffers, from row `start` on."""
            rows = slice(start, start + len(elements))
            matrix.elements[rows] = packed(elements) if self.scheme.is_packed else elements
            matrix.scale.view(np.dtype(self.scheme.scale_dtype))[:, rows] = grids.scale.T
            if matrix.zero is not None and grids.zero is not None:
                matrix.zero[:, rows] = grids.zero.T
            if matrix.minimum is not None and grids.minimum is not None:
                matrix.minimum[:, rows] = grids.minimum.T
            if matrix.row_scale is not None:
                matrix.row_scale[rows] = part.global_scale()

        self._each_part(row, tensor, inputs, add)
        return self.weight(*(jax.device_put(buffer, tensor.sharding) for buffer in (*buffers, *input_arrays)))

    def each_slab(self, row: Row, tensor: StoredTensor, leaves: Sequence[Leaf], use: Callable[..., None]) -> None:
        """Read the file's elements: integers are signed, or from 0 to 15 with zero points; e2m1 codes are uint8."""

        def add(start: int, elements: NDArray[Any], part: Any, grids: _Grids) -> None:
            """Pass a part's elements, scales and zero points to `use`, with its first row."""
            scale, zero, minimum = grids
            if self.scheme.has("global_scale"):
                factor = part.global_scale()
                scale = scale.astype(np.float32) / factor if self.scheme.divides else scale.astype(np.float32) * factor
            if self.scheme.elements == "int4" and zero is None and minimum is None:
                elements = elements.view(np.int8) - np.int8(INT4_ZERO)
            if minimum is not None:
                elements, scale, zero = _with_zeros(elements, scale, minimum)
            use(start, elements, scale, zero)

        self._each_part(row, tensor, self.read_inputs(row, tensor), add)

    def _each_part(
        self,
        row: Row,
        tensor: StoredTensor,
        inputs: MatrixInputs,
        use: Callable[[int, NDArray[Any], Any, _Grids], None],
    ) -> None:
        """Call `use(start, elements, part, grids)` slab by slab, with one element per byte and columns in order.

        Args:
            row: the whole tensor.
            tensor: a device's shard, unread.
            inputs: column order of the shard.
            use: function called with a slab's first row, its elements, its part of the file and its grids.
        """
        columns = self._parts(row, tensor)[0].columns
        order = inputs.order

        def add(start: int, part: Any) -> None:
            """Read a part's elements and grids."""
            elements = nibbles(part.elements()) if self.scheme.is_packed else part.elements()
            use(start, elements if order is None else elements[:, order], part, self._grids(row, part, columns))

        read = tensor if order is None else tensor.whole_rows()
        read.each_slice(_slab_rows(read.shape[1]), add)

    def _parts(self, row: Row, tensor: StoredTensor) -> list[QuantizedPart]:
        """Return a tensor's parts; CheckpointError unless all are quantised."""
        parts = [part for part in tensor.parts if isinstance(part, QuantizedPart)]
        if len(parts) < len(tensor.parts):
            raise CheckpointError(
                f"{row.hf_names[0]} must be quantised as the checkpoint's is ({self.scheme}), got floats; "
                f"give tensors by their names in such a checkpoint"
            )
        return parts

    def _grids(self, row: Row, part: QuantizedPart, columns: tuple[int, int]) -> _Grids:
        """Return a part's scales, zero points and minima, for each column group on a device with these `columns`."""
        start, stop = columns
        firsts = start + _first_columns(self.scheme, row.shape[1], stop - start)
        groups = firsts // (self.scheme.group or row.shape[1])
        zero = _columns(part.zero(), groups) if self.scheme.has("zero") else None
        minimum = _columns(part.minimum(), groups) if self.scheme.has("minimum") else None
        return _Grids(_columns(part.scale(), groups), zero, minimum)

    def _input_scales(self, parts: Sequence[QuantizedPart]) -> tuple[np.float32, np.float32]:
        """Return one activation scale and zero point whose range covers the ranges of all parts, as in vLLM."""
        scales = [part.input_scale() for part in parts]
        is_e2m1 = self.scheme.activation is not None and self.scheme.activation.elements == "e2m1"
        if is_e2m1 and not self.scheme.divides:  # a scale of scales, whose reciprocal multiplies
            return np.float32(1) / max(scales), np.float32(0)
        if not self.scheme.has("input_zero"):
            return min(scales) if is_e2m1 else max(scales), np.float32(0)
        zeros = [part.input_zero() for part in parts]
        if len({*zip(scales, zeros, strict=True)}) == 1:
            return scales[0], zeros[0]
        low = min(scale * (-128 - zero) for scale, zero in zip(scales, zeros, strict=True))
        high = max(scale * (127 - zero) for scale, zero in zip(scales, zeros, strict=True))
        scale = (high - low) / np.float32(255)
        return scale, np.round(-128 - low / scale)


_DTYPES_WITH_ZEROS: dict[str, DTypeLike] = {"int4": jnp.uint4, "int8": jnp.int8}
_NATIVE_DTYPES: dict[str, DTypeLike] = {
    "int4": jnp.int4,
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "e2m1": jnp.float4_e2m1fn,
}
_ELEMENT_DTYPES = {
    "int4": np.dtype(np.uint8),
    "e2m1": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "e4m3": np.dtype(jnp.float8_e4m3fn),
}


def _group_size(scheme: Scheme, whole_size: int, in_size: int) -> int:
    """Return how many consecutive columns on a device share a scale; it divides the device's `in_size` columns."""
    group = scheme.group or whole_size
    return in_size if group >= whole_size else math.gcd(in_size, group)


def _slab_rows(in_size: int) -> int:
    """Return the slab size in rows, a multiple of the panel size, for `in_size` columns."""
    return max(PANEL_ROWS, _SLAB_SIZE // in_size // PANEL_ROWS * PANEL_ROWS)


def _first_columns(scheme: Scheme, whole_size: int, in_size: int) -> NDArray[np.int64]:
    """Return the first column of each group on a device.

    Args:
        scheme: the matrix's scheme.
        whole_size: the matrix's columns.
        in_size: the device's columns.
    """
    return np.arange(0, in_size, _group_size(scheme, whole_size, in_size))


def _columns(array: NDArray[Any], groups: NDArray[np.int64]) -> NDArray[Any]:
    """Return an array's columns for these groups; a single column serves all groups."""
    return array if array.shape[1] == 1 else array[:, groups]


def _with_zeros(
    elements: NDArray[Any], scale: NDArray[np.float32], minimum: NDArray[np.float32]
) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32]]:
    """Convert minima to zero points, which need not be integers; return elements, scales and zero points.

    A group with scale 0 has a single value, minus its minimum: its elements become 0, its zero point 1 and its scale
    the minimum.
    """
    is_flat = scale == 0
    zero = np.divide(minimum, scale, out=np.ones_like(scale), where=~is_flat)
    if is_flat.any():
        elements = elements * ~np.repeat(is_flat, elements.shape[1] // scale.shape[1], axis=1)
    return elements, np.where(is_flat, minimum, scale), zero


def _common(row: Row, arrays: Sequence[NDArray[Any]], what: str) -> NDArray[Any]:
    """Return the array that all parts of a fused tensor have in common; CheckpointError if they differ.

    Args:
        row: the tensor, for the message.
        arrays: one array per part.
        what: name of the array, for the message.
    """
    if any(not np.array_equal(array, arrays[0]) for array in arrays):
        raise CheckpointError(
            f"{', '.join(dict.fromkeys(row.hf_names))} must have the same {what}, as they are one matmul, got "
            f"different ones; quantise the model without it"
        )
    return arrays[0]


def _sorted_columns(row: Row, parts: Sequence[QuantizedPart], scheme: Scheme) -> NDArray[np.int32]:
    """Return a whole matrix's column indices sorted by group; CheckpointError if groups differ in size.

    Args:
        row: the tensor.
        parts: its quantised parts, whose columns have the same groups.
        scheme: their scheme.
    """
    group_of = _common(row, [part.column_groups() for part in parts], "order of columns (g_idx)")
    size, order = scheme.group or row.shape[1], np.argsort(group_of, kind="stable").astype(np.int32)
    if (group_of[order] != np.arange(len(order)) // size).any():
        groups, counts = np.unique(group_of, return_counts=True)
        raise CheckpointError(
            f"g_idx of {row.hf_names[0]} must name each group for {size} of {len(order)} columns, the last one for the "
            f"rest, got {groups[0]} to {groups[-1]} for {counts.min()} to {counts.max()} each"
        )
    return order
