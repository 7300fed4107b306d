"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) with per-head queries and matrices.

A layer stores one latent per token, with r + d elements. A query's score is its dot product with the whole latent, and
the value is the latent's first r elements. The last d elements carry the position: RoPE rotates them in queries and
latents. The matrices that would expand latents to per-head keys and values are applied to queries and outputs instead
(absorbed). Rows with many new tokens attend to expanded keys and values (`expanded.py`) if this takes fewer operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.pallas_kernels.op import AUTO
from jaxserve.pallas_kernels.ragged_paged_attention import expanded
from jaxserve.pallas_kernels.ragged_paged_attention.attention import ragged_paged_attention, read_rows, select_for_pool
from jaxserve.pallas_kernels.ragged_paged_attention.blockwise import LayerPages
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions, HeadMatrices, MLAInputs
from jaxserve.pallas_kernels.ragged_paged_attention.pools import BACKENDS
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages

_BLOCK_TOKENS = 32  # decode tokens, which follow each other, seldom share a block with prefill tokens


def mla_attention(
    inputs: MLAInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    options: AttentionOptions,
    *,
    backend: str = AUTO,
) -> tuple[Float[Array, "N Q v"], Pages]:
    """Write the new latents to their rows' pages, then attend with per-head queries (MLA).

    If a row may have `expanded.break_even_queries` or more tokens, such rows attend to expanded latents. Matrices are
    then absorbed only for the other rows' tokens, a block at a time.

    Args:
        inputs: per-head queries, new latents, per-head matrices and rows.
        kv_pages: pool of latents; consumed, as in `ragged_paged_attention`.
        layer: layer in the pool.
        options: static options, with the rank of the latents.
        backend: "auto" or a name in `BACKENDS`.

    Returns:
        Each query's per-head outputs, and the updated pool.
    """
    T, Q, matrices = inputs.latents.shape[0], inputs.q.shape[1], inputs.matrices
    latent_inputs = inputs.absorbed(inputs.q)
    kind = latent_inputs.kind(options)
    name = select_for_pool(backend, kind, Q, kv_pages)
    rows = read_rows(name, inputs.rows, kv_pages)
    inputs = inputs._replace(rows=rows)
    can_expand = BACKENDS[name].expands_latents and inputs.tree_mask is None and not options.last_only
    min_queries = expanded.break_even_queries(matrices) if can_expand else None
    if min_queries is None or min_queries > T:
        latent_inputs = inputs.absorbed(matrices.absorb(inputs.q))
        out, kv_pages = ragged_paged_attention(latent_inputs, kv_pages, layer, options, backend=name)
        return matrices.values(out), kv_pages
    token_id = jnp.arange(T, dtype=jnp.int32)
    is_short = rows.live_q_lens() < min_queries
    is_absorbed = is_short[rows.row_ids(token_id)] & (token_id < rows.cu_q_lens[rows.num_rows])
    latent_inputs = inputs.absorbed(_multiply_some(is_absorbed, HeadMatrices.absorb, matrices, inputs.q))
    short_only = dataclasses.replace(options, max_queries=min_queries - 1)
    out, kv_pages = ragged_paged_attention(latent_inputs, kv_pages, layer, short_only, backend=name)
    out = _multiply_some(is_absorbed, HeadMatrices.values, matrices, out)
    pages = LayerPages(kv_pages, layer, kind)
    return expanded.attend(inputs.rotated_q(), matrices, pages, rows, options.scale, min_queries, out), kv_pages


def _multiply_some(
    is_wanted: Bool[Array, "T"],
    multiply: Callable[[HeadMatrices, Array], Array],
    matrices: HeadMatrices,
    x: Float[Array, "T Q a"],
) -> Float[Array, "T Q b"]:
    """Return `multiply(matrices, x)` for blocks of 32 tokens with a wanted token, and zeros for other blocks.

    Args:
        is_wanted: mask of the tokens that need a result.
        multiply: function from matrices and some tokens' heads `[t, Q, a]` to `[t, Q, b]`.
        matrices: matrices of all tokens.
        x: all tokens' heads.
    """
    T = x.shape[0]
    block = min(_BLOCK_TOKENS, T)

    def fill(index: Int32[Array, ""], out: Float[Array, "T Q b"]) -> Float[Array, "T Q b"]:
        start = jnp.minimum(index * block, T - block)  # the last block may repeat tokens of the previous one

        def compute() -> Float[Array, "T Q b"]:
            some = lax.dynamic_slice_in_dim(x, start, block)
            return lax.dynamic_update_slice_in_dim(out, multiply(matrices.for_queries(start, block), some), start, 0)

        return lax.cond(jnp.any(lax.dynamic_slice_in_dim(is_wanted, start, block)), compute, lambda: out)

    shape = jax.eval_shape(multiply, matrices, x)
    return lax.fori_loop(0, -(-T // block), fill, jnp.zeros(shape.shape, shape.dtype))
