"""Products with matrices packed for the native CPU kernels: any number of tokens, float32, bfloat16 or int8 weights.

A packed matrix keeps 16 rows side by side, `[ceil(N / 16), K, 1, 16]`, so that weights stream through the processor in
order and are converted as they come. A gated one, the rows of a gate followed by as many that it gates, keeps 8 of each
side by side, `[ceil(N / 2 / 8), K, 2, 8]`: its product is SwiGLU (Shazeer 2020), computed as its sums are done. A
token's result is the same to the bit whatever other tokens there are.
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


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMatrix:
    """A matrix `[N, K]`, see `pack`."""

    weights: Shaped[Array, "panels K parts rows"]  # parts is 2 if it is gated, else 1
    scales: Float[Array, "panels blocks parts rows"]  # blocks is 0 unless weights are int8
    num_outputs: int = field(metadata={"static": True})  # of its product: N, or N / 2 if it is gated

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        _, K, parts, _ = self.weights.shape
        return (parts * self.num_outputs, K)

    @property
    def gated(self) -> bool:
        """Whether its product is `silu(x @ gate.T) * (x @ up.T)`: gate is the first half of its rows, up the second."""
        return bool(self.weights.shape[2] == 2)


def unsupported(dtype: DTypeLike, platform: str) -> str | None:
    """Why matrices of a dtype cannot be packed and multiplied on a platform; None if they can."""
    if platform != "cpu":
        return "packed matrices are for CPUs"
    if jnp.dtype(dtype).name not in WEIGHT_DTYPES:
        return f"weights must be one of {WEIGHT_DTYPES}, not {jnp.dtype(dtype).name}"
    return native.unavailable()


def pack(
    weight: Shaped[Array, "N K"], scales: Float[Array, "N blocks"] | None = None, *, gated: bool = False
) -> PackedMatrix:
    """Packs a matrix stored [out, in]; with `scales` it stands for `weight[n, k] * scales[n, k // (K / blocks)]`."""
    N, K = weight.shape
    packer = Packer(N, K, weight.dtype, 0 if scales is None else scales.shape[1], gated=gated)
    packer.write(0, weight, scales)
    return packer.matrix()


class Packer:
    """Packs a matrix `[N, K]` some rows at a time, so that it need never be held in another form.

    Args:
      N: rows of the matrix, outputs of the product.
      K: its columns.
      dtype: of its weights.
      num_blocks: scales of a row; none by default.
      gated: whether the product is to be SwiGLU, see `PackedMatrix.gated`.
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
        """Rows from `start` on, best whole panels. Threads may write different rows."""
        self._write(self._weights, start, np.asarray(weight))
        if scales is not None:
            self._write(self._scales, start, np.asarray(scales))

    def _write(self, panels: NDArray[Any], start: int, rows: NDArray[Any]) -> None:
        for part in range(panels.shape[2]):
            offset = part * self._num_outputs - start  # of its first row in `rows`
            low, high = max(0, offset), min(len(rows), offset + self._num_outputs)
            if low < high:
                _write_panels(panels[:, :, part], low - offset, rows[low:high])

    def matrix(self, sharding: Sharding | None = None) -> PackedMatrix:
        """The packed matrix, once all rows are written, on the default device or another; it takes the memory over."""
        weights, scales = (jax.device_put(panels, sharding) for panels in (self._weights, self._scales))
        return PackedMatrix(weights, scales, self._num_outputs)


def unpack(matrix: PackedMatrix) -> tuple[Shaped[Array, "N K"], Float[Array, "N blocks"]]:
    """The inverse of `pack`; no blocks where there are no scales."""
    return _from_panels(matrix.weights, matrix.num_outputs), _from_panels(matrix.scales, matrix.num_outputs)


def multiply(
    matrix: PackedMatrix,
    x: Float[Array, "T K"],
    *,
    rms_norm: tuple[Float[Array, " K"], float] | None = None,
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "T out"] | None = None,
) -> Float[Array, "T out"]:
    """`x @ matrix.T + bias`, SwiGLU of it if the matrix is gated, `+ residual`: in float32, by one call.

    Args:
      matrix: [N, K].
      x: [T, K].
      rms_norm: weight and epsilon: x is replaced by x / sqrt(mean(x^2) + epsilon) * weight.
      bias: none by default.
      residual: none by default.

    Raises:
      ValueError: shapes do not fit.
      RuntimeError: there are no native kernels; see `unsupported`.
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
    """An operand of the native call, which is empty where there is none."""
    if array is None:
        return jnp.zeros(0, jnp.float32)
    if array.shape != shape:
        raise ValueError(f"a {name} must be {shape}, got {array.shape}")
    return array.astype(jnp.float32)


def rows(matrix: PackedMatrix, row_ids: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Rows of a matrix that is not gated, clipped to those there are; scales applied."""
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
    """Zeros in pages of their own, so aligned that XLA takes them over, and given back to the system when released."""
    num_rows, dtype = PANEL_ROWS // num_parts, jnp.dtype(dtype)
    shape = (-(-num_outputs // num_rows), K, num_parts, num_rows)
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize), access=mmap.ACCESS_COPY))


def _write_panels(panels: Shaped[np.ndarray, "panels K rows"], start: int, rows: Shaped[np.ndarray, "N K"]) -> None:
    """Rows from `start` on: those that complete a panel, whole panels, those that begin one."""
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
