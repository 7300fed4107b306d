"""Matrices packed in panels for the native CPU kernels.

A packed matrix stores 16 rows side by side in a panel, `[ceil(N / 16), K, 1, 16]`, so that weights stream through the
processor in order and are converted on the way. A gated matrix, with all gate rows before all up rows, stores 8 gate
rows and 8 up rows side by side, `[ceil(N / 2 / 8), K, 2, 8]`: its matmul is followed by SwiGLU (Shazeer 2020), applied
as soon as the sums are done. For `grouped_matmul`, matrices with equal shapes may be packed one after the other,
each in its own panels.

In formats with 8 and 4 bits each group of consecutive columns has a scale per row. Integers may have zero points too:
an element q stands for `(q - zero) * scale`. Consecutive elements in a row form a word, the first element in the lowest
bits: four int8 elements in an int32; or eight int4 elements, shifted to 0 to 15, or e2m1 codes, in a uint32. Each group
starts a new word.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Shaped
from numpy.typing import NDArray

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.elements import e2m1_floats
from jaxserve.pallas_kernels.narrow_floats import tie_to_index

PANEL_ROWS = 16
# Formats in the order of the native WeightFormat; elements of "int4" are signed, those of "uint4" have zero points.
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4", "float8_e4m3fn", "float4_e2m1fn", "uint4")
_LOWEST = {"int4": -8, "uint4": 0}  # elements that are stored as 0 in words
_WORD_DTYPES: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.int32),
    "int4": np.dtype(np.uint32),
    "uint4": np.dtype(np.uint32),
    "float4_e2m1fn": np.dtype(np.uint32),
}
_WORD_COLUMNS: dict[np.dtype[Any], int] = {np.dtype(np.int32): 4, np.dtype(np.uint32): 8}  # elements per word
_GROUPED = (*_WORD_DTYPES, "float8_e4m3fn")  # dtypes with scales


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMatrix:
    """Matrix `[N, K]`, or several of equal shape, in panels of 16 rows for the native CPU kernels; `pack` makes it."""

    weights: Shaped[Array, "panels K parts rows"]  # two parts if it is gated, else one; integers have words for K
    scales: Float[Array, "panels groups parts rows"]  # no groups unless weights have 8 or 4 bits
    zeros: Float[Array, "panels zeros parts rows"]  # zero points for elements as stored, or none
    num_outputs: int = field(metadata={"static": True})  # outputs: N, or N / 2 if it is gated
    num_inputs: int = field(metadata={"static": True})  # K
    num_matrices: int = field(default=1, metadata={"static": True})
    dtype: str = field(default="float32", metadata={"static": True})  # one of WEIGHT_DTYPES

    @property
    def shape(self) -> tuple[int, int]:
        """Shape `[N, K]` for all matrices together."""
        return (self.num_matrices * self.weights.shape[2] * self.num_outputs, self.num_inputs)

    @property
    def gated(self) -> bool:
        """True if the matmul gives `silu(x @ gate.T) * (x @ up.T)`; the matrix has all gate rows before all up rows."""
        return bool(self.weights.shape[2] == 2)

    @property
    def word_columns(self) -> int | None:
        """Elements per word, 4 or 8; None if weights are not in words."""
        return _WORD_COLUMNS.get(self.weights.dtype)


def unsupported(dtype: DTypeLike, platform: str) -> str | None:
    """Return the reason why matrices with this dtype cannot be packed for `platform` ("cpu"), or None if they can."""
    if platform != "cpu":
        return "packed matrices are for CPUs"
    if jnp.dtype(dtype).name not in WEIGHT_DTYPES:
        return f"weights must be one of {WEIGHT_DTYPES}, not {jnp.dtype(dtype).name}"
    return native.unavailable()


def pack(
    weight: Shaped[ArrayLike, "N K"],
    scales: Float[ArrayLike, "N groups"] | None = None,
    zeros: Shaped[ArrayLike, "N groups"] | None = None,
    *,
    gated: bool = False,
    num_matrices: int = 1,
) -> PackedMatrix:
    """Pack a matrix `[out, in]`, or `num_matrices` matrices one after the other, for the native kernels.

    With `scales` the matrix is `(weight[n, k] - zeros[n, g]) * scales[n, g]` with `g = k // (K / groups)`.

    Args:
      weight: floats, or elements with 8 or 4 bits and `scales`.
      scales: scale for each row and each group of consecutive columns.
      zeros: zero points, shaped like `scales`; only for integers.
      gated: True if SwiGLU follows the matmul, see `PackedMatrix.gated`.
      num_matrices: number of matrices among which the rows are divided.
    """
    N, K = np.shape(weight)
    num_groups = 0 if scales is None else np.shape(scales)[1]
    dtype = jnp.result_type(weight)
    shapes = abstract(N, K, dtype, num_groups, num_matrices=num_matrices, gated=gated, has_zeros=zeros is not None)
    packer = Packer(shapes)
    packer.write(0, weight, scales, zeros)
    return packer.matrix()


def abstract(
    N: int,
    K: int,
    dtype: DTypeLike,
    num_groups: int = 0,
    *,
    num_matrices: int = 1,
    gated: bool = False,
    has_zeros: bool = False,
) -> PackedMatrix:
    """Return a packed matrix `[N, K]` whose arrays are shapes and dtypes only.

    Args:
      N: number of rows in all matrices together.
      K: number of columns.
      dtype: weight dtype.
      num_groups: scales per row; none by default.
      num_matrices: number of matrices among which the rows are divided.
      gated: True if SwiGLU follows the matmul, see `PackedMatrix.gated`.
      has_zeros: True if groups of integers have zero points; they are 0 by default.
    """
    name = jnp.dtype(dtype).name
    if (name in _GROUPED) != (num_groups > 0):
        raise ValueError(f"{_GROUPED}, and no other dtypes, must have scales, got {name} in {num_groups} groups")
    if num_groups and K % num_groups:
        raise ValueError(f"each row's {K} weights must divide into {num_groups} groups")
    if has_zeros and name not in (*_LOWEST, "int8"):
        raise ValueError(f"only integer weights can have zero points, got {dtype}")
    num_parts = 2 if gated else 1
    if N % num_matrices:
        raise ValueError(f"the rows must divide into {num_matrices} matrices, got {N}")
    if N // num_matrices % num_parts:
        raise ValueError(f"a gated matrix must have an even number of rows, got {N // num_matrices}")
    num_outputs, num_rows = N // num_matrices // num_parts, PANEL_ROWS // num_parts
    columns, stored = K, _WORD_DTYPES.get(name, jnp.dtype(dtype))
    if name in _WORD_DTYPES:
        columns = num_groups * -(-K // num_groups // _WORD_COLUMNS[stored])
    num_zeros = num_groups if has_zeros or name == "uint4" else 0  # by default the kernel subtracts int4's zero point
    arrays: Any = (
        jax.ShapeDtypeStruct((num_matrices * -(-num_outputs // num_rows), size, num_parts, num_rows), dtype)
        for size, dtype in ((columns, stored), (num_groups, jnp.float32), (num_zeros, jnp.float32))
    )
    weights, scales, zeros = arrays
    return PackedMatrix(weights, scales, zeros, num_outputs, K, num_matrices, name)


class Packer:
    """Packer that takes a matrix `[N, K]` some rows at a time, so that memory never holds a second copy.

    Args:
      shapes: shapes of the packed matrix, from `abstract`.
    """

    def __init__(self, shapes: PackedMatrix) -> None:
        """Allocate zeros with the packed matrix's `shapes`."""
        self._shapes = shapes
        self._weights, self._scales, self._zeros = map(_empty, (shapes.weights, shapes.scales, shapes.zeros))

    def write(
        self, start: int, weight: ArrayLike, scales: ArrayLike | None = None, zeros: ArrayLike | None = None
    ) -> None:
        """Pack some rows into the matrix; threads may write different rows simultaneously.

        Args:
          start: index of the first row; multiples of 16 are fastest.
          weight: rows, `[n, K]`; e2m1 codes as uint8.
          scales: their scales, `[n, groups]`, or None.
          zeros: their zero points, `[n, groups]`, or None.
        """
        elements, lowest = np.asarray(weight), _LOWEST.get(self._shapes.dtype, 0)
        in_words = self._shapes.word_columns is not None
        self._write(self._weights, start, self._words(elements, lowest) if in_words else elements)
        if scales is not None:
            floats = np.asarray(scales, np.float32)
            self._write(self._scales, start, floats if in_words else _not_finite(elements, floats))
        if zeros is not None:
            self._write(self._zeros, start, np.asarray(zeros, np.float32) - np.float32(lowest))

    def _words(self, elements: NDArray[Any], lowest: int) -> NDArray[Any]:
        """Convert elements, `[n, K]`, to 32-bit words, `[n, words]`, each group padded to whole words."""
        dtype, columns = self._weights.dtype, self._shapes.word_columns
        assert columns is not None, "there are words"
        shifted = (elements.astype(np.int8) - np.int8(lowest)).view(np.uint8)
        groups = shifted.reshape(len(elements), self._shapes.scales.shape[1], -1)
        padding = -groups.shape[2] % columns
        padded = np.pad(groups, ((0, 0), (0, 0), (0, padding))) if padding else groups
        bytes_of_words = padded if columns == 4 else padded[..., ::2] | padded[..., 1::2] << 4
        return np.ascontiguousarray(bytes_of_words).view(dtype.newbyteorder("<")).reshape(len(elements), -1)

    def _write(self, panels: NDArray[Any], start: int, rows: NDArray[Any]) -> None:
        """Write rows, from matrix row `start` on, to the panels `[panels, columns, parts, rows]` that contain them."""
        num_parts, num_outputs, end = panels.shape[2], self._shapes.num_outputs, start + len(rows)
        matrices = panels.reshape(self._shapes.num_matrices, -1, *panels.shape[1:])
        for block in range(start // num_outputs, -(-end // num_outputs)):
            matrix, part = divmod(block, num_parts)
            offset = block * num_outputs - start  # index in `rows` at which the part starts
            low, high = max(0, offset), min(len(rows), offset + num_outputs)
            _write_panels(matrices[matrix, :, :, part], low - offset, rows[low:high])

    @property
    def panels(self) -> NDArray[Any]:
        """The weights' panels."""
        return self._weights

    def matrix(self, sharding: Sharding | None = None) -> PackedMatrix:
        """Return the packed matrix on a sharding, the default device if None; it takes over the packer's memory."""
        panels = (self._weights, self._scales, self._zeros)
        weights, scales, zeros = (jax.device_put(array, sharding) for array in panels)
        return replace(self._shapes, weights=weights, scales=scales, zeros=zeros)


class Unpacked(NamedTuple):
    """Matrix rows, as `pack` takes them; scales and zeros have 0 groups if the matrix has none.

    Int4 elements are uint8, from 0 to 15; their zero points are 8 if the matrix stores none. E2m1 codes are uint8.
    """

    weight: Shaped[Array, "N K"]
    scales: Float[Array, "N groups"]
    zeros: Float[Array, "N groups"]


def unpack(matrix: PackedMatrix) -> Unpacked:
    """Return the rows, scales and zero points of a matrix that `pack` packed, except for several matrices in one."""
    assert matrix.num_matrices == 1, "groups of matrices are only multiplied"
    weight, scales, zeros = (
        _from_panels(panels, matrix.num_outputs) for panels in (matrix.weights, matrix.scales, matrix.zeros)
    )
    if matrix.word_columns is not None:
        weight = _from_words(weight, scales.shape[1], matrix)
    if matrix.dtype == "int4" and not zeros.size:
        zeros = jnp.full_like(scales, -_LOWEST["int4"])
    return Unpacked(weight, scales, zeros)


def rows(matrix: PackedMatrix, row_ids: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Look up rows by id, dequantised, in a packed matrix that is not gated; ids are clipped to the range."""
    assert not matrix.gated, "a table of rows has no gate"
    assert matrix.num_matrices == 1, "a table of rows is one matrix"
    weights, row_ids = tie_to_index(matrix.weights, jnp.clip(row_ids, 0, matrix.num_outputs - 1))
    panel, lane = row_ids // PANEL_ROWS, row_ids % PANEL_ROWS
    found = weights[panel, :, 0, lane]  # [T, K]
    if not matrix.scales.size:
        return found
    scales = matrix.scales[panel, :, 0, lane]  # [T, groups]
    if matrix.word_columns is None:
        return _scaled(found, scales)
    elements = _from_words(found, scales.shape[1], matrix)
    if matrix.dtype == "float4_e2m1fn":
        return _scaled(e2m1_floats(elements.astype(jnp.int32)), scales)
    zeros = jnp.full_like(scales, -_LOWEST.get(matrix.dtype, 0))
    if matrix.zeros.size:
        zeros = matrix.zeros[panel, :, 0, lane]
    return _scaled(elements, scales, zeros)


def _scaled(
    elements: Shaped[Array, "T K"], scales: Float[Array, "T groups"], zeros: Float[Array, "T groups"] | None = None
) -> Float[Array, "T K"]:
    """Dequantise elements: subtract each group's zero point and multiply by its scale."""
    groups = elements.astype(jnp.float32).reshape(*scales.shape, -1)
    shifted = groups if zeros is None else groups - zeros[:, :, None]
    return (shifted * scales[:, :, None]).reshape(elements.shape)


def _from_words(words: Shaped[Array, "T words"], num_groups: int, matrix: PackedMatrix) -> Shaped[Array, "T K"]:
    """Extract int8 elements, or those with 4 bits as uint8, from 32-bit words, without the padding in each group."""
    K = matrix.num_inputs
    if matrix.word_columns == 4:
        elements = jax.lax.bitcast_convert_type(words, jnp.int8)
    else:
        shifts = jnp.arange(0, 32, 4, dtype=jnp.uint32)
        elements = (words[:, :, None] >> shifts[None, None, :] & 15).astype(jnp.uint8)
    return elements.reshape(len(words), num_groups, -1)[:, :, : K // num_groups].reshape(len(words), K)


def _not_finite(elements: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales with NaN for groups that have a NaN among their e4m3 elements, which the kernels do not see."""
    is_nan = elements.view(np.uint8) & 0x7F == 0x7F
    if not is_nan.any():
        return scales
    return np.where(is_nan.reshape(*scales.shape, -1).any(axis=-1), np.float32(np.nan), scales)


def _empty(array: Any) -> NDArray[Any]:
    """Return zeros with the shape and dtype of `array`, in anonymous memory.

    It is aligned so that XLA takes it over, and returned to the system when freed.
    """
    num_bytes = prod(array.shape) * array.dtype.itemsize
    return np.ndarray(array.shape, array.dtype, mmap.mmap(-1, max(1, num_bytes), access=mmap.ACCESS_COPY))


def _write_panels(panels: Shaped[np.ndarray, "panels K rows"], start: int, rows: Shaped[np.ndarray, "N K"]) -> None:
    """Write rows to panels, transposed, from row `start` on; the first and last panel may be written in part."""
    panel_rows = panels.shape[2]
    panel, lane = divmod(start, panel_rows)
    if lane:
        head, rows = np.split(rows, [panel_rows - lane])
        panels[panel, :, lane : lane + len(head)] = head.T
        panel += 1
    whole, rest = divmod(len(rows), panel_rows)
    full = rows[: whole * panel_rows].reshape(whole, panel_rows, rows.shape[1])
    panels[panel : panel + whole] = full.swapaxes(1, 2)
    if rest:
        panels[panel + whole, :, :rest] = rows[-rest:].T


def _from_panels(panels: Shaped[Array, "panels K parts rows"], num_outputs: int) -> Shaped[Array, "N K"]:
    """Return the rows that panels store, without padding: `num_outputs` rows for each part."""
    num_panels, K, parts, num_rows = panels.shape
    rows = panels.transpose(2, 0, 3, 1).reshape(parts, num_panels * num_rows, K)
    return rows[:, :num_outputs].reshape(parts * num_outputs, K)
