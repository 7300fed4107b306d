"""WeightFormat: the storage of matrices as a value."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxserve.pallas_kernels.packed_linear import PANEL_ROWS
from jaxserve.weights import StoredTensor, host_buffer
from jaxserve.weights.rows import TensorRow

_SLAB_SIZE = 64 << 10  # elements that each thread converts at once: they fit in its cache


@runtime_checkable
class Row(TensorRow, Protocol):
    """Facts of a model's tensor that a format needs."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axis of each dimension, which determines its sharding."""

    @property
    def gated(self) -> bool:
        """True if SwiGLU follows the product."""

    @property
    def exact(self) -> bool:
        """True if a matrix is never quantised."""

    @property
    def is_array(self) -> bool:
        """True if what computes with the tensor needs an array of floats."""

    @property
    def num_matrices(self) -> int:
        """Number of matrices of equal shape that follow each other along axis 0."""


class Leaf(NamedTuple):
    """An array that a device holds of a tensor.

    Attributes:
        shape: shape on one device.
        dtype: dtype of the elements.
        axes: logical axis of each dimension, which determines its sharding.
        is_grid: True if the rows of the tensor are the last dimension, as those of scales: kernels of accelerators
            multiply all rows with one scale of each at once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    is_grid: bool = False

    @classmethod
    def grid(cls, num_rows: int, num_groups: int, dtype: np.dtype, axes: tuple[str | None, ...]) -> "Leaf":
        """Return the leaf of a value for each row and group of columns; `axes` are those of rows and groups."""
        return cls((num_groups, num_rows), dtype, axes[::-1], is_grid=True)

    @property
    def axes_by_rows(self) -> tuple[str | None, ...]:
        """Logical axes with that of the rows first."""
        return self.axes[::-1] if self.is_grid else self.axes

    def write(self, buffer: NDArray[Any], start: int, rows: NDArray[Any]) -> None:
        """Write some rows, [rows, ...], into a buffer of this leaf."""
        (np.swapaxes(buffer, 0, 1) if self.is_grid else buffer)[start : start + len(rows)] = rows


@runtime_checkable
class FormatChoice(Protocol):
    """Choice of a format for each tensor; a WeightFormat chooses itself."""

    name: str

    def at(self, row: Row) -> "WeightFormat | None":
        """Return the format of a tensor; None if it is plain."""

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike | None:
        """Return the dtype of elements that native CPU kernels multiply; see `WeightFormat.native_dtype`."""


class WeightFormat(ABC):
    """Storage of matrices: the arrays that a tensor becomes, their computation, and the pytree that multiplies.

    Checkpoints are read by the names and shapes of the row, and random weights are converted as loaded ones are.

    Attributes:
        name: name in messages and in `quantization`.
    """

    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def at(self, row: Row) -> "WeightFormat | None":
        """Return the format of a tensor: this one, or None if the tensor is plain."""
        return self if row.is_matrix and not row.exact else None

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike | None:
        """Return the dtype of the elements if native CPU kernels multiply them, else None.

        They take floats alone, int8 with scales, and int4 or uint4 with scales and perhaps zero points: the leaves of
        a matrix, in this order.

        Args:
            dtype: dtype of activations, and of plain weights.
        """
        return None

    @abstractmethod
    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        """Return the arrays of a device.

        Args:
            row: the whole tensor.
            shape: shape of the device's part of it.
            dtype: dtype of plain weights.
        """

    @abstractmethod
    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Return some rows of each leaf from the same rows of the tensor."""

    def each_slab(self, row: Row, tensor: StoredTensor, leaves: Sequence[Leaf], use: Callable[..., None]) -> None:
        """Call `use(start, *elements)` for some rows after others of a matrix, from several threads at once.

        Args:
            row: the whole tensor.
            tensor: a device's part of it, unread.
            leaves: leaves of this part.
            use: function of the first row, and of what native kernels take, see `native_dtype`.
        """
        tensor.each_slab(slab_rows(tensor.shape[1]), lambda start, rows: use(start, *self.elements(rows, leaves)))

    def elements(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Return some rows of what native kernels take, see `native_dtype`; by default what `encode` returns.

        Args:
            rows: the same rows of the tensor.
            leaves: leaves of the whole matrix.
        """
        return self.encode(rows, leaves)

    @abstractmethod
    def weight(self, *leaves: Any) -> Any:
        """Return the leaf of the parameter tree, a `Matrix` or an array, around arrays or their shapes."""

    def convert(self, row: Row, tensor: StoredTensor) -> Any:
        """Read a device's part of a tensor; slab by slab, so that the host never holds it in both forms."""
        leaves = self.leaves(row, tensor.shape, tensor.dtype)
        buffers = [host_buffer(leaf.shape, leaf.dtype) for leaf in leaves]

        def add(start: int, rows: NDArray[Any]) -> None:
            for leaf, buffer, encoded in zip(leaves, buffers, self.encode(rows, leaves), strict=True):
                leaf.write(buffer, start, encoded)

        tensor.each_slab(slab_rows(tensor.shape[1]), add)
        return self.weight(*(jax.device_put(buffer, tensor.sharding) for buffer in buffers))


def slab_rows(in_size: int) -> int:
    """Return the rows of a slab, a multiple of the panel size of packed matrices."""
    return PANEL_ROWS * max(1, _SLAB_SIZE // (PANEL_ROWS * in_size))
