"""Quest: decoding rows attend to the pages whose keys may score highest, found by bounds of each page's keys.

A page has the minimum and the maximum of its keys, by head and element (Quest, Tang et al. 2024). They bound the score
of every key in the page for a query. A row attends to the pages with the highest bounds, to its first page and to its
latest one, whose keys are not all written. The kernels read such lists of pages as they are.

Heads share one list per row: a page counts by the head for which it comes closest to that head's best page, so that
heads with larger scores do not decide for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.api.sparsity_config import NUM_DENSE_LAYERS
from jaxserve.layers.kv_forms import HeadForm, HeadVectors, NewTokens
from jaxserve.pallas_kernels import ragged_paged_attention as ops
from jaxserve.pallas_kernels.ragged_paged_attention import (
    AttentionInputs,
    AttentionOptions,
    Pages,
    PagesToRead,
    RaggedRows,
    pool_page_size,
)


class BoundedPages(NamedTuple):
    """KV pool, and the bounds of the keys in each page."""

    pages: Pages
    bounds: Float[Array, "L N K limits"]
    """Maximum of a page's keys, then of its negated keys: a query's scores are bounded by one matmul."""


@dataclass(frozen=True)
class BoundedHeads(HeadForm[BoundedPages]):
    """Keys and values whose pages have bounds.

    Attributes:
        budget: maximum number of tokens that a row attends to if it chooses its pages.
        axis: mesh axes over whose devices the heads are divided, if sizes are one device's.
    """

    budget: int
    axis: tuple[str, ...] | None = None

    def new_pages(
        self, backend: str, *, num_layers: int, num_pages: int, page_size: int, dtype: jnp.dtype
    ) -> BoundedPages:
        """Return an empty pool for a named backend."""
        sizes = {"num_layers": num_layers, "num_pages": num_pages, "page_size": page_size}
        pages: Pages = ops.new_pages(backend, self.kind, **sizes, dtype=dtype)
        is_wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1
        shape = (num_layers, num_pages, self.num_kv_heads, 2 * self.head_dim)
        return BoundedPages(pages, jnp.zeros(shape, dtype if is_wide else jnp.bfloat16))

    def move_tokens(
        self, backend: str, kv_pages: BoundedPages, page_table: Int[Array, "rows M"], *moves: Array
    ) -> BoundedPages:
        """Raise an error: tokens move only after drafts, which an engine with bounds has refused."""
        raise AssertionError("rows that choose pages take no drafts")

    def choice_bytes(self, num_rows: int, num_tokens: int, num_heads: int, max_len: int, page_size: int) -> int:
        """Return the float32 bytes of all rows' bounds."""
        return 4 * num_rows * -(-max_len // page_size) * self.token_size

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: BoundedPages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
    ) -> tuple[Float[Array, "N Q V"], BoundedPages]:
        """Rotate, write keys, values and bounds, and attend; rows in `new.choosing` to the pages that they choose."""
        assert isinstance(new.v, Array), "only latents have matrices"
        inputs = AttentionInputs(new.q, new.k, new.v, rows, new.rope).rotated(last_only=options.last_only)
        page_size = pool_page_size(backend, kv_pages.pages)
        bounds = _with_keys(kv_pages.bounds, inputs, layer, page_size)
        num_pages = self.budget // page_size
        if new.choosing is not None and num_pages < rows.page_table.shape[1]:
            first = (rows.last_tokens()[0] if options.last_only else rows).cu_q_lens[:-1]
            queries = inputs.q.at[first].get(mode="clip")
            chosen = self._choose(queries, bounds, layer, rows, new.choosing, page_size)
            rows = rows._replace(pages_to_read=chosen)
        heads = HeadVectors(self.num_kv_heads, self.head_dim)
        out, pages = heads.attend(new, rows, kv_pages.pages, layer, options, backend=backend)
        return out, BoundedPages(pages, bounds)

    def _choose(
        self,
        queries: Float[Array, "R Q H"],
        bounds: Float[Array, "L N K limits"],
        layer: Int[Array, ""],
        rows: RaggedRows,
        choosing: Bool[Array, " R"],
        page_size: int,
    ) -> PagesToRead:
        """Return the pages that rows attend to: all, except for rows in `choosing` with more pages than the budget.

        Args:
            queries: each row's query, rotated.
            bounds: bounds of all pages.
            layer: layer in the pool; the first ones do not choose.
            rows: the step's rows.
            choosing: rows that choose, which have one token each.
            page_size: tokens per page.
        """
        num_kept = self.budget // page_size
        R, M = queries.shape[0], rows.page_table.shape[1]
        table = rows.with_gathered_table().page_table
        limits = bounds.at[layer, table].get(mode="clip").astype(jnp.float32)  # [R, M, K, 2H]
        q = queries.astype(jnp.float32).reshape(R, self.num_kv_heads, -1, self.head_dim)
        q = jnp.concatenate([jnp.maximum(q, 0), jnp.maximum(-q, 0)], axis=-1)
        score = jnp.einsum("rkgh,rmkh->rkgm", q, limits)
        column = jnp.arange(M, dtype=jnp.int32)[None, :]
        last = ((rows.kv_lens - 1) // page_size)[:, None]
        score = jnp.where((column < last)[:, None, None, :], score, np.finfo(np.float32).min)
        nearest = jnp.max(score - jnp.max(score, axis=-1, keepdims=True), axis=(1, 2))
        if self.axis is not None:
            nearest = lax.pmax(nearest, self.axis)
        nearest = jnp.where((column == 0) | (column == last), jnp.inf, jnp.where(column < last, nearest, -jnp.inf))
        _, best = lax.top_k(nearest, num_kept)
        chosen = jnp.pad(jnp.sort(best, axis=1), ((0, 0), (0, M - num_kept)))
        num_skipped = last[:, 0] + 1 - num_kept
        chooses = choosing & (num_skipped > 0) & (layer >= NUM_DENSE_LAYERS)
        return PagesToRead(jnp.where(chooses[:, None], chosen, column), jnp.where(chooses, num_skipped, 0))


def _with_keys(
    bounds: Float[Array, "L N K limits"], inputs: AttentionInputs, layer: Int[Array, ""], page_size: int
) -> Float[Array, "L N K limits"]:
    """Return the bounds with a step's new keys; a page begins with its first token.

    Args:
        bounds: bounds of all pages, donated.
        inputs: new keys after RoPE, and the rows.
        layer: layer in the pool.
        page_size: tokens per page.
    """
    keys, num_pages = jnp.concatenate([inputs.k, -inputs.k], axis=-1).astype(bounds.dtype), bounds.shape[1]
    page, offset = inputs.rows.slot_mapping(keys.shape[0], num_pages=num_pages, page_size=page_size)
    new = jnp.where(offset == 0, page, num_pages)  # out of range, dropped
    return bounds.at[layer, new].set(-jnp.inf, mode="drop").at[layer, page].max(keys, mode="drop")
