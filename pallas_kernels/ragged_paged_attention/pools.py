"""Page pools: creation, conversion between layouts, and token moves. Each backend has its own layout."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.op import AUTO, Op
from jaxserve.pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_tpu, moves, native, xla
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Backend
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import KVKind
from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout, PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    SCALE_DTYPE,
    Pages,
    QuantizedPages,
    array_dtype,
    describe,
    has_scales,
    pool_dtype,
    stored_size,
    values_of,
)

BACKENDS: Mapping[str, Backend] = {
    "mosaic_gpu": mosaic_gpu.KERNEL,
    "mosaic_tpu": mosaic_tpu.KERNEL,
    "native": native.Native(),
    "xla": xla.Xla(),
}
"""All backends, best first."""
OP = Op("ragged_paged_attention", BACKENDS)


def backend_named(name: str) -> Backend:
    if name not in BACKENDS:
        hint = "; resolve it with select_backend first" if name == AUTO else ""
        raise ValueError(f"a pool's layout needs a backend's name, one of {list(BACKENDS)}, got {name!r}{hint}")
    return BACKENDS[name]


def layout_for(backend: Backend, kind: KVKind, kv_dtype: DTypeLike) -> Layout:
    """Return a backend's layout for a pool with this kind and dtype."""
    *heads, size = kind.token_shape
    return backend.layout((*heads, stored_size(size, jnp.dtype(kv_dtype))))


def default_page_size(backend: str, kind: KVKind, kv_dtype: DTypeLike) -> int:
    """Return a named backend's default page size in tokens (see `select_backend`)."""
    return layout_for(backend_named(backend), kind, kv_dtype).default_page_size(jnp.dtype(kv_dtype))


def new_pages(
    backend: str, kind: KVKind, *, num_layers: int, num_pages: int, page_size: int, dtype: DTypeLike
) -> Pages:
    """Return an empty pool for a named backend (see `select_backend`), with scales if the dtype needs them."""
    layout, dims = layout_for(backend_named(backend), kind, dtype), PoolDims(num_layers, num_pages, page_size)
    dtype = jnp.dtype(dtype)
    values = jnp.zeros(layout.kv_shape(dims), array_dtype(dtype))
    return QuantizedPages(values, jnp.zeros(layout.scale_shape(dims), SCALE_DTYPE)) if has_scales(dtype) else values


def to_canonical(backend: str, kv_pages: Pages, kind: KVKind) -> Pages:
    """Convert the pool, or any of its pages `[L, N, ...]`, from a named backend's layout to the canonical one."""
    return layout_for(backend_named(backend), kind, pool_dtype(kv_pages)).to_canonical(kv_pages)


def from_canonical(backend: str, kv_pages: Pages) -> Pages:
    """Convert the pool, or any of its pages `[L, N, ...]`, from the canonical layout to a named backend's."""
    return backend_named(backend).layout(values_of(kv_pages).shape[3:]).from_canonical(kv_pages)


def move_tokens(
    backend: str,
    kind: KVKind,
    kv_pages: Pages,
    page_table: Int32[Array, "table_rows M"],
    table_row: Int32[Array, "R"],
    first: Int32[Array, "R"],
    source: Int32[Array, "R N"],
) -> Pages:
    """Copy tokens within their rows in a named backend's pool, in all layers: see `moves.move_tokens`."""
    layout = layout_for(backend_named(backend), kind, pool_dtype(kv_pages))
    return moves.move_tokens(layout, kv_pages, page_table, table_row, first, source)


def split_pages(backend: str, kv_pages: Pages, kind: KVKind, num_parts: int) -> Array:
    """Return a named backend's pool as one for smaller heads: page n becomes `num_parts` pages from `n * num_parts` on.

    No data moves if arrays are row-major. Reshape the result to its former shape to get the pool back.

    Raises:
      ValueError: the pool has scales, or its pages have another size.
    """
    if isinstance(kv_pages, QuantizedPages) or not isinstance(kv_pages, jax.Array):
        raise ValueError(f"a pool whose pages are split must be an array of floats, got {describe(kv_pages)}")
    layout = layout_for(backend_named(backend), kind, kv_pages.dtype)
    dims = layout.pool_dims(kv_pages.shape)
    smaller = jax.ShapeDtypeStruct(layout.kv_shape(dims._replace(num_pages=dims.num_pages * num_parts)), kv_pages.dtype)
    if smaller.size != kv_pages.size:
        raise ValueError(
            f"a page must be {num_parts} pages of {kind}, got a pool of shape {kv_pages.shape} instead of as many "
            f"elements as {smaller.shape}"
        )
    return kv_pages.reshape(smaller.shape)
