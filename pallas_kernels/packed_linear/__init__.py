"""Products with matrices packed for the native CPU kernels: any number of tokens, float32, bfloat16 or int8 weights.

A packed matrix stores 16 rows side by side, `[ceil(N / 16), K, 1, 16]`, so that weights stream through the processor in
order and are converted on the way. A gated matrix, the rows of a gate followed by as many rows that it gates, stores 8
of each side by side, `[ceil(N / 2 / 8), K, 2, 8]`: its product is SwiGLU (Shazeer 2020), applied as soon as the sums
are done. A token's result is bit-identical whatever other tokens there are.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from math import prod
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Shaped
from numpy.typing import NDArray

from jaxserve.pallas_kernels import native

__all__ = ["PANEL_ROWS", "PackedMatrix", "Packer", "multiply", "pack", "rows", "unpack", "unsupported"]

PANEL_ROWS = 16
WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix `[N, K]`, see `pack`."""

    weights: Shaped[Array, "panels K parts rows"]  # two parts if it is gated, else one
    scales: Float[Array, "panels blocks parts rows"]  # no blocks unless weights are int8
    num_outputs: int = field(metadata={"static": True})  # outputs of the product: N, or N / 2 if it is gated

    @property
    def shape(self) -> tuple[int, int]:
        """Shape `[N, K]`."""
        _, K, parts, _ = self.weights.shape
        return (parts * self.num_outputs, K)

    @property
    def gated(self) -> bool:
        """Return whether the product is `silu(x @ gate.T) * (x @ up.T)`; the rows are those of gate, then of up."""
        return bool(self.weights.shape[2] == 2)


def unsupported(dtype: DTypeLike, platform: str) -> str | None:
    """Return the reason why matrices of a dtype cannot be packed and multiplied on a platform, or None if they can."""
    if platform != "cpu":
        return "packed matrices are for CPUs"
    if jnp.dtype(dtype).name not in WEIGHT_DTYPES:
        return f"weights must be one of {WEIGHT_DTYPES}, not {jnp.dtype(dtype).name}"
    return native.unavailable()


def pack(
    weight: Shaped[Array, "N K"], scales: Float[Array, "N blocks"] | None = None, *, gated: bool = False
) -> PackedMatrix:
    """Pack a matrix stored [out, in]; with `scales` it stands for `weight[n, k] * scales[n, k // (K / blocks)]`."""
    N, K = weight.shape
    packer = Packer(N, K, weight.dtype, 0 if scales is None else scales.shape[1], gated=gated)
    packer.write(0, weight, scales)
    return packer.matrix()


class Packer:
    """Packer of a matrix `[N, K]` some rows at a time, so that memory never holds it in another form.

    Args:
      N: number of rows, the outputs of the product.
      K: number of columns.
      dtype: dtype of the weights.
      num_blocks: scales per row; none by default.
      gated: True if the product is to be SwiGLU, see `PackedMatrix.gated`.
    """

    def __init__(self, N: int, K: int, dtype: DTypeLike, num_blocks: int = 0, *, gated: bool = False) -> None:
        if (jnp.dtype(dtype) == jnp.int8) != (num_blocks > 0):
            raise ValueError(f"int8 weights, and they alone, must have scales, got {dtype} and {num_blocks} blocks")
        if num_blocks and K % num_blocks:
            raise ValueError(f"each row's {K} weights must divide into {num_blocks} blocks")
        num_parts = 2 if gated else 1
        if N % num_parts:
            raise ValueError(f"a gated matrix must have an even number of rows, got {N}")
        self._num_outputs = N // num_parts
        self._weights = _empty_panels(self._num_outputs, num_parts, K, dtype)
        self._scales = _empty_panels(self._num_outputs, num_parts, num_blocks, jnp.float32)

    def write(self, start: int, weight: ArrayLike, scales: ArrayLike | None = None) -> None:
        """Write rows from `start` on, best whole panels. Threads may write different rows."""
        self._write(self._weights, start, np.asarray(weight))
        if scales is not None:
            self._write(self._scales, start, np.asarray(scales))

    def _write(self, panels: NDArray[Any], start: int, rows: NDArray[Any]) -> None:
        for part in range(panels.shape[2]):
            offset = part * self._num_outputs - start  # index in `rows` of the part's first row
            low, high = max(0, offset), min(len(rows), offset + self._num_outputs)
            if low < high:
                _write_panels(panels[:, :, part], low - offset, rows[low:high])

    def matrix(self, sharding: Sharding | None = None) -> PackedMatrix:
        """Return the packed matrix, which takes over the memory, on the default or another sharding."""
        weights, scales = (jax.device_put(panels, sharding) for panels in (self._weights, self._scales))
        return PackedMatrix(weights, scales, self._num_outputs)


