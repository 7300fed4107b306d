"""WeightFormat: how devices store matrices."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.layers.weight_formats.matrix_inputs import PLAIN_INPUTS, MatrixInputs
from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS
from jaxserve.weights import StoredTensor, host_buffer
from jaxserve.weights.rows import TensorRow

_SLAB_SIZE = 64 << 10  # elements that each thread converts at once: they fit in its cache


@runtime_checkable
class Row(TensorRow, Protocol):
    """Description of a model tensor for weight formats: a `TensorRow` with its sharding, use and precision."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axis by dimension, which determines its sharding."""

    @property
    def gated(self) -> bool:
        """True if SwiGLU follows the matmul."""

    @property
    def exact(self) -> bool:
        """True if a matrix is never quantised."""

    @property
    def is_array(self) -> bool:
        """True if a layer computes with an array of floats instead of a `Matrix`."""


class Leaf(NamedTuple):
    """An array into which a tensor is converted.

    Attributes:
        shape: shape on one device.
        dtype: dtype of the elements.
        axes: logical axis by dimension, which determines its sharding.
        is_grid: True if the tensor's rows are the last dimension, as in scales: kernels on accelerators read one scale
            for many rows together.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    is_grid: bool = False

    @classmethod
    def grid(cls, num_rows: int, num_groups: int, dtype: np.dtype, axes: tuple[str | None, ...]) -> "Leaf":
        """Return the leaf with a value for each row and column group; `axes` names rows, then groups."""
        return cls((num_groups, num_rows), dtype, axes[::-1], is_grid=True)

    @property
    def axes_by_rows(self) -> tuple[str | None, ...]:
        """Logical axes with the rows first."""
        return self.axes[::-1] if self.is_grid else self.axes

    def write(self, buffer: NDArray[Any], start: int, rows: NDArray[Any]) -> None:
        """Write some rows, [rows, ...], into a buffer for this leaf."""
        (np.swapaxes(buffer, 0, 1) if self.is_grid else buffer)[start : start + len(rows)] = rows


@runtime_checkable
class FormatChoice(Protocol):
    """Format by tensor; a WeightFormat chooses itself."""

    name: str

    def at(self, row: Row) -> "WeightFormat | None":
        """Return a tensor's format; None if it is plain."""

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike | None:
        """Return the element dtype for native CPU kernels; see `WeightFormat.native_dtype`."""

    def rounding_inputs(self) -> "FormatChoice":
        """Return the same formats with inputs rounded to int8, for weights in integers."""


class WeightFormat(ABC):
    """Storage format on devices: the arrays, their computation from a tensor, and the pytree that multiplies.

    Checkpoints are read by the row's names and shapes. Random weights are converted in the same way as loaded ones.

    Attributes:
        name: name in messages and in `quantization`.
        rounds_inputs: True if matmuls round their inputs to int8.
    """

    name: str
    rounds_inputs: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def at(self, row: Row) -> "WeightFormat | None":
        """Return this format, or None if the tensor is plain."""
        return self if row.is_matrix and not row.exact else None

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike | None:
        """Return the element dtype if native CPU kernels multiply this format, else None.

        Kernels read the leaves in this order: only floats; int8 and scales; int4 or uint4, scales and perhaps zero
        points.

        Args:
            dtype: dtype of activations and plain weights.
        """
        return None

    @abstractmethod
    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        """Return a device's arrays.

        Args:
            row: the whole tensor.
            shape: shape of the device's shard.
            dtype: dtype for plain weights.
        """

    def input_leaves(self, row: Row, shape: tuple[int, ...]) -> tuple[Leaf, ...]:
        """Return the last of `leaves`: those that describe a matmul's inputs; none by default."""
        return ()

    def inputs(self, group_size: int, *arrays: Any) -> MatrixInputs:
        """Return the treatment of a packed matrix's inputs.

        Args:
            group_size: number of consecutive columns that share a scale.
            arrays: arrays in `input_leaves`, or their shapes.
        """
        return PLAIN_INPUTS

    def read_inputs(self, row: Row, tensor: StoredTensor) -> MatrixInputs:
        """Read the arrays in `input_leaves` for a device's shard, in host memory."""
        return PLAIN_INPUTS

    def rounding_inputs(self) -> "WeightFormat":
        """Return the format with inputs rounded to int8; by default unchanged, for weights in floats."""
        return self

    @abstractmethod
    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Encode some tensor rows: return the same rows for each leaf."""

    def each_slab(self, row: Row, tensor: StoredTensor, leaves: Sequence[Leaf], use: Callable[..., None]) -> None:
        """Call `use(start, *elements)` slab by slab, from several threads simultaneously.

        Args:
            row: the whole tensor.
            tensor: a device's shard, unread.
            leaves: leaves for this shard.
            use: function called with the first row and the leaves that native kernels read, see `native_dtype`.
        """
        tensor.each_slab(slab_rows(tensor.shape[1]), lambda start, rows: use(start, *self.elements(rows, leaves)))

    def elements(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Return some rows for native kernels, see `native_dtype`; by default the results of `encode`.

        Args:
            rows: the same rows in the tensor.
            leaves: leaves for the whole matrix.
        """
        return self.encode(rows, leaves)

    @abstractmethod
    def weight(self, *leaves: Any) -> Any:
        """Return the parameter, a `Matrix` or an array, around arrays or their shapes."""

    def convert(self, row: Row, tensor: StoredTensor) -> Any:
        """Read a device's shard, slab by slab, so that the host never holds it in both formats."""
        leaves = self.leaves(row, tensor.shape, tensor.dtype)
        buffers = [host_buffer(leaf.shape, leaf.dtype) for leaf in leaves]

        def add(start: int, rows: NDArray[Any]) -> None:
            """Encode rows and write them to the buffers, from row `start` on."""
            for leaf, buffer, encoded in zip(leaves, buffers, self.encode(rows, leaves), strict=True):
                leaf.write(buffer, start, encoded)

        tensor.each_slab(slab_rows(tensor.shape[1]), add)
        return self.weight(*(jax.device_put(buffer, tensor.sharding) for buffer in buffers))


def slab_rows(in_size: int) -> int:
    """Return the slab size in rows, a multiple of the panel size."""
    return PANEL_ROWS * max(1, _SLAB_SIZE // (PANEL_ROWS * in_size))
