"""Products with matrices packed for the native CPU kernels: any number of tokens, float32, bfloat16 or int8 weights.

A packed matrix keeps 16 rows side by side, `[ceil(N / 16), K, 16]`, so that weights stream through the processor in
order and are converted as they come. A token's result is the same to the bit whatever other tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import native

__all__ = ["PANEL_ROWS", "PackedMatrix", "multiply", "pack", "rows", "unpack", "unsupported"]

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
    N = weight.shape[0]
    if scales is None:
        scales = jnp.zeros((N, 0), jnp.float32)
    elif weight.shape[1] % scales.shape[1]:
        raise ValueError(f"each row's {weight.shape[1]} weights must divide into {scales.shape[1]} blocks")
    return PackedMatrix(_to_panels(weight), _to_panels(scales.astype(jnp.float32)), N)


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
    """
    weight, eps = rms_norm or (_nothing(), 0.0)
    if x.shape[1] != matrix.shape[1] * (2 if swiglu else 1):
        raise ValueError(f"x {x.shape} does not fit a matrix {matrix.shape}, swiglu={swiglu}")
    shape = jax.ShapeDtypeStruct((x.shape[0], matrix.num_outputs), jnp.float32)
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


def _to_panels(matrix: Shaped[Array, "N K"]) -> Shaped[Array, "panels K 16"]:
    N, K = matrix.shape
    host = np.pad(np.asarray(matrix), ((0, -N % PANEL_ROWS), (0, 0)))  # numpy: no program to compile for each shape
    return jnp.asarray(np.ascontiguousarray(host.reshape(-(-N // PANEL_ROWS), PANEL_ROWS, K).swapaxes(1, 2)))


def _from_panels(panels: Shaped[Array, "panels K 16"], num_rows: int) -> Shaped[Array, "N K"]:
    return panels.swapaxes(1, 2).reshape(panels.shape[0] * PANEL_ROWS, panels.shape[1])[:num_rows]
