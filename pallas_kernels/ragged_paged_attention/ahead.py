"""Attention to later tokens, by which an image's tokens see each other, with any backend's pool.

Kernels attend causally. Afterwards the queries that see later tokens attend again, blockwise in plain XLA, to pages
that are converted to the canonical layout as they are gathered. A step without such queries spends no time on this.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.blockwise import (
    PREFILL_BLOCK_TOKENS,
    Attention,
    Queries,
    attend_blocks,
    fill_prefill_rows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.canonical_pages import CanonicalPages
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import INT4, Pages, pool_dtype


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
