"""Quantised pools: int8 and fp8 (e4m3) with one scale per vector, and int4 with scales inside each vector."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float32, Shaped

from jaxserve.pallas_kernels.ragged_paged_attention import int4

INT4 = jnp.dtype("int4")
SCALE_DTYPE = jnp.dtype("bfloat16")
_PACKED = jnp.dtype("uint8")  # array dtype of int4 pools

QUANTIZED_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Quantised value of a vector's largest element, for each dtype whose pools have an array of scales."""
QUANTIZED = (*QUANTIZED_MAX, INT4.name)
"""Dtypes of quantised pools."""


class QuantizedPages(NamedTuple):
    """Pool of int8 or fp8 vectors: a vector is its stored elements (`values`) times its scale.

    Each key and value has a scale, so stored vectors never change: they are the same for every division of a prompt
    into chunks. One scale per page would break this, since growing pages are rescaled.
    """

    values: Shaped[Array, "..."]
    """Elements in int8 or float8_e4m3fn, in the backend's layout."""
    scales: BFloat16[Array, "..."]
    """Scales in the backend's layout; canonically `[L, N, P, 2K]`, or `[L, N, P]` for latents."""


Pages = Shaped[Array, "..."] | QuantizedPages


def has_scales(dtype: jnp.dtype) -> bool:
    """Return whether a pool with this dtype has an array of scales."""
    return dtype.name in QUANTIZED_MAX


def array_dtype(kv_dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of a pool's array: uint8 for an int4 pool, else the pool's dtype."""
    return _PACKED if kv_dtype == INT4 else kv_dtype


def pool_dtype(kv_pages: Pages) -> jnp.dtype:
    """Return the dtype of a pool: int4 if its array has bytes (uint8), else the array's dtype."""
    return INT4 if (dtype := values_of(kv_pages).dtype) == _PACKED else dtype


def stored_size(head_dim: int, kv_dtype: jnp.dtype) -> int:
    """Return how many array elements store a vector: bytes in an int4 pool, else `head_dim`."""
    return int4.stored_bytes(head_dim) if kv_dtype == INT4 else head_dim


def values_of(kv_pages: Pages) -> Shaped[Array, "..."]:
    """Return a pool's array with keys and values (or latents), without the scales."""
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


def encode(x: Float[Array, "*vectors H"], kv_dtype: jnp.dtype) -> Pages:
    """Convert vectors to the elements that a pool of dtype `kv_dtype` stores, with scales if it has them."""
    if has_scales(kv_dtype):
        return QuantizedPages(*quantize(x, kv_dtype))
    return int4.pack(int4.rotate(x)) if kv_dtype == INT4 else x.astype(kv_dtype)


def decode(stored: Pages) -> Float32[Array, "*vectors H"]:
    """Convert stored elements, with their scales, back to float32 vectors; vectors from int4 pools stay rotated."""
    if isinstance(stored, QuantizedPages):
        return dequantize(*stored)
    return int4.unpack(stored) if stored.dtype == _PACKED else stored.astype(jnp.float32)


def quantize(
    x: Float[Array, "*vectors H"], dtype: jnp.dtype
) -> tuple[Shaped[Array, "*vectors H"], BFloat16[Array, "*vectors"]]:
    """Quantise each vector to int8 or fp8 (`dtype`) with one scale; a vector that is not finite gets the scale NaN.

    Scales are rounded up to bfloat16, so that the largest element stays within the range of `dtype`.

    Returns:
        Quantised elements, and scales.
    """
    x = x.astype(jnp.float32)
    # Multiply instead of dividing: XLA turns some divisions into multiplications, which round differently.
    step = 1 / QUANTIZED_MAX[dtype.name]
    scales = _rounded_up(jnp.maximum(jnp.max(jnp.abs(x), axis=-1) * step, np.finfo(np.float32).tiny))
    # XLA:CPU ignores NaN in a maximum over many vectors.
    scales = jnp.where(jnp.all(jnp.isfinite(x), axis=-1), scales, jnp.nan)
    values = x * (1 / scales)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype), scales.astype(SCALE_DTYPE)


def _rounded_up(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """Round positive numbers up to the next number that bfloat16 represents; return float32."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000), jnp.float32)


def dequantize(
    values: Shaped[Array, "*vectors H"], scales: BFloat16[Array, "*vectors"]
) -> Float32[Array, "*vectors H"]:
    """Return float32 vectors: quantised elements times their vector's scale."""
    return values.astype(jnp.float32) * scales.astype(jnp.float32)[..., None]


def describe(kv_pages: Pages) -> str:
    """Return a pool's dtype and whether it has scales, as text for error messages."""
    return f"{values_of(kv_pages).dtype} with{'' if isinstance(kv_pages, QuantizedPages) else 'out'} scales"
