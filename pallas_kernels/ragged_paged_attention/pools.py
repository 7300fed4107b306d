"""Page pools: creation, conversion between layouts, and moves of tokens. Each backend has its own layout."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.op import AUTO, Op
from jaxserve.pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_mma, mosaic_tpu, native, xla
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Backend
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import KVKind
from jaxserve.pallas_kernels.ragged_paged_attention.layout import SMALL_PAGE_TOKENS, Layout, PoolDims
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
    "mosaic_mma": mosaic_mma.KERNEL,
    "mosaic_tpu": mosaic_tpu.KERNEL,
    "native": native.Native(),
    "xla": xla.Xla(),
}
"""All backends, best first."""
OP = Op("ragged_paged_attention", BACKENDS)


def backend_named(name: str) -> Backend:
    """Return the backend with this name, such as "xla".

    Raises:
      ValueError: there is no such backend; "auto" is not resolved here.
    """
    if name not in BACKENDS:
        hint = "; resolve it with select_backend first" if name == AUTO else ""
        raise ValueError(f"a pool's layout needs a backend's name, one of {list(BACKENDS)}, got {name!r}{hint}")
    return BACKENDS[name]


def layout_for(backend: Backend, kind: KVKind, kv_dtype: DTypeLike) -> Layout:
    """Return the memory layout of a backend's pool for these vectors (`kind`) and this pool dtype."""
    *heads, size = kind.token_shape
    return backend.layout((*heads, stored_size(size, jnp.dtype(kv_dtype))))


def default_page_size(backend: str, kind: KVKind, kv_dtype: DTypeLike) -> int:
    """Return the default page size in tokens of the backend named `backend`, for these vectors and pool dtype."""
    return layout_for(backend_named(backend), kind, kv_dtype).default_page_size(jnp.dtype(kv_dtype))


def has_canonical_layout(backend: str, kind: KVKind, kv_dtype: DTypeLike) -> bool:
    """Return whether the pool of the backend named `backend` has the canonical layout for these vectors and dtype."""
    layout, dims = layout_for(backend_named(backend), kind, kv_dtype), PoolDims(2, 3, 5 * SMALL_PAGE_TOKENS)
    return layout.kv_shape(dims) == (*dims, *layout.token_shape)


def new_pages(
    backend: str, kind: KVKind, *, num_layers: int, num_pages: int, page_size: int, dtype: DTypeLike
) -> Pages:
    """Return a pool of zeros, with scales if the dtype needs them.

    Args:
      backend: name of the backend that will use the pool (see `select_backend`).
      kind: vectors to store for a token.
      num_layers: number of layers.
      num_pages: number of pages per layer.
      page_size: tokens per page.
      dtype: pool dtype, such as bfloat16, int8 or int4.
    """
    user, dims, dtype = backend_named(backend), PoolDims(num_layers, num_pages, page_size), jnp.dtype(dtype)
    layout = layout_for(user, kind, dtype)
    values = user.zeros(layout.kv_shape(dims), array_dtype(dtype))
    return QuantizedPages(values, user.zeros(layout.scale_shape(dims), SCALE_DTYPE)) if has_scales(dtype) else values


def to_canonical(backend: str, kv_pages: Pages, kind: KVKind) -> Pages:
    """Convert a pool, or a few pages `[L, N, ...]`, from a backend's layout to the canonical one.

    Args:
      backend: name of the backend that the pool was made for.
      kv_pages: pool.
      kind: vectors that the pool stores for a token.

    Returns:
      The pool as `[L, N, P, 2K, H]`, head h's key at 2h and value at 2h + 1, or `[L, N, P, W]` for latents.
    """
    return layout_for(backend_named(backend), kind, pool_dtype(kv_pages)).to_canonical(kv_pages)


def from_canonical(backend: str, kv_pages: Pages) -> Pages:
    """Convert a pool, or a few pages `[L, N, ...]`, from the canonical layout to the one of backend `backend`."""
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
    """Copy stored vectors within each row, from position `first + source[:, n]` to position `first + n`, in all layers.

    This makes the accepted path of a draft tree contiguous.

    Args:
      backend: name of the backend that the pool was made for.
      kind: vectors that the pool stores for a token.
      kv_pages: pool; donated.
      page_table: page ids per sequence.
      table_row: each row's index in the page table.
      first: first position in each row that may change.
      source: positions counted from `first`, less than N; n itself if nothing moves there. A row in which nothing moves
        is not touched.

    Returns:
      The updated pool.
    """
    layout = layout_for(backend_named(backend), kind, pool_dtype(kv_pages))
    dims = layout.pool_dims(values_of(kv_pages).shape)
    P, (R, N) = dims.page_size, source.shape
    num_columns = (P + N - 2) // P + 1
    unmoved = jnp.arange(num_columns * P, dtype=jnp.int32)[None]
    step = unmoved - (first % P)[:, None]  # counted from `first`
    moved = jnp.take_along_axis(source, jnp.clip(step, 0, N - 1), axis=1)
    index = jnp.where((step >= 0) & (step < N), moved + unmoved - step, unmoved)
    columns = (first // P)[:, None] + jnp.arange(num_columns, dtype=jnp.int32)[None]
    pages = page_table.at[table_row[:, None], columns].get(mode="clip")
    # An unchanged page may be past the row's last one, and may then belong to any other row: it is not written.
    is_changed = jnp.any((index != unmoved).reshape(R, num_columns, P), axis=2)
    target = jnp.where(is_changed, pages, dims.num_pages).reshape(-1)

    def move(layer: Int32[Array, ""], kv_pages: Pages) -> Pages:
        old = jax.tree.map(lambda x: x.at[layer, pages.reshape(-1)].get(mode="clip")[None], kv_pages)
        tokens = jax.tree.map(lambda x: x.reshape(R, num_columns * P, *x.shape[3:]), layout.to_canonical(old))
        row = jnp.arange(R)[:, None]
        new = jax.tree.map(lambda x: x[row, index].reshape(1, R * num_columns, P, *x.shape[2:]), tokens)
        new = layout.from_canonical(new)
        return jax.tree.map(lambda x, y: x.at[layer, target].set(y[0], mode="drop"), kv_pages, new)

    return lax.fori_loop(0, jnp.where(jnp.any(is_changed), dims.num_layers, 0), move, kv_pages)


def split_pages(backend: str, kv_pages: Pages, kind: KVKind, num_parts: int) -> Array:
    """Return a pool that was made for larger heads as a pool for the heads in `kind`: page n becomes the `num_parts`
    pages from `n * num_parts` on.

    No data moves if arrays are row-major. Reshape the result to its former shape to get the pool back.

    Args:
      backend: name of the backend that the pool was made for.
      kv_pages: float pool.
      kind: smaller heads.
      num_parts: number of smaller pages in each page.

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
