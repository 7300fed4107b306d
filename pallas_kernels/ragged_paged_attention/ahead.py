"""Attention to later tokens, by which an image's tokens see each other, with any backend's pool.

Kernels attend causally. Afterwards the queries that see later tokens attend again, blockwise in plain XLA, to pages
that are converted to the canonical layout as they are gathered. A step without such queries spends no time on this.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.blockwise import (
    PREFILL_BLOCK_TOKENS,
    Attention,
    LayerPages,
    Queries,
    attend_blocks,
    fill_prefill_rows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Heads
from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import INT4, Pages, decode, pool_dtype, values_of


@dataclass(frozen=True)
class CanonicalPages(LayerPages):
    """One layer in any layout, converted page by page.

    Attributes:
        layout: pool layout.
    """

    layout: Layout

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.pool_dims(values_of(self.kv_pages).shape).page_size

    def read(self, page_id: Int32[Array, "B b"]) -> tuple[Float32[Array, "B K S H"], Float32[Array, "B K S V"]]:
        """Return the keys and values in b pages for each of B sequences, as float32, with one token axis S."""
        assert isinstance(self.kind, Heads), "only keys and values per head can be seen from earlier tokens"
        ids, (B, num_pages) = page_id.reshape(-1), page_id.shape
        pages = jax.tree.map(lambda x: x.at[self.layer, ids].get(mode="clip")[None], self.kv_pages)
        vectors = decode(self.layout.to_canonical(pages))
        vectors = vectors.reshape(B, num_pages * self.page_size, *vectors.shape[3:])
        return jnp.swapaxes(vectors[:, :, 0::2], 1, 2), jnp.swapaxes(vectors[:, :, 1::2], 1, 2)


def with_later_tokens(
    out: Float[Array, "T Q V"],
    inputs: AttentionInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    options: AttentionOptions,
    layout: Layout,
) -> Float[Array, "T Q V"]:
    """Return the outputs after attending again with each query that sees later tokens.

    Args:
        out: causal outputs.
        inputs: the step's tokens and rows, with `ahead`.
        kv_pages: pool, to which the new tokens have been written.
        layer: layer in the pool.
        options: static options.
        layout: pool layout.
    """
    assert inputs.ahead is not None, "some layers let tokens see later ones"
    rows, q = inputs.rows, inputs.rotated().q
    is_packed = pool_dtype(kv_pages) == INT4
    factor = 1 / int4.block_size(q.shape[-1]) if is_packed else 1.0
    q = int4.rotate(q) * factor if is_packed else q
    attention = Attention(CanonicalPages(kv_pages, layer, inputs.kind(options), layout), options, inputs.sinks)
    counts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(inputs.ahead > 0, dtype=jnp.int32)])
    sees_later = counts[rows.cu_q_lens[1:]] > counts[rows.cu_q_lens[:-1]]

    def compute(queries: Queries) -> Float[Array, "1 X Q V"]:
        found = attend_blocks(attention, queries.take(q), queries, PREFILL_BLOCK_TOKENS)
        return (int4.rotate(found) * factor if is_packed else found).astype(out.dtype)

    return fill_prefill_rows(compute, out, rows, sees_later & (rows.live_q_lens() > 1), ahead=inputs.ahead)
