"""QuantizedPart: a quantised matrix in a checkpoint, still unread, whose rows and columns devices take."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.weights.errors import CheckpointError
from jaxserve.weights.quantized.packing import (
    element_dtypes,
    matrix_shape,
    nibbles,
    other_shapes,
    read_elements,
    read_scale,
    read_zero,
)
from jaxserve.weights.quantized.scheme import NIBBLES, OPTIONAL, Role, Scheme, Schemes
from jaxserve.weights.rows import TensorRow, hf_shapes
from jaxserve.weights.stored_tensor import MatrixPart, Tensor

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FLOATS_OF_NIBBLES = {
    "e2m1": np.concatenate([_E2M1, -_E2M1]),
    "int4": np.arange(16, dtype=np.float32),
}
INT4_ZERO = 8  # zero point of symmetric int4, whose elements are stored as 0 to 15
# Names that transformers gives to fp8 scales; other tools use other names.
_OTHER_NAMES = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
# Attention scales and tools' private tensors; see `Schemes.kv_cache`.
_EXTRAS = (
    *(f"{projection}_{role}" for projection in "qkv" for role in ("scale", "zero_point")),
    *("kv_scale", "prob_scale", "output_scale", "input_scale", "input_global_scale", "input_zero_point"),
    *("activation_scale", "weight_shape", "g_idx", "weight_g_idx"),
)


@dataclass(frozen=True)
class QuantizedPart(MatrixPart):
    """Some rows and columns of a quantised matrix [O, I]. Conversion to an array dequantises it, to float32.

    Attributes:
        name: name of the matrix.
        scheme: its scheme.
        tensors: stored tensors by role.
        whole: shape of the whole matrix.
    """

    name: str
    scheme: Scheme
    tensors: Mapping[Role, Any]
    whole: tuple[int, int]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the dequantised array."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Approximate size of this part in the file."""
        total = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())
        return total * prod(self.shape) // max(1, prod(self.whole))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        size = self.shape[1]
        elements = self.elements()
        if self.scheme.elements in NIBBLES:
            q = FLOATS_OF_NIBBLES[self.scheme.elements][nibbles(elements)[:, :size]]
        else:
            q = elements.astype(np.float32)
        groups = self.column_groups()
        if self.scheme.has("zero"):
            q -= self.zero()[:, groups].astype(np.float32)
        elif self.scheme.elements == "int4" and not self.scheme.has("minimum"):
            q -= INT4_ZERO
        scale = self.scale().astype(np.float32)
        if self.scheme.has("global_scale"):
            scale = scale / self.global_scale() if self.scheme.divides else scale * self.global_scale()
        w = q * scale[:, groups]
        if self.scheme.has("minimum"):
            w -= self.minimum()[:, groups]
        if self.scheme.has("input_factor"):
            w *= self.input_factor()
        return w.astype(dtype or np.float32, copy=False)

    def elements(self) -> NDArray[Any]:
        """Return the elements as devices hold them: two per byte if they have four bits, signed if eight."""
        return read_elements(self.scheme, self.tensors["elements"], self.rows, self.columns)

    def scale(self) -> NDArray[Any]:
        """Return the scales for these rows and all column groups, [rows, groups]."""
        return read_scale(self.scheme, self.tensors["scale"], self.rows)

    def zero(self) -> NDArray[Any]:
        """Return the zero points for these rows and all column groups, offset like the elements."""
        return read_zero(self.scheme, self.tensors["zero"], self.rows)

    def minimum(self) -> NDArray[Any]:
        """Return the minima for these rows and all column groups, which are subtracted after scaling."""
        return read_scale(self.scheme, self.tensors["minimum"], self.rows)

    def global_scale(self) -> np.float32:
        """Return the scale for the whole tensor, in schemes that have one."""
        return np.float32(np.asarray(self.tensors["global_scale"]).reshape(-1)[0])

    def input_scale(self) -> np.float32:
        """Return the static activation scale, the largest if there are several."""
        return np.float32(np.asarray(self.tensors["input_scale"]).astype(np.float32).max())

    def input_zero(self) -> np.float32:
        """Return the static activation zero point."""
        return np.float32(np.asarray(self.tensors["input_zero"]).reshape(-1)[0])

    def input_factor(self) -> NDArray[np.float32]:
        """Return the factor for each of these columns, which scales activations."""
        return np.asarray(self.tensors["input_factor"]).astype(np.float32)[slice(*self.columns)]

    def column_groups(self) -> NDArray[np.int32]:
        """Return the index of each column's group."""
        group = self.scheme.group or self.whole[1]
        if self.scheme.has("order"):
            order: NDArray[np.int32] = np.asarray(self.tensors["order"]).astype(np.int32)
            if not 0 <= order.min() <= order.max() < (num_groups := -(-self.whole[1] // group)):
                raise CheckpointError(
                    f"g_idx of {self.name} must name one among {num_groups} groups, got {order.min()} to {order.max()}"
                )
            return order[slice(*self.columns)]
        return (np.arange(*self.columns) // group).astype(np.int32)

    def on_host(self, read: Callable[[Tensor], NDArray[Any]]) -> "QuantizedPart":
        """Return the same part, with all stored tensors in host memory."""
        return dataclasses.replace(self, tensors={role: read(t) for role, t in self.tensors.items()})


def quantized_view(
    schemes: Schemes | None, tensors: Mapping[str, Any], specs: Sequence[TensorRow], where: object
) -> dict[str, Any]:
    """Return a checkpoint's tensors with a QuantizedPart for each quantised matrix.

    Args:
        schemes: the checkpoint's schemes; None if it is not quantised.
        tensors: stored tensors by name.
        specs: the model's rows, with the names of unquantised tensors.
        where: path of the checkpoint, for messages.

    Raises:
        CheckpointError: a quantised module lacks tensors, or their dtypes or shapes contradict its scheme.
    """
    if schemes is None:
        return dict(tensors)
    view = dict(tensors)
    parts, missing = {}, []
    names_of_model = {name for row in specs for name in row.hf_names}
    matrices = {name: shape for row in specs if row.is_matrix for name, shape in hf_shapes(row).items()}
    for name, shape in matrices.items():
        if (scheme := schemes.for_tensor(name)) is None:
            continue
        module = name.removesuffix(".weight")
        names = {role: _stored_name(full, tensors) for role, full in scheme.names(module).items()}
        if absent := [full for role, full in names.items() if full not in tensors and role not in OPTIONAL]:
            missing.append(f"{', '.join(absent)} ({scheme.name})")
            continue
        stored = {role: tensors[full] for role, full in names.items() if full in tensors}
        if scheme.has("input_factor") and "input_factor" not in stored:
            stored["input_factor"] = np.ones(matrix_shape(scheme, stored)[1], np.float32)
        parts[name] = part = _part(name, scheme, _unstacked(name, stored) if scheme.stacked else stored)
        if part.whole == shape:  # `load` reports other shapes with those of all tensors
            _check_shapes(part, names)
        for full in (*names.values(), *(f"{module}.{extra}" for extra in _EXTRAS)):
            view.pop(full, None)
        _drop_zero_bias(view, f"{module}.bias", names_of_model)
    if missing:
        raise CheckpointError(
            f"{where} must hold the tensors of its quantization_config ({schemes.method}), got {len(missing)} modules "
            f"without them: {'; '.join(missing[:8])}"
        )
    for name in [name for name in view if name.endswith(tuple(f".{extra}" for extra in _EXTRAS))]:
        del view[name]
    return view | parts


def _stored_name(name: str, tensors: Collection[str]) -> str:
    """Return a tensor's name in the checkpoint, which may be transformers' other name for it."""
    module, _, suffix = name.rpartition(".")
    other = f"{module}.{_OTHER_NAMES.get(suffix, suffix)}"
    return other if name not in tensors and other in tensors else name


@dataclass(frozen=True)
class _StackRows:
    """Stacked matrices [matrices, rows, ...], still unread, as one matrix with all their rows."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, int]:
        num_matrices, num_rows, *inner = self.tensor.shape
        return (num_matrices * num_rows, prod(inner))

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.tensor.dtype)

    def __getitem__(self, index: tuple[slice, slice]) -> NDArray[Any]:
        start, stop, _ = index[0].indices(self.shape[0])
        first, offset = divmod(start, self.tensor.shape[1])
        last, count = max(first, (stop - 1) // self.tensor.shape[1]), stop - start
        if first == last:  # nothing else is read
            source, offset = self.tensor[first : first + 1, offset : offset + count], 0
        else:
            source = self.tensor[first : last + 1]
        return np.asanyarray(source).reshape(-1, self.shape[1])[offset : offset + count, index[1]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.tensor, dtype).reshape(self.shape)


def _unstacked(name: str, tensors: Mapping[Role, Any]) -> dict[Role, Any]:
    """Convert stacked tensors, by role, to matrices with all rows; CheckpointError if their shapes do not fit."""
    elements, scale = (tuple(tensors[role].shape) for role in ("elements", "scale"))
    if len(elements) != 4 or elements[:-1] != scale:
        raise CheckpointError(
            f"the blocks of {name} must be [experts, rows, groups, bytes], and its scales all but the last of these, "
            f"got {elements} and {scale}"
        )
    return {role: _StackRows(tensor) for role, tensor in tensors.items()}


def _part(name: str, scheme: Scheme, tensors: Mapping[Role, Any]) -> QuantizedPart:
    """Return a module's matrix, all rows and columns; CheckpointError if its elements contradict the scheme."""
    dtype = np.dtype(tensors["elements"].dtype)
    if dtype not in (allowed := element_dtypes(scheme)):
        names = " or ".join(sorted(map(str, allowed)))
        raise CheckpointError(f"the elements of {name} must be {names} ({scheme.name}), got {dtype}")
    whole = matrix_shape(scheme, tensors)
    part = QuantizedPart((0, whole[0]), (0, whole[1]), name, scheme, tensors, whole)
    if whole[1] % 2 and scheme.is_packed:
        raise CheckpointError(f"{name} must have an even number of columns for elements of 4 bits, got {whole[1]}")
    return part


def _check_shapes(part: QuantizedPart, names: Mapping[Role, str]) -> None:
    """Raise a CheckpointError if tensors contradict the scheme's shapes; `names` are their names by role."""
    for role, allowed in other_shapes(part.scheme, part.whole).items():
        if role in names and (got := tuple(part.tensors[role].shape)) not in allowed:
            raise CheckpointError(
                f"{names[role]} must have the shape {list(allowed[0])} ({part.scheme}), got {list(got)}; check that "
                f"quantization_config belongs to these weights"
            )


def _drop_zero_bias(view: dict[str, Any], name: str, wanted: Collection[str]) -> None:
    """Drop a bias that the model lacks: some tools write zeros for it."""
    if name in view and name not in wanted:
        if np.any(np.asarray(view[name]).astype(np.float32)):
            raise CheckpointError(f"{name} must be zero, as the model has no such bias, got other values")
        del view[name]
