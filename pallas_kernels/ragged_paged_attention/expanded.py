"""Attention to keys and values expanded from latents, for rows with many new tokens, in plain XLA.

A block of latents is expanded once for all queries in its row, which then attend to it one tile after the other. Each
query-key pair takes n + d multiplications for the score and v for the value, instead of 2r + d with the latent;
expanding a key takes r (n + v). Trip counts follow the row lengths.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.blockwise import LayerPages, Softmax, absorb
from jaxserve.pallas_kernels.ragged_paged_attention.interface import HeadMatrices
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows

TILE_QUERIES = 128
BLOCK_TOKENS = 256


def break_even_queries(matrices: HeadMatrices) -> int | None:
    """Return how many new tokens a row must have so that expanding its latents takes fewer multiplications.

    The result holds for any row length; it is None if expansion never does.

    For q new tokens and k keys, absorbed matrices take q r (n + v) multiplications, and scores and values q k (2r + d).
    Expansion takes k r (n + v), and then q k (n + d + v).
    """
    _, nope_dim, rank = matrices.to_keys.shape
    expanded_dim = nope_dim + matrices.to_values.shape[1]
    saved = 2 * rank - expanded_dim
    return -(-rank * expanded_dim // saved) if saved > 0 else None


def attend(
    q: Float[Array, "T Q H"],
    matrices: HeadMatrices,
    pages: LayerPages,
    rows: RaggedRows,
    scale: float,
    min_queries: int,
    out: Float[Array, "T Q V"],
) -> Float[Array, "T Q V"]:
    """Attend to expanded latents with the rows that have at least `min_queries` new tokens.

    Args:
        q: per-head queries, after RoPE on their last elements.
        matrices: per-head matrices that expand latents.
        pages: the layer's pages, including the new latents.
        rows: the step's rows.
        scale: factor on the scores.
        min_queries: minimum new tokens per row.
        out: outputs of all tokens, which have the other rows' outputs.

    Returns:
        `out` with the outputs of these rows replaced.
    """
    (T, Q, _), V = q.shape, out.shape[2]
    tile, block_pages = min(TILE_QUERIES, T), max(1, BLOCK_TOKENS // pages.page_size)
    block = block_pages * pages.page_size
    q_lens = rows.live_q_lens()
    is_long = q_lens >= min_queries
    longest_first = jnp.argsort(q_lens, descending=True).astype(jnp.int32)
    # A row's last tile may continue past the row's tokens, and past the step's last token.
    heads_q = jnp.pad(q, ((0, tile), (0, 0), (0, 0))).swapaxes(0, 1)[None, :, None]
    state = Softmax.empty((1, Q, 1, T + tile, V))

    def attend_row(index: Int32[Array, ""], state: Softmax) -> Softmax:
        row_id = longest_first[index]
        q_len, kv_len, first_token = q_lens[row_id], rows.kv_lens[row_id], rows.cu_q_lens[row_id]
        page_table, num_cached = rows.page_table[rows.table_rows(row_id)], kv_len - q_len

        def absorb_block(block_index: Int32[Array, ""], state: Softmax) -> Softmax:
            column = block_index * block_pages + jnp.arange(block_pages, dtype=jnp.int32)
            page_id = jnp.where(column * pages.page_size < kv_len, page_table.at[column].get(mode="clip"), 0)
            key_position = block_index * block + jnp.arange(block, dtype=jnp.int32)
            latents = pages.read(page_id[None])[0][0, 0]
            latents = jnp.where(key_position[:, None] < kv_len, latents, 0)  # no stale NaN
            keys, values = _expand(latents, matrices, first_token)

            def absorb_tile(tile_index: Int32[Array, ""], state: Softmax) -> Softmax:
                query = tile_index * tile + jnp.arange(tile, dtype=jnp.int32)
                visible = (num_cached + query)[:, None] >= key_position[None]
                visible &= (query < q_len)[:, None]
                start = first_token + tile_index * tile
                tile_q = lax.dynamic_slice_in_dim(heads_q, start, tile, 3).astype(jnp.float32) * scale
                new_state = absorb(state.queries(start, tile), tile_q, keys[None], values[None], visible[None])
                return state.with_queries(start, new_state)

            first_tile = jnp.maximum(block_index * block - num_cached, 0) // tile
            return lax.fori_loop(first_tile, (q_len + (tile - 1)) // tile, absorb_tile, state)

        return lax.fori_loop(0, (kv_len + (block - 1)) // block, absorb_block, state)

    state = lax.fori_loop(0, jnp.sum(is_long, dtype=jnp.int32), attend_row, state)
    token_id = jnp.arange(T, dtype=jnp.int32)
    is_expanded = is_long[rows.row_ids(token_id)] & (token_id < rows.cu_q_lens[rows.num_rows])
    found = state.result()[0, :, 0, :T].swapaxes(0, 1)
    return jnp.where(is_expanded[:, None, None], found.astype(out.dtype), out)


def _expand(
    latents: Float32[Array, "S W"], matrices: HeadMatrices, query: Int32[Array, ""]
) -> tuple[Float32[Array, "Q S H"], Float32[Array, "Q S V"]]:
    """Expand S latents to every query head's keys and values; a key ends with the latent's rotated elements.

    Args:
        latents: latents of one row.
        matrices: per-head matrices.
        query: index of one of the row's queries.
    """
    (Q, _, rank), (S, W) = matrices.to_keys.shape, latents.shape
    content, rotated = latents[:, :rank], jnp.broadcast_to(latents[:, rank:], (Q, S, W - rank))
    keys, values = (
        jnp.einsum("sr,qhr->qsh", content, matrix.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        for matrix in matrices[:2]
    )
    if matrices.terms is not None:
        keys, values = matrices.terms.added(keys, values, content, query)
    return jnp.concatenate([keys, rotated], axis=-1), values
