"""Interface between the operation and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped, UInt8
from numpy.typing import NDArray

PACKED = ("int4", "e2m1")  # kinds of elements of which two share a byte
INT4_ZERO = 8  # zero point of four bits where there are no others

FLOAT16_BITS = np.dtype(np.uint16)  # dtype of scales that are float16, held as their bits: TPU kernels take no float16


def packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return bytes of the first half of the columns in the low bits and of the second half in the high ones."""
    low, high = np.split(codes, 2, axis=-1)
    return (low | high << 4).astype(np.uint8, copy=False)


def unpacked(pairs: UInt8[Array, "*rows in_bytes"]) -> UInt8[Array, "*rows in"]:
    """Return the elements of bytes, from 0 to 15."""
    return jnp.concatenate([pairs & 15, pairs >> 4], axis=-1)


def e2m1_floats(codes: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return the values of codes with a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    size = (codes & 7).astype(jnp.float32)
    size = jnp.maximum(size * 0.5, jnp.maximum(size - 2, size * 2 - 8))
    return size * (1 - (codes & 8).astype(jnp.float32) * 0.25)


def scale_floats(scale: Shaped[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return scales in float32. Bits of float16 are decoded as integers: TPUs would make its subnormal numbers zero."""
    if scale.dtype != FLOAT16_BITS:
        return scale.astype(jnp.float32)
    bits = scale.astype(jnp.int32)
    size = bits & 0x7FFF
    rebias = jnp.where(size < 0x7C00, 112, 224) << 23  # 224 for infinity and NaN
    wide = lax.bitcast_convert_type((size << 13) + rebias, jnp.float32)
    wide = jnp.where(size < 0x400, size.astype(jnp.float32) * 2.0**-24, wide)
    return jnp.where(bits < 0x8000, wide, -wide)


@dataclass(frozen=True)
class Problem:
    """Static facts of a call, by which a backend decides if it can run it.

    Attributes:
        num_rows: number of rows of x, T.
        num_outputs: rows of the matrix, N.
        num_inputs: columns of the matrix, K.
        num_groups: number of groups of columns; 1 if each row has one scale.
        elements: kind of the elements, such as "int4".
        has_zero: True if groups have zero points.
        has_minimum: True if groups have minima.
        dtype: dtype of the rows.
        scale_dtype: dtype of the scales.
        result_dtype: dtype of the results.
        platform: platform that is compiled for.
    """

    num_rows: int
    num_outputs: int
    num_inputs: int
    num_groups: int
    elements: str
    has_zero: bool
    has_minimum: bool
    dtype: jnp.dtype
    scale_dtype: jnp.dtype
    result_dtype: jnp.dtype
    platform: str

    @property
    def group_size(self) -> int:
        """Number of consecutive columns that share a scale."""
        return self.num_inputs // self.num_groups

    @property
    def per_byte(self) -> int:
        """Number of elements in a byte, each of another part of the columns."""
        return 2 if self.elements in PACKED else 1

    def block_groups(self, columns: int) -> int:
        """Return the number of groups that a block of so many columns has a part of."""
        return max(1, columns // self.group_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of elements."""
        return self.num_inputs // self.per_byte

    @property
    def is_scaled(self) -> bool:
        """True if elements are scaled before they are multiplied, and not their sums, by the one scale of each row."""
        return self.num_groups > 1 or self.has_minimum

    @property
    def offset_bytes(self) -> int:
        """Bytes of a zero point or a minimum; 0 if there are none."""
        return 1 if self.has_zero else 4 * self.has_minimum

    @property
    def matrix_bytes(self) -> int:
        """Bytes of elements and grids."""
        grid_bytes = self.scale_dtype.itemsize + self.offset_bytes
        return self.num_outputs * (self.row_bytes + self.num_groups * grid_bytes)


class Quantized(NamedTuple):
    """Matrices of all layers.

    Attributes:
        elements: elements, or bytes with two of them.
        scale: scale of each row's groups of columns; `FLOAT16_BITS` of float16.
        zero: zero points of the groups; None for those of the elements' kind.
        kind: kind of the elements: "int8", "e4m3", "int4" or "e2m1".
        minimum: minima of the groups, where there are no zero points.
    """

    elements: Shaped[Array, "layers out in_bytes"]
    scale: Shaped[Array, "layers groups out"]
    zero: Shaped[Array, "layers groups out"] | None
    kind: str
    minimum: Float[Array, "layers groups out"] | None = None

    @property
    def offset(self) -> Shaped[Array, "layers groups out"] | None:
        """Zero points or minima."""
        return self.minimum if self.zero is None else self.zero

    def problem(self, x: Float[Array, "T in"], result_dtype: jnp.dtype, platform: str) -> Problem:
        """Return the facts of the product with x."""
        _, num_outputs, row_bytes = self.elements.shape
        sizes = (x.shape[0], num_outputs, row_bytes * (2 if self.kind in PACKED else 1), self.scale.shape[1])
        dtypes, has = (x.dtype, self.scale.dtype, result_dtype), (self.zero is not None, self.minimum is not None)
        return Problem(*sizes, self.kind, *has, *dtypes, platform)


@runtime_checkable
class Backend(Protocol):
    """Module that multiplies quantised matrices in one particular way."""

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return the reason why this backend cannot run the problem, or None if it can."""

    def multiply(
        self, problem: Problem, x: Float[Array, "T K"], matrix: Quantized, layer: Int[Array, ""]
    ) -> Float[Array, "T N"]:
        """Return the products in float32 or the dtype of the results."""
