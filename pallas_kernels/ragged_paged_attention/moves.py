"""Moves of stored tokens within their rows, which make a draft tree's accepted path contiguous."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, values_of


def move_tokens(
    layout: Layout,
    kv_pages: Pages,
    page_table: Int32[Array, "table_rows M"],
    table_row: Int32[Array, "R"],
    first: Int32[Array, "R"],
    source: Int32[Array, "R N"],
) -> Pages:
    """Copy each row's vectors at position `first + source[:, n]` to position `first + n`, in all layers.

    Args:
      layout: the pool's layout.
      kv_pages: pool; donated.
      page_table: page ids per sequence.
      table_row: each row's index in the page table.
      first: first position in each row that may change.
      source: positions counted from `first`, less than N; n itself if nothing moves there. A row in which nothing moves
        is not touched.
    """
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
