"""Quantised pools: int8 and fp8 (e4m3), with one scale per token and head."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

QUANTIZED_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Quantised value of the largest element of a vector, by the dtype of the pool."""


class QuantizedPages(NamedTuple):
    """Quantised pool, which stands for `values * scales`.

    A scale belongs to one token and one head of a page, so stored keys and values never change: they are the same
    however a prompt is cut into chunks. With one scale per page they would not be, since growing pages are rescaled.
    """

    values: Shaped[Array, "..."]
    """Elements in int8 or float8_e4m3fn, in the backend's layout."""
    scales: Float32[Array, "..."]
    """Scales in a layout of the backend's own; `[L, N, P, 2K]` in the canonical one."""


Pages = Shaped[Array, "..."] | QuantizedPages


def is_quantized(dtype: jnp.dtype) -> bool:
    """Return whether a pool of this dtype has scales."""
    return dtype.name in QUANTIZED_MAX


def values_of(kv_pages: Pages) -> Shaped[Array, "..."]:
    """Return the stored values: the pool itself if it has no scales."""
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


def encode(x: Float[Array, "T N H"], kv_pages: Pages) -> Pages:
    """Return vectors as a pool stores them: cast to its dtype, or quantised, with scales `[T, N]`."""
    if isinstance(kv_pages, QuantizedPages):
        return QuantizedPages(*quantize(x, kv_pages.values.dtype))
    return x.astype(kv_pages.dtype)


def quantize(x: Float[Array, "T N H"], dtype: jnp.dtype) -> tuple[Shaped[Array, "T N H"], Float32[Array, "T N"]]:
    """Return each vector in `dtype` with its scale; all products of the two are NaN for a vector that is not finite."""
    x = x.astype(jnp.float32)
    # Multiply instead of dividing: XLA turns some divisions into products, which round differently.
    step = 1 / QUANTIZED_MAX[dtype.name]
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) * step, np.finfo(np.float32).tiny)
    # The maximum of many vectors ignores NaN on XLA:CPU.
    scales = jnp.where(jnp.any(jnp.isnan(x), axis=-1), jnp.nan, scales)
    values = x * (1 / scales)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype), scales


def dequantize(values: Shaped[Array, "*vectors H"], scales: Float32[Array, "*vectors"]) -> Float32[Array, "*vectors H"]:
    """Invert `quantize`."""
    return values.astype(jnp.float32) * scales[..., None]
