"""Pools of narrow numbers: int8 and fp8 (e4m3), each vector of a token and head with a scale of its own."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""What the largest number of a vector becomes, by the dtype of the pool."""


class QuantizedPages(NamedTuple):
    """A pool whose numbers are `values * scales`.

    A scale belongs to one token and one head of a page. What is written once never changes, then: keys and values are
    the same in whatever chunks their tokens came, which those of pages that grow and are scaled anew are not.
    """

    values: Shaped[Array, "..."]
    """int8 or float8_e4m3fn, in the backend's layout, as pools of wide numbers are."""
    scales: Float32[Array, "..."]
    """In a layout of the backend's own; `[L, N, P, 2K]` in the canonical one."""


Pages = Shaped[Array, "..."] | QuantizedPages


def is_quantized(dtype: jnp.dtype) -> bool:
    """Whether a pool of this dtype has scales."""
    return dtype.name in LARGEST


def values_of(kv_pages: Pages) -> Shaped[Array, "..."]:
    """The stored numbers: the pool itself, where it has no scales."""
    return kv_pages.values if isinstance(kv_pages, QuantizedPages) else kv_pages


def encode(x: Float[Array, "T N H"], kv_pages: Pages) -> Pages:
    """Vectors as a pool stores them: cast to its dtype, or quantized, with scales `[T, N]`."""
    if isinstance(kv_pages, QuantizedPages):
        return QuantizedPages(*quantize(x, kv_pages.values.dtype))
    return x.astype(kv_pages.dtype)


def quantize(x: Float[Array, "T N H"], dtype: jnp.dtype) -> tuple[Shaped[Array, "T N H"], Float32[Array, "T N"]]:
    """Each vector as numbers of `dtype` and their scale; of one that is not finite all products of the two are NaN."""
    x = x.astype(jnp.float32)
    # Factors, not divisors: XLA makes factors of them here and there, which round differently.
    step = 1 / LARGEST[dtype.name]
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) * step, np.finfo(np.float32).tiny)
    # XLA:CPU passes over NaN where it looks for the largest number of many vectors.
    scales = jnp.where(jnp.any(jnp.isnan(x), axis=-1), jnp.nan, scales)
    values = x * (1 / scales)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    return values.astype(dtype), scales


def dequantize(values: Shaped[Array, "*vectors H"], scales: Float32[Array, "*vectors"]) -> Float32[Array, "*vectors H"]:
    """The numbers that `quantize` stored."""
    return values.astype(jnp.float32) * scales[..., None]
