"""Products with matrices packed for the native CPU kernels: any number of tokens, float32, bfloat16 or int8 weights.

A packed matrix keeps 16 rows side by side, `[ceil(N / 16), K, 16]`, so that weights stream through the processor in
order and are converted as they come. A token's result is the same to the bit whatever other tokens there are.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from math import prod
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int, Shaped
from numpy.typing import NDArray

from pallas_kernels import native

__all__ = ["PANEL_ROWS", "PackedMatrix", "Packer", "multiply", "pack", "rows", "unpack", "unsupported"]

PANEL_ROWS = 16
WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMatrix:
    """A matrix `[N, K]`, see `pack`."""

    weights: Shaped[Array, "panels K 16"]
    scales: Float[Array, "panels blocks 16"]  # blocks is 0 unless weights are int8
    num_outputs: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return (self.num_outputs, self.weights.shape[1])


def unsupported(dtype: DTypeLike, platform: str) -> str | None:
    """Why matrices of a dtype cannot be packed and multiplied on a platform; None if they can."""
    if platform != "cpu":
        return "packed matrices are for CPUs"
    if jnp.dtype(dtype).name not in WEIGHT_DTYPES:
        return f"weights must be one of {WEIGHT_DTYPES}, not {jnp.dtype(dtype).name}"
    return native.unavailable()


def pack(weight: Shaped[Array, "N K"], scales: Float[Array, "N blocks"] | None = None) -> PackedMatrix:
    """Packs a matrix stored [out, in]; with `scales` it stands for `weight[n, k] * scales[n, k // (K / blocks)]`."""
    N, K = weight.shape
    packer = Packer(N, K, weight.dtype, 0 if scales is None else scales.shape[1])
    packer.write(0, weight, scales)
    return packer.matrix()


class Packer:
    """Packs a matrix `[N, K]` some rows at a time, so that it need never be held in another form.

    Args:
      N: rows of the matrix, outputs of the product.
      K: its columns.
      dtype: of its weights.
      num_blocks: scales of a row; none by default.
    """

    def __init__(self, N: int, K: int, dtype: DTypeLike, num_blocks: int = 0) -> None:
        if (jnp.dtype(dtype) == jnp.int8) != (num_blocks > 0):
            raise ValueError(f"int8 weights, and they alone, must have scales, got {dtype} and {num_blocks} blocks")
        if num_blocks and K % num_blocks:
            raise ValueError(f"each row's {K} weights must divide into {num_blocks} blocks")
        self._num_outputs = N
        self._weights = _empty_panels(N, K, dtype)
        self._scales = _empty_panels(N, num_blocks, jnp.float32)

    def write(self, start: int, weight: ArrayLike, scales: ArrayLike | None = None) -> None:
        """Rows from `start` on: a whole number of panels, or all that remain. Threads may write different panels."""
        assert start % PANEL_ROWS == 0, f"row {start} is inside a panel"
        _write_panels(self._weights[start // PANEL_ROWS :], np.asarray(weight))
        if scales is not None:
            _write_panels(self._scales[start // PANEL_ROWS :], np.asarray(scales))

    def matrix(self) -> PackedMatrix:
        """The packed matrix, once all rows are written; it takes the memory over."""
        return PackedMatrix(jax.device_put(self._weights), jax.device_put(self._scales), self._num_outputs)


def unpack(matrix: PackedMatrix) -> tuple[Shaped[Array, "N K"], Float[Array, "N blocks"]]:
    """The inverse of `pack`; no blocks where there are no scales."""
    return _from_panels(matrix.weights, matrix.num_outputs), _from_panels(matrix.scales, matrix.num_outputs)


def multiply(
    matrix: PackedMatrix,
    x: Float[Array, "T in"],
    *,
    rms_norm: tuple[Float[Array, " K"], float] | None = None,
    swiglu: bool = False,
    residual: Float[Array, "T N"] | None = None,
) -> Float[Array, "T N"]:
    """`x @ matrix.T (+ residual)` in float32, with what is done to `x` before fused into reading it.

    Args:
      matrix: [N, K].
      x: [T, K], or [T, 2K] with `swiglu`.
      rms_norm: weight and epsilon: x is replaced by x / sqrt(mean(x^2) + epsilon) * weight.
      swiglu: x is replaced by silu(x[:, :K]) * x[:, K:].
      residual: added to the product.

    Raises:
      ValueError: shapes do not fit, or a norm and SwiGLU are wanted at once.
      RuntimeError: there are no native kernels; see `unsupported`.
    """
    if (reason := native.unavailable()) is not None:
        raise RuntimeError(reason)
    weight, eps = rms_norm or (_nothing(), 0.0)
    N, K = matrix.shape
    if x.shape[1] != K * (2 if swiglu else 1):
        raise ValueError(f"x {x.shape} does not fit a matrix {matrix.shape}, swiglu={swiglu}")
    if rms_norm is not None and (swiglu or weight.shape != (K,)):
        raise ValueError(f"a norm must be {(K,)}, and without swiglu, got {weight.shape}, swiglu={swiglu}")
    if residual is not None and residual.shape != (x.shape[0], N):
        raise ValueError(f"a residual must be {(x.shape[0], N)}, got {residual.shape}")
    shape = jax.ShapeDtypeStruct((x.shape[0], N), jnp.float32)
    added = _nothing() if residual is None else residual
    inputs = (x, matrix.weights, matrix.scales, weight, added)
    dtypes = (jnp.float32, matrix.weights.dtype, jnp.float32, jnp.float32, jnp.float32)
    y: Array = jax.ffi.ffi_call(native.LINEAR, shape)(
        *(array.astype(dtype) for array, dtype in zip(inputs, dtypes, strict=True)),
        eps=np.float32(eps),
        swiglu=swiglu,
    )
    return y


def _nothing() -> Float[Array, "0"]:
    return jnp.zeros(0, jnp.float32)


def rows(matrix: PackedMatrix, row_ids: Int[Array, " T"]) -> Float[Array, "T K"]:
    """Rows of the matrix, clipped to those there are; scales applied."""
    row_ids = jnp.clip(row_ids, 0, matrix.num_outputs - 1)
    panel, lane = row_ids // PANEL_ROWS, row_ids % PANEL_ROWS
    found = matrix.weights[panel, :, lane]  # [T, K]
    if not matrix.scales.shape[1]:
        return found
    scales = matrix.scales[panel, :, lane]  # [T, blocks]
    blocks = found.reshape(*scales.shape, -1) * scales[:, :, None]
    return blocks.reshape(found.shape)


def _empty_panels(N: int, K: int, dtype: DTypeLike) -> NDArray[Any]:
    """Zeros in pages of their own, so aligned that XLA takes them over, and given back to the system when released."""
    shape, dtype = (-(-N // PANEL_ROWS), K, PANEL_ROWS), jnp.dtype(dtype)
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize), access=mmap.ACCESS_COPY))


def _write_panels(panels: Shaped[np.ndarray, "panels K 16"], rows: Shaped[np.ndarray, "rows K"]) -> None:
    whole, rest = divmod(len(rows), PANEL_ROWS)
    full = rows[: whole * PANEL_ROWS].reshape(whole, PANEL_ROWS, rows.shape[1])
    panels[:whole] = full.swapaxes(1, 2)
    if rest:
        panels[whole, :, :rest] = rows[-rest:].T


def _from_panels(panels: Shaped[Array, "panels K 16"], num_rows: int) -> Shaped[Array, "N K"]:
    return panels.swapaxes(1, 2).reshape(panels.shape[0] * PANEL_ROWS, panels.shape[1])[:num_rows]
