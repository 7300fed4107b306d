"""Weight-only int4 by blocks: B consecutive weights in a row of a matrix share one float32 scale, max|w| / 7.

Weights are rounded to the nearest of 15 values. At B = 64 a matrix takes 0.141 of its float32 bytes.
"""

from collections.abc import Sequence
from typing import Any, no_type_check

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int8, Shaped
from numpy.typing import NDArray

from jaxserve.layers.stored_rows import StoredRows
from jaxserve.layers.weight_formats.int8 import num_blocks, quantize
from jaxserve.layers.weight_formats.products import ScaledMatrix
from jaxserve.layers.weight_formats.weight_format import Leaf, Row, WeightFormat
from jaxserve.pallas_kernels.grouped_matmul import QuantizedStack
from jaxserve.pallas_kernels.grouped_matmul.elements import INT4_ZERO, packed, unpacked

_INT4_MAX = 7  # symmetric: -8 is not used
_PAIRS = np.dtype(np.uint8)


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@struct.dataclass
class Int4Matrix(ScaledMatrix):
    """A matrix [out, in] in int4, or a stack of them: w[o, i] is q[o, i] * scale[i // B, o], in = blocks * B.

    Two elements q + 8 are a byte, uint8 [out, in / 2], see `elements.packed`. In blocks of an odd size each
    is an int8.
    """

    q: Shaped[Array, "*stack out columns"]
    scale: Float32[Array, "*stack blocks out"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        *rows, columns = self.q.shape
        return (*rows, columns * (2 if self.q.dtype == _PAIRS else 1))

    def quantized(self) -> QuantizedStack:
        """Return what kernels multiply, if this holds the matrices of all layers."""
        return QuantizedStack(self.q, self.scale, None, "int4" if self.q.dtype == _PAIRS else "int8")

    def rows_arrays(self) -> tuple[StoredRows, ...]:
        """Return elements and scales."""
        return StoredRows(self.q), StoredRows(self.scale, axis=1)

    def dequantize(self, *arrays: Array) -> Float32[Array, "rows in"]:
        """Return rows of the matrix."""
        q, scale = arrays
        if q.dtype == _PAIRS:
            q = unpacked(q).astype(jnp.int8) - INT4_ZERO
        return q.astype(jnp.float32) * jnp.repeat(scale, q.shape[-1] // scale.shape[-1], axis=-1)


class Int4Blocks(WeightFormat):
    """`Int4Matrix` for every matrix."""

    name = "int4"

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Return int4, with a scale per block."""
        return jnp.int4

    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        """Return q and scale, in the blocks of the whole matrix if none of them is cut in two."""
        num_rows, in_size = shape
        blocks = num_blocks(row, in_size)
        is_paired = in_size // blocks % 2 == 0
        elements = Leaf((num_rows, in_size // 2), _PAIRS, row.axes)
        if not is_paired:
            elements = Leaf((num_rows, in_size), np.dtype(np.int8), row.axes)
        return elements, Leaf.grid(num_rows, blocks, np.dtype(np.float32), row.axes)

    def elements(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Quantise in as many blocks as there are scales."""
        return quantize(rows, rows.shape[1] // leaves[1].shape[0], _INT4_MAX)

    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Quantise, and pair the elements."""
        q, scale = self.elements(rows, leaves)
        return (paired(q) if leaves[0].dtype == _PAIRS else q), scale

    def weight(self, *leaves: Any) -> Int4Matrix:
        """Return the pytree of q and scale."""
        return Int4Matrix(*leaves)


FORMAT = Int4Blocks()


def paired(q: Int8[np.ndarray, "out in"]) -> NDArray[np.uint8]:
    """Return two elements in each byte."""
    return packed((q + np.int8(INT4_ZERO)).view(np.uint8))
