"""Moves of stored tokens within their rows: what a tree of drafts keeps becomes contiguous."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, values_of
from jaxtyping import Array, Int32


@runtime_checkable
class PagedDims(Protocol):
    """Sizes of a pool, whatever a token has in it."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    @property
    def num_pages(self) -> int:
        """Number of pages."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""


@runtime_checkable
class PagedLayout(Protocol):
    """Layout of any pool, whose canonical form is `[L, N, P, ...]`."""

    def pool_dims(self, shape: tuple[int, ...]) -> PagedDims:
        """Return the sizes of a pool by the shape of its values."""

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool, or any pages of it `[L, N, ...]`, in the canonical layout."""

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`."""


def move_tokens(
    layout: PagedLayout,
    kv_pages: Pages,
    page_table: Int32[Array, "table_rows M"],
    table_row: Int32[Array, "R"],
    first: Int32[Array, "R"],
    source: Int32[Array, "R N"],
) -> Pages:
    """Copy the keys and values of place `first + source[:, n]` of each row to place `first + n`, in all layers at once.

    Args:
      layout: layout of the pool.
      kv_pages: pool; donated.
      page_table: pages of sequences.
      table_row: row of the page table that has the pages of each row.
      first: first place of each row that may change.
      source: places counted from `first`, less than N; n itself where nothing moves. A row in which nothing moves is
        not touched.
    """
    dims = layout.pool_dims(values_of(kv_pages).shape)
    P, (R, N) = dims.page_size, source.shape
    num_columns = (P + N - 2) // P + 1
    place = jnp.arange(num_columns * P, dtype=jnp.int32)[None] - (first % P)[:, None]  # counted from `first`
    moved = jnp.take_along_axis(source, jnp.clip(place, 0, N - 1), axis=1)
    own = jnp.arange(num_columns * P, dtype=jnp.int32)[None]
    index = jnp.where((place >= 0) & (place < N), moved + own - place, own)
    is_changed = jnp.any(index != own, axis=1)
    columns = (first // P)[:, None] + jnp.arange(num_columns, dtype=jnp.int32)[None]
    pages = page_table.at[table_row[:, None], columns].get(mode="clip")
    # A page without changed tokens may be past the row's last one, and then any other row's: it is not written.
    changes = jnp.any((index != own).reshape(R, num_columns, P), axis=2)
    target = jnp.where(changes, pages, dims.num_pages).reshape(-1)

    def move(layer: Int32[Array, ""], kv_pages: Pages) -> Pages:
        old = jax.tree.map(lambda x: x.at[layer, pages.reshape(-1)].get(mode="clip")[None], kv_pages)
        tokens = jax.tree.map(lambda x: x.reshape(R, num_columns * P, *x.shape[3:]), layout.to_canonical(old))
        row = jnp.arange(R)[:, None]
        new = jax.tree.map(lambda x: x[row, index].reshape(1, R * num_columns, P, *x.shape[2:]), tokens)
        new = layout.from_canonical(new)
        return jax.tree.map(lambda x, y: x.at[layer, target].set(y[0], mode="drop"), kv_pages, new)

    return lax.fori_loop(0, jnp.where(jnp.any(is_changed), dims.num_layers, 0), move, kv_pages)