def unpack(matrix: PackedMatrix) -> tuple[Shaped[Array, "N K"], Float[Array, "N blocks"]]:
    """Invert `pack`; without scales, `blocks` is 0."""
    return _from_panels(matrix.weights, matrix.num_outputs), _from_panels(matrix.scales, matrix.num_outputs)


def multiply(
    matrix: PackedMatrix,
    x: Float[Array, "T K"],
    *,
    rms_norm: tuple[Float[Array, " K"], float] | None = None,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "T out"] | None = None,
) -> Float[Array, "T out"]:
    """Return `x @ matrix.T + bias`, SwiGLU of it if the matrix is gated, `+ residual`: in float32, by one call.

    Args:
      matrix: packed matrix `[N, K]`.
      x: inputs.
      rms_norm: weight and epsilon: x is replaced by x / sqrt(mean(x^2) + epsilon) * weight.
      bias: bias of the outputs before SwiGLU; none by default.
      residual: summand of the result; none by default.

    Raises:
      ValueError: shapes do not fit.
      RuntimeError: the native kernels are missing; see `unsupported`.
    """
    if (reason := native.unavailable()) is not None:
        raise RuntimeError(reason)
    norm, eps = rms_norm or (None, 0.0)
    N, K = matrix.shape
    out = (x.shape[0], matrix.num_outputs)
    if x.shape[1] != K:
        raise ValueError(f"x {x.shape} does not fit a matrix {matrix.shape}")
    call = jax.ffi.ffi_call(native.LINEAR, jax.ShapeDtypeStruct(out, jnp.float32))
    y: Array = call(
        x.astype(jnp.float32),
        matrix.weights,
        matrix.scales,
        _operand("norm", norm, (K,)),
        _operand("bias", bias, (N,)),
        _operand("residual", residual, out),
        eps=np.float32(eps),
    )
    return y


def _operand(name: str, array: Float[Array, "..."] | None, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return an operand of the native call, an empty array for None."""
    if array is None:
        return jnp.zeros(0, jnp.float32)
    if array.shape != shape:
        raise ValueError(f"a {name} must be {shape}, got {array.shape}")
    return array.astype(jnp.float32)


def rows(matrix: PackedMatrix, row_ids: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Return rows of a matrix that is not gated, scales applied; row ids are clipped to the range."""
    assert not matrix.gated, "a table of rows has no gate"
    row_ids = jnp.clip(row_ids, 0, matrix.num_outputs - 1)
    panel, lane = row_ids // PANEL_ROWS, row_ids % PANEL_ROWS
    found = matrix.weights[panel, :, 0, lane]  # [T, K]
    if not matrix.scales.size:
        return found
    scales = matrix.scales[panel, :, 0, lane]  # [T, blocks]
    blocks = found.reshape(*scales.shape, -1) * scales[:, :, None]
    return blocks.reshape(found.shape)


def _empty_panels(num_outputs: int, num_parts: int, K: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros in anonymous memory: aligned so that XLA takes it over, returned to the system when freed."""
    num_rows, dtype = PANEL_ROWS // num_parts, jnp.dtype(dtype)
    shape = (-(-num_outputs // num_rows), K, num_parts, num_rows)
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize), access=mmap.ACCESS_COPY))


def _write_panels(panels: Shaped[np.ndarray, "panels K rows"], start: int, rows: Shaped[np.ndarray, "N K"]) -> None:
    """Write rows from `start` on: those that complete a panel, whole panels, and those that begin one."""
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
    num_panels, K, parts, num_rows = panels.shape
    rows = panels.transpose(2, 0, 3, 1).reshape(parts, num_panels * num_rows, K)
    return rows[:, :num_outputs].reshape(parts * num_outputs, K)
