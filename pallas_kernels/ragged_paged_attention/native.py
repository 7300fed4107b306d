"""Ragged paged attention in C++, a custom call of XLA: the serving backend on CPUs where it could be built.

The pool is `[L, N, 2K, P, H]`, keys of head h at 2h and values at 2h + 1, as for `xla`. But a page of keys is stored
transposed, as `[H, P]`, so that one vector instruction scores many tokens. See `pallas_kernels/native`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import xla
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem, RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages

POOL_DTYPES = ("float32", "bfloat16")
VECTOR = 4  # elements of the narrowest vectors in use

default_page_size = xla.default_page_size
kv_shape = xla.kv_shape
scale_shape = xla.scale_shape
pool_dims = xla.pool_dims


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.platform != "cpu":
        return "it runs on CPU only"
    if (reason := native.unavailable()) is not None:
        return reason
    if problem.kv_dtype.name not in POOL_DTYPES:
        return f"the pool must be one of {POOL_DTYPES}, not {problem.kv_dtype}"
    if problem.has_tree_mask:
        return "it has no tree masks"
    if problem.page_size % VECTOR or problem.head_dim % VECTOR:
        return f"page_size and head_dim must be multiples of {VECTOR}, not {problem.page_size} and {problem.head_dim}"
    return None


def to_canonical(kv_pages: Pages) -> Pages:
    """Return the pool as `[L, N, P, 2K, H]`."""
    assert not isinstance(kv_pages, QuantizedPages), "see supports"
    L, N, KV, P, H = kv_pages.shape
    keys = jnp.swapaxes(kv_pages[:, :, 0::2].reshape(L, N, KV // 2, H, P), 3, 4)
    pages = jnp.stack([keys, kv_pages[:, :, 1::2]], axis=3).reshape(L, N, KV, P, H)
    return jnp.swapaxes(pages, 2, 3)


def from_canonical(kv_pages: Pages) -> Pages:
    """Invert `to_canonical`."""
    assert not isinstance(kv_pages, QuantizedPages), "see supports"
    L, N, P, KV, H = kv_pages.shape
    pages = jnp.swapaxes(kv_pages, 2, 3)  # [L, N, 2K, P, H]
    keys = jnp.swapaxes(pages[:, :, 0::2], 3, 4).reshape(L, N, KV // 2, P, H)
    return jnp.stack([keys, pages[:, :, 1::2]], axis=3).reshape(L, N, KV, P, H)


def write_and_attend(
    q: Float[Array, "T Q H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "Q"] | None,
    rope: Float32[Array, "2 T half"] | None,
    tree_mask: Int32[Array, "T words"] | None,
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, write and attend in one call that updates the pool in place; donate the pool.

    The call takes q, k and v as one buffer: if they are slices of one array, XLA joins them at no cost, whereas it
    would copy each to pass them one by one.
    """
    assert not isinstance(kv_pages, QuantizedPages), "see supports"
    assert tree_mask is None, "see supports"
    shapes = (jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype))
    call = jax.ffi.ffi_call(native.ATTENTION, shapes, input_output_aliases={1: 1})
    out, kv_pages = call(
        jnp.concatenate([q, k, v], axis=1).astype(jnp.float32),
        kv_pages,
        jnp.asarray(layer, jnp.int32),
        *rows,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        jnp.zeros(0, jnp.float32) if rope is None else rope,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
        window=np.int64(window or 0),
    )
    return out.astype(q.dtype), kv_pages
