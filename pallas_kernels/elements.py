"""Quantised matrix elements and scales: how they are stored, and their values as floats."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, Shaped, UInt8
from numpy.typing import NDArray

PACKED = ("int4", "e2m1")  # element types with two elements per byte
INT4_ZERO = 8  # default zero point for int4
FLOAT16_BITS = np.dtype(np.uint16)  # storage dtype for float16 scales: TPU kernels take no float16 arrays


def packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack 4-bit codes, `[..., K]` with one code per byte, two per byte, `[..., K / 2]`.

    The low bits hold a row's first half, the high bits its second half.
    """
    low, high = np.split(codes, 2, axis=-1)
    return (low | high << 4).astype(np.uint8, copy=False)


def unpacked(pairs: UInt8[Array, "*rows in_bytes"]) -> UInt8[Array, "*rows in"]:
    """Return the two 4-bit codes in each byte as one byte each: first all low bits, then all high bits of a row."""
    return jnp.concatenate([pairs & 15, pairs >> 4], axis=-1)


def e2m1_floats(codes: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return the values of fp4 (e2m1) codes from 0 to 15: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and from 8 on their negatives."""
    size = (codes & 7).astype(jnp.float32)
    size = jnp.maximum(size * 0.5, jnp.maximum(size - 2, size * 2 - 8))
    return size * (1 - (codes & 8).astype(jnp.float32) * 0.25)


def scale_floats(scale: Shaped[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Convert scales to float32, from a float dtype or from float16 bits in uint16 (`FLOAT16_BITS`).

    Float16 bits are decoded by integer arithmetic, since TPUs would flush subnormals to zero.
    """
    if scale.dtype != FLOAT16_BITS:
        return scale.astype(jnp.float32)
    bits = scale.astype(jnp.int32)
    size = bits & 0x7FFF
    rebias = jnp.where(size < 0x7C00, 112, 224) << 23  # 224 for infinity and NaN
    wide = lax.bitcast_convert_type((size << 13) + rebias, jnp.float32)
    wide = jnp.where(size < 0x400, size.astype(jnp.float32) * 2.0**-24, wide)
    return jnp.where(bits < 0x8000, wide, -wide)
