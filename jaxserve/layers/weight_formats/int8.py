"""Weight-only int8 by blocks: B consecutive weights in a matrix row share one float32 scale, max|w| / 127.

The format is llama.cpp's Q8_0 with longer blocks: with B = 64 a matrix takes 0.266 times its float32 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Shaped
from numpy.typing import NDArray

from jaxserve.layers.stored_rows import StoredRows
from jaxserve.layers.weight_formats.matrix_inputs import MatrixInputs
from jaxserve.layers.weight_formats.scaled_matrix import ScaledMatrix
from jaxserve.layers.weight_formats.weight_format import Leaf, Row, WeightFormat
from jaxserve.pallas_kernels.elements import INT4_ZERO, unpacked
from jaxserve.pallas_kernels.grouped_matmul import QuantizedStack
from jaxserve.weights import Activation

_INT8_MAX = 127  # symmetric: -128 is not used
_BLOCK_SIZE = 64
PAIRS = np.dtype(np.uint8)  # dtype of int4 pairs


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMatrix(ScaledMatrix):
    """A matrix [out, in] in blocks, or a matrix stack: w[o, i] is q[o, i] * scale[i // B, o], in = blocks * B.

    Elements q are int8; or each byte, uint8 [out, in / 2], has two int4 elements q + 8: see `elements.packed`.
    """

    q: Shaped[Array, "*stack out columns"]
    scale: Float32[Array, "*stack blocks out"]

    @property
    def _is_paired(self) -> bool:
        """True if each byte has two int4 elements."""
        return self.q.dtype == PAIRS

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in], after the stack's dimensions."""
        *rows, columns = self.q.shape
        return (*rows, columns * (2 if self._is_paired else 1))

    @property
    def dtype(self) -> jnp.dtype:
        return self.q.dtype

    def quantized(self) -> QuantizedStack:
        """Return the kernels' operand, if this is a stack."""
        return QuantizedStack(self.q, self.scale, None, "int4" if self._is_paired else "int8")

    def rows_arrays(self) -> tuple[StoredRows, ...]:
        """Return elements and scales."""
        return StoredRows(self.q), StoredRows(self.scale, axis=1)

    def dequantize(self, *arrays: Array) -> Float32[Array, "rows in"]:
        """Return matrix rows in float32."""
        q, scale = arrays
        if q.dtype == PAIRS:
            q = unpacked(q).astype(jnp.int8) - INT4_ZERO
        return q.astype(jnp.float32) * jnp.repeat(scale, q.shape[-1] // scale.shape[-1], axis=-1)


class IntegerBlocks(WeightFormat):
    """`BlockMatrix` for every matrix."""

    def __init__(self, *, rounds_inputs: bool = False) -> None:
        """Store whether the inputs of packed matrices are rounded to int8, with a scale per token and block."""
        self.rounds_inputs = rounds_inputs

    def inputs(self, group_size: int, *arrays: Any) -> MatrixInputs:
        """Return the rounding of inputs, block by block."""
        return MatrixInputs(activation=Activation("int8", group_size, dynamic=True) if self.rounds_inputs else None)

    def rounding_inputs(self) -> "IntegerBlocks":
        """Return the format with rounded inputs."""
        return type(self)(rounds_inputs=True)

    def weight(self, *leaves: Any) -> BlockMatrix:
        """Return the matrix for elements and scales."""
        return BlockMatrix(*leaves)


class Int8Blocks(IntegerBlocks):
    """Weight format that stores every matrix in int8 blocks."""

    name = "int8"

    def native_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Return int8, with a scale per block."""
        return jnp.int8

    def leaves(self, row: Row, shape: tuple[int, ...], dtype: np.dtype) -> tuple[Leaf, ...]:
        """Return q and scale, in the whole matrix's blocks unless the shard would cut one in two."""
        num_rows, in_size = shape
        scale = Leaf.grid(num_rows, num_blocks(row, in_size), np.dtype(np.float32), row.axes)
        return Leaf(shape, np.dtype(np.int8), row.axes), scale

    def encode(self, rows: NDArray[Any], leaves: Sequence[Leaf]) -> tuple[NDArray[Any], ...]:
        """Quantise in as many blocks as there are scales."""
        q, scale = leaves
        return quantize(rows, q.shape[1] // scale.shape[0])


FORMAT = Int8Blocks()


def block_size(in_size: int) -> int:
    """Return B for row length `in_size`: its divisor in [32, 128] nearest 64, multiples of 8 first, or `in_size`."""
    divisors = [size for size in range(32, 129) if in_size % size == 0]
    return min(divisors, key=lambda size: (size % 8 != 0, abs(size - _BLOCK_SIZE)), default=in_size)


def num_blocks(row: Row, in_size: int) -> int:
    """Return the number of blocks in a shard with `in_size` columns; its blocks are smaller if it would cut one."""
    block = block_size(row.shape[1])
    return in_size // (block_size(in_size) if in_size % block else block)


@np.errstate(invalid="ignore")  # non-finite weights have no int8; their scale is not finite either
def quantize(
    matrix: Float[np.ndarray, "out in"], block: int | None = None, largest: int = _INT8_MAX
) -> tuple[Int8[np.ndarray, "out in"], Float32[np.ndarray, "out blocks"]]:
    """Round each weight to the nearest multiple of its block's scale: off by at most half a scale. Zeros stay zero.

    Args:
        matrix: weights, whole rows or some of their columns.
        block: weights per scale; None for `block_size`, which needs whole rows.
        largest: maximum element.
    """
    block = block or block_size(matrix.shape[1])
    blocks = matrix.astype(np.float32, copy=False).reshape(len(matrix), -1, block)
    q = np.abs(blocks)  # [out, blocks, B], updated in place
    scale = q.max(axis=-1) / largest  # [out, blocks]
    np.divide(blocks, np.where(scale == 0, 1, scale)[..., None], out=q)
    np.clip(np.round(q, out=q), -largest, largest, out=q)  # the smallest scales are rounded coarsely
    return q.astype(np.int8).reshape(matrix.shape), scale
